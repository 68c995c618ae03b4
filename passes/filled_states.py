"""Keys and values of filled rows, changed where they are made: caches and attention alike read what they became.

    K                       [B, H, N, D]     a late layer's new keys
    K~ = cat([change(K[:, :, :N-T]),  K[:, :, N-T:]], rows)

Rows of the prefix that are selected to stay exact are put back as they were, and the tail's are not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Node

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.attention_states import AttentionState
from ridgefill_compile.passes.calls import TO_THE_END, aten, shape
from ridgefill_compile.passes.emit import Emitter
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
    """

    emit: Emitter
    copies: dict[Node, Node]
    split_state: Node
    row_dim: int
    tail: int
    selected: Node | None

    def change(self, state: AttentionState, change: Callable[[Node], Node]) -> None:
        """Let every reader of a state read `change` of its filled rows: nodes that it adds, of the same shape.

        Raises:
            CannotFill: rows are selected for each sequence apart, and the state does not count sequences apart.
        """
        value = self.copies[state.rows]
        readers = list(value.users)
        with self.emit.graph.inserting_before(value.next):
            prefix = self.rows(value, state, 0, -self.tail)
            changed = change(prefix)
            if self.selected is not None:
                changed = self._put_back(changed, prefix, state, self.selected)
            exact = self.rows(value, state, -self.tail, TO_THE_END)
            whole = self.emit(aten.cat.default, [changed, exact], state.row_dim, like=value)
        for reader in readers:
            reader.replace_input_with(value, whole)
        self.copies[state.rows] = whole

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
