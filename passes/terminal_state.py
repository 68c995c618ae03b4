"""The state that a filled prefix leaves a recurrence, corrected once, before the tail goes on from it.

A filled row adds to a late recurrence's state what its predicted input says, and the tail reads the sum of all these
errors. Their mean is measured beforehand: dM, the exact state minus the filled one, as a mean over prompts. Per
sequence and head (and channel of the key, where each has a decay of its own):

    M += s rho dM                           M [B, H, K, V], dM [H, K, V], s: the option `state_correction`

rho is the share of the state's weight that filled rows hold. With g_t the logarithm of row t's decay:

    D <- e^(g_t) D + 1        F <- e^(g_t) F + [row t is filled]        rho = F / D

Rows selected to stay exact are not filled. Rows of padding write nothing and count in neither sum, so a padded prompt
is corrected as it is alone. The weights of former turns' rows are not known: the state they left counts as one row's,
which is not filled.

The scan becomes two, of N rows with a tail of T, at the last multiple P of its tile that is no row of the tail:

    y_1, M = scan of rows 0..P-1, from the initial state        P = (N - T) // TILE * TILE
    y_2, M' = scan of rows P..N-1, from M + s rho dM            y = cat([y_1, y_2])

So both scans have the tiles that the one had, and nothing is computed twice, or exactly that was not. Fewer than a tile
of filled rows, those between P and N - T, are scanned after the correction: rho does not count them, and their own
errors stay. (To make them exact instead would give a longer tail than asked for, and one of no fixed length.)

Of a prompt in pieces the same is done in the chunk that the tail begins in. How much each row before it still weighs is
not known there: the state that it starts from counts as one row's, and as filled by the share of those rows that is. (A
former turn's have had all the prefix to fade.) A chunk that begins behind P corrects the state that it starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ridgefill_compile.passes.calls import arguments
from ridgefill_compile.passes.correct import layer_lines
from ridgefill_compile.passes.emit import Emitter
from ridgefill_compile.passes.inline import inline
from ridgefill_compile.passes.locate import Located
from ridgefill_compile.passes.rows import IntLike, same
from ridgefill_compile.recurrences.table import RECURRENCES
from ridgefill_compile.recurrences.tiles import TILE

AT_START = "at_start"  # where a chunk corrects states before its first row


@dataclass(frozen=True)
class StateCorrection:
    """What is added to late states: late layer -> dM [H, K, V], and how much of it."""

    strength: float
    differences: Mapping[int, Tensor]


@dataclass(frozen=True)
class LateScans:
    """Of every layer behind the split: its recurrence, and why others are left alone, by layer."""

    found: dict[int, Node]
    left_alone: dict[int, str]

    def told(self) -> tuple[list[str], list[str]]:
        """Which layers are corrected, and which are left alone and why."""
        left: dict[str, list[int]] = {}
        for layer, reason in self.left_alone.items():
            left.setdefault(reason, []).append(layer)
        return layer_lines({"states at the prefix's end": self.found}), layer_lines(left)

    def shape(self, layer: int) -> tuple[int, ...]:
        """[H, K, V] of a layer's state."""
        return tuple(int(size) for size in self.found[layer].meta["val"][1].shape[1:])


def late_scans(located: Located, split: int) -> LateScans:
    """Recurrences of the layers behind the split: those whose input a route predicts.

    Args:
        located: anatomy of the captured graph.
        split: first late layer.
    """
    mine: dict[int, list[Node]] = {}
    for node in located.tokens.graph.nodes:
        if node.op == "call_function" and node.target in RECURRENCES:
            above = [layer.index for layer in located.layers if layer.input < node]
            if above and above[-1] > split:
                mine.setdefault(above[-1], []).append(node)
    found, left_alone = {}, {}
    for layer, scans in mine.items():
        unfit = [scan.target for scan in scans if RECURRENCES[scan.target].log_decay is None]  # type: ignore[index]
        if unfit:
            name = unfit[0].name().replace("::", ".")  # type: ignore[union-attr]
            left_alone[layer] = f"the state of {name} is no matrix with logarithms of its decay"
        elif len(scans) > 1:
            left_alone[layer] = "several recurrences in one layer"
        else:
            found[layer] = scans[0]
    return LateScans(found, left_alone)


