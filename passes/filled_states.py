"""Keys and values of filled rows, changed where they are made: caches and attention alike read what they became.

    K                       [B, H, N, D]     a late layer's new keys
    K~ = cat([change(K[:, :, :N-T]),  K[:, :, N-T:]], rows)

Rows of the prefix that are selected to stay exact are put back as they were, and the tail's are not touched.

Where a prompt comes in pieces, the chunk that the tail begins in also changes the filled rows before it, in the cache:

    cat([older, K], rows)      older[.., j, :] -> change(older)[.., j, :]      where `filled_before` says so
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.attention_states import JOINS, AttentionState
from ridgefill_compile.passes.calls import TO_THE_END, arguments, aten, positive, shape
from ridgefill_compile.passes.chunk_inputs import BEFORE
from ridgefill_compile.passes.emit import Emitter
from ridgefill_compile.passes.functionalize import COPIES
from ridgefill_compile.passes.inline import inline
from ridgefill_compile.passes.selected_rows import put_rows, take_rows


@dataclass
class FilledStates:
    """Changes the filled rows of late states, one after another.

    Attributes:
        emit: writes the routed graph.
        copies: node of the located graph -> the routed graph's; of a changed state, what its readers read by now.
        split_state: what predictions are made of.
        row_dim: its dimension that counts rows.
        tail: last prompt rows, which are exact.
        selected: positions of the prefix rows that are exact, too.
        given: further inputs of a chunk, by name.
    """

    emit: Emitter
    copies: dict[Node, Node]
    split_state: Node
    row_dim: int
    tail: int
    selected: Node | None
    given: Mapping[str, Node] = field(default_factory=dict)

    def change(self, state: AttentionState, change: Callable[[Node], Node]) -> None:
        """Let every reader of a state read `change` of its filled rows: nodes that it adds, of the same shape.

        Raises:
            CannotFill: rows are selected for each sequence apart, and the state does not count sequences apart; or
                earlier chunks' rows are to be changed, and their cache does not show where they are.
        """
        value = self.copies[state.rows]
        readers, joins = list(value.users), self._joins(value, state)
        with self.emit.graph.inserting_before(value.next):
            prefix = self.rows(value, state, 0, -self.tail)
            changed = change(prefix)
            if self.selected is not None:
                changed = self._put_back(changed, prefix, state, self.selected)
            exact = self.rows(value, state, -self.tail, TO_THE_END)
            whole = self.emit(aten.cat.default, [changed, exact], state.row_dim, like=value)
        for join, older in joins:
            with self.emit.graph.inserting_before(join):
                join.replace_input_with(older, self._earlier_rows(join, older, state, change))
        for reader in readers:
            reader.replace_input_with(value, whole)
        self.copies[state.rows] = whole

    def _joins(self, value: Node, state: AttentionState) -> list[tuple[Node, Node]]:
        """Where a chunk's rows join older ones, and the node that holds those; none of a state that is these rows."""
        found, is_kept_alone = [], False
        ahead, rank = [value] if BEFORE in self.given else [], len(shape(value))
        while ahead:
            node = ahead.pop()
            for reader in node.users:
                is_kept_alone |= reader.op == "output"
                if reader.target in COPIES:
                    ahead.append(reader)
                elif reader.target in JOINS or reader.target is aten.index_copy.default:
                    given = arguments(reader)
                    older, new = given["tensors"] if "tensors" in given else (given["self"], given["source"])
                    if new is not node or positive(given["dim"], rank) != state.row_dim:
                        continue
                    if len(shape(older)) == rank:
                        found.append((reader, older))
                    else:  # an empty cache
                        ahead.append(reader)
        if not found and not is_kept_alone and BEFORE in self.given:
            raise CannotFill(
                f"layer {state.layer}'s {state.role}s of earlier chunks cannot be told apart in the cache",
                value,
                "run the prompt at once, or do not rescale states",
            )
        return found

    def _earlier_rows(self, join: Node, older: Node, state: AttentionState, change: Callable[[Node], Node]) -> Node:
        """What an earlier chunk wrote, with its filled rows changed."""
        index = [arguments(join)["index"]] if join.target is aten.index_copy.default else []

        def merged(older: Tensor, changed: Tensor, before: Tensor, *index: Tensor) -> Tensor:
            length = older.shape[state.row_dim]
            first = index[0][:1] if index else length
            rows_of_prompt = before.shape[0]
            row = torch.arange(length, device=older.device) - first + rows_of_prompt
            is_before = (row >= 0) & (row < rows_of_prompt)
            filled = is_before & (before.to(row.device)[row.clamp(0, rows_of_prompt - 1)] != 0)
            return torch.where(
                filled.view([-1 if d == state.row_dim else 1 for d in range(older.dim())]), changed, older
            )

        (result,) = inline(self.emit, merged, [older, change(older), self.given[BEFORE], *index])
        return result

    def rows(self, value: Node, state: AttentionState, start: int, end: int) -> Node:
        """Rows `start:end` of a value like the state."""
        return self.emit(aten.slice.Tensor, value, state.row_dim, start, end, like=value)

    def _put_back(self, changed: Node, prefix: Node, state: AttentionState, index: Node) -> Node:
        """Changed rows, with the selected ones as they were."""
        batch = None if len(shape(index)) == 1 else state.batch_dim
        if len(shape(index)) > 1 and batch is None:
            raise CannotFill(
                f"layer {state.layer} writes {state.role}s that do not count sequences apart, and each has rows of its "
                "own that stay exact",
                prefix,
                "do not rescale or splice states, or select no rows",
            )
        kept = self.emit(take_rows, prefix, index, state.row_dim, batch, like=prefix)
        return self.emit(put_rows, changed, index, kept, state.row_dim, batch, like=prefix)