def correct_states(
    emit: Emitter,
    scans: Mapping[int, Node],
    strength: float,
    end: int | Node | str,
    difference: Callable[[int, Node], Node],
    selected: Node | None = None,
    valid: Node | None = None,
    before: Node | None = None,
) -> None:
    """Correct the state of late recurrences.

    Args:
        emit: writes the routed graph.
        scans: late layer -> its recurrence in that graph, which is replaced.
        strength: s.
        end: where the filled prefix ends: T, last prompt rows; or, in a chunk, positions of the rows before P, int64
            [P], or AT_START.
        difference: adds dM [H, K, V] of a layer, on the device of a node, at the insert point.
        selected: positions of the prefix rows that are exact, int64 [count] or [B, count].
        valid: the padding mask, [B, keys].
        before: of each row of the prompt before a chunk, whether it is filled.
    """
    for layer, scan in scans.items():
        given = arguments(scan)
        if end == AT_START and given["initial_state"] is None:
            continue  # nothing was filled before
        extra = {"selected": selected, "valid": valid, "before": before}
        extra["scanned"] = end if isinstance(end, Node) else None
        with emit.graph.inserting_before(scan):
            extra["difference"] = difference(layer, given["key"])
            outputs, state = inline(emit, *_scan_in_two(scan, given, extra, strength, end))
        for reader in list(scan.users):
            reader.replace_all_uses_with(outputs if reader.args[1] == 0 else state)
            emit.graph.erase_node(reader)
        emit.graph.erase_node(scan)


def _scan_in_two(
    scan: Node, given: Mapping[str, Any], extra: Mapping[str, Node | None], strength: float, end: int | Node | str
) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Node]]:
    """What to write in a scan's place, as a function of tensors, and its operands."""
    nodes = {name: value for name, value in {**given, **extra}.items() if isinstance(value, Node)}
    settings = {name: value for name, value in given.items() if name not in nodes}
    known = RECURRENCES[scan.target]  # type: ignore[index]
    assert known.log_decay is not None
    decay = known.log_decay

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(nodes, values, strict=True))
        more = {name: named.pop(name, None) for name in extra}
        difference = more.pop("difference")
        assert difference is not None
        call = {name: {**settings, **named}[name] for name in given}
        if end == AT_START:
            state = call["initial_state"]
            share = begun(call["key"], more["valid"]) * filled_of(more["before"], call["key"], more["valid"])
            share = share.reshape(-1, *[1] * (state.dim() - 1))
            call["initial_state"] = state + strength * share * difference
            outputs, final = known.op(*call.values())
            return outputs, final
        scanned, rows = more.pop("scanned"), call["key"].shape[1]
        if isinstance(end, int):  # said so, it is known to leave no fewer than the tail for every number of rows
            boundary = rows - (end + (rows - end) % TILE)
        else:
            assert scanned is not None
            boundary = scanned.shape[0]
        return corrected_scan(known.op, call, decay, strength, difference, boundary, **more)

    return run, list(nodes.values())


def corrected_scan(
    op: Callable[..., tuple[Tensor, Tensor]],
    call: Mapping[str, Any],
    decay: str,
    strength: float,
    difference: Tensor,
    boundary: IntLike,
    selected: Tensor | None = None,
    valid: Tensor | None = None,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final state of a scan whose state is corrected before its tail.

    Args:
        op: the recurrence.
        call: its arguments by name, in order. All tensors but `initial_state` [B, H, K, V] have rows: [B, N, ..].
        decay: the name of the logarithms of the decay.
        strength: s.
        difference: dM, float32 [H, K, V]
        boundary: P
        selected: see `correct_states`.
        valid: see `correct_states`.
        before: see `correct_states`; by the share of these that is filled, the initial state is that of filled rows.
    """
    apart = {name: value for name, value in call.items() if isinstance(value, Tensor) and name != "initial_state"}
    first = {**call, **{name: value[:, :boundary] for name, value in apart.items()}}
    second = {**call, **{name: value[:, boundary:] for name, value in apart.items()}}
    outputs_before, state = op(*first.values())
    if selected is None:  # nobody reads these outputs; the state alone is had without
        _, state = op(*{**first, "query": first["key"][:, :0]}.values())
    filled, present = (each[:, :boundary] for each in rows_that_count(call["key"], selected, valid))
    former = None
    if call["initial_state"] is not None:
        one = begun(call["key"], None if before is None else valid)
        former = (one, one * filled_of(before, call["key"], valid))
    share = filled_share(first[decay], filled, present, former)
    while share.dim() < state.dim():
        share = share.unsqueeze(-1)
    outputs, final = op(*{**second, "initial_state": state + strength * share * difference}.values())
    return torch.cat([outputs_before, outputs], 1), final


def rows_that_count(like: Tensor, selected: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """1 for each row that is filled (were it in the prefix), and for each row of the prompt; 0 for others.

    Args:
        like: [B, N, ..]
        selected: positions of exact rows, int64 [count] or [B, count].
        valid: the padding mask [B, keys], of which the last N are this prompt's.

    Returns:
        Two of float32 [B, N].
    """
    batch, rows = like.shape[:2]
    if valid is None:
        present = like.new_ones(batch, rows, dtype=torch.float32)
    else:
        present = (_on(valid, like)[:, -rows:] != 0).to(torch.float32)
    if selected is None:
        return present, present
    return present.scatter(1, _on(selected, like).expand(batch, -1), 0.0), present


def filled_of(before: Tensor | None, like: Tensor, valid: Tensor | None) -> Tensor | float:
    """Which share of each sequence's prompt rows before a chunk is filled, float32 [1 or B]; 0 of a prompt at once,
    which has none.

    Args:
        before: see `correct_states`.
        like: [B, N, ..], N the rows of the chunk.
        valid: the padding mask [B, keys], of which the last N are the chunk's; rows of padding are not counted.
    """
    if before is None:
        return 0.0
    filled = (_on(before, like) != 0).to(torch.float32).unsqueeze(0)
    if valid is None or _is_of_these_rows(valid, like):
        return filled.mean(1)
    # `before` names two rows at least, the mask perhaps none: by index, since a slice would ask which is longer.
    padded = torch.nn.functional.pad(_on(valid, like) != 0, (2, 0))
    first = padded.shape[1] - like.shape[1] - filled.shape[1]
    present = padded.index_select(1, torch.arange(filled.shape[1], device=like.device) + first).to(torch.float32)
    return (present * filled).sum(1) / present.sum(1).clamp_min(1.0)


def _on(value: Tensor, like: Tensor) -> Tensor:
    """A value where a late layer lives: a model may be spread over devices."""
    return value if value.device == like.device else value.to(like.device)


def _is_of_these_rows(valid: Tensor, like: Tensor) -> bool:
    """Whether a padding mask says nothing of earlier rows."""
    return same(valid.shape[1], like.shape[1])


def begun(like: Tensor, valid: Tensor | None) -> Tensor:
    """1 for each sequence that has rows before these, and not just padding: float32 [B].

    Args:
        like: [B, N, ..]
        valid: the padding mask [B, keys], of which the last N are these rows'; None, or if there are no others: every
            sequence has.
    """
    if valid is None or _is_of_these_rows(valid, like):
        return like.new_ones(like.shape[0], dtype=torch.float32)
    return (_on(valid, like)[:, : -like.shape[1]] != 0).any(1).to(torch.float32)


def filled_share(g: Tensor, filled: Tensor, present: Tensor, former: tuple[Tensor, Tensor] | None) -> Tensor:
    """Share of a state's weight that filled rows hold, between 0 and 1.

    Args:
        g: logarithm of the decay, at most 0: [B, P, H], or [B, P, H, K].
        filled: 1 for filled rows, 0 for others, [B, P].
        present: 1 for rows that have a weight, 0 for padding, [B, P].
        former: of a state there was before, which counts as one row, the same: [B] each; None: there was none.

    Returns:
        float32 [B, H] or [B, H, K]; 0 where no row has a weight.
    """
    decays = g.to(torch.float32)
    # What decays a row are those after it. To take its own off their sum would cost digits, and be NaN at a decay to 0.
    following = torch.cat([decays[:, 1:], torch.zeros_like(decays[:, :1])], 1)
    weights = following.flip(1).cumsum(1).flip(1).exp()
    filled, present = (each.reshape(*each.shape, *[1] * (weights.dim() - 2)) for each in (filled, present))
    total = (weights * present).sum(1)
    shared = (weights * filled).sum(1)
    if former is not None:
        weight = decays.sum(1).exp()
        there, of_it = (each.reshape(-1, *[1] * (weight.dim() - 1)) for each in former)
        total, shared = total + there * weight, shared + of_it * weight
    share: Tensor = shared / total.clamp_min(torch.finfo(torch.float32).tiny)
    return share.clamp(0.0, 1.0)
