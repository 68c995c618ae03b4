"""Prefill in pieces: chunks of a long prompt, each run by itself, filled as if the prompt had been run at once.

A row is filled if at least `tail` rows of the *prompt* come after it. A chunk alone does not show that, so the prompt's
length is said once:

    with ridgefill_compile.prompt_length(ids.shape[1]):
        model.generate(ids, prefill_chunk_size=1024)

or around a chunk loop of one's own. A chunk before the tail is filled whole, one in the tail runs exactly, and in one
that the tail begins in, its rows of the tail are exact. A chunk that is filled whole has no true logits: they are NaN.
Where maps do not predict the first rows of a sequence, those are exact, and so is the last one of their chunk.

Corrections are made once, in the chunk that the tail's first row is in: lengths are measured on the rows of the tail
that it holds, and what earlier chunks filled is rescaled in the cache; states of recurrences are corrected where the
prefix ends. So each is what it is for a prompt at once, where that chunk holds the rows to measure (`value_rescale`,
`key_rescale`) and the last tile of filled rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ridgefill_compile.errors import CannotFill, OptionError, RidgefillWarning
from ridgefill_compile.options import Options
from ridgefill_compile.passes.chunk_inputs import ChunkInputs, ChunkRows
from ridgefill_compile.passes.emit import inputs_of
from ridgefill_compile.passes.rows import IntLike
from ridgefill_compile.plan import prompt_rows
from ridgefill_compile.prompt import HIDING
from ridgefill_compile.recurrences.tiles import TILE

Compiled = Callable[..., Any]

PROMPT, WHOLE, BEGINNING = "prompt", "whole", "beginning"
"""A whole prompt; and what is filled of a chunk: all of it, or the rows before the tail (None: nothing)."""
CORRECTED = LENGTHS, STATES, STATES_AT_START = "lengths corrected", "states corrected", "states corrected at its start"
"""As BEGINNING, with corrections: of lengths alone, or of states, too, behind some rows of the chunk or before them."""


@dataclass
class PromptInPieces:
    """A prompt of `rows` rows, of which the first `done` have run; `filled`: whether each of those was filled."""

    rows: int
    done: int = 0
    filled: list[bool] = field(default_factory=list)

    def filled_rows(self, rows: int, tail: int) -> int:
        """How many of the next `rows` are to be filled; they count as done from now on."""
        before_tail = self.rows - tail - self.done
        self.done += rows
        return min(max(before_tail, 0), rows)


_current: ContextVar[PromptInPieces | None] = ContextVar("ridgefill_prompt", default=None)


@contextmanager
def prompt_length(rows: Any) -> Iterator[None]:
    """Inside, calls of a compiled model are chunks of one prompt of so many rows (padding included), in order.

    Rows of former turns, which the cache holds already, do not count.

    Raises:
        OptionError: the length is no whole number above 0.

    Warns:
        RidgefillWarning: no chunk of a compiled model came by.
    """
    if not isinstance(rows, int) or rows < 1:
        raise OptionError(f"prompt_length needs a whole number of rows, not {rows!r}")
    prompt = PromptInPieces(rows)
    before = _current.set(prompt)
    try:
        yield
    finally:
        _current.reset(before)
    if prompt.done == 0:
        warnings.warn(
            "prompt_length: no model compiled with backend 'ridgefill' ran in it", RidgefillWarning, stacklevel=3
        )


def counting_rows(compiled: Compiled, options: Options) -> Compiled:
    """A graph of one row, compiled exactly, that counts as a chunk where a prompt is under way.

    Warns:
        RidgefillWarning: the tail begins with it, so nothing is corrected.
    """

    def run(*inputs: Any) -> Any:
        prompt = _current.get()
        if prompt is not None and prompt.done < prompt.rows:
            begins = prompt.done == prompt.rows - options.tail and any(prompt.filled)
            if begins and (measured_counts(options) or options.state_correction):
                warnings.warn(
                    "the prompt's tail begins with a chunk of one row: what is filled stays uncorrected",
                    RidgefillWarning,
                    stacklevel=2,
                )
            prompt.done += 1
            prompt.filled.append(False)
        return compiled(*inputs)

    return run


def in_pieces() -> bool:
    """Whether a prompt is under way in pieces."""
    return _current.get() is not None


def further_inputs(options: Options, kind: str) -> ChunkInputs:
    """What the graph of a chunk of some kind is told beside the model's inputs."""
    if kind == BEGINNING:
        return ChunkInputs()
    return ChunkInputs(measured_counts(options), kind == STATES, kind == STATES_AT_START)


def measured_counts(options: Options) -> tuple[int, ...]:
    """How many rows of the tail lengths are measured on."""
    return tuple(sorted({options.value_rescale, options.key_rescale} - {0}))


@dataclass
class Chunk:
    """A compiled graph for chunks of one kind.

    Attributes:
        run: the graph; it takes what `further_inputs` names behind the model's inputs.
        sizes: what its symbolic sizes are.
        rows_filled: how many rows it has filled so far: none where it runs exactly.
        guards: what must hold of the sizes.
    """

    run: Compiled
    sizes: Sizes
    rows_filled: Callable[[], int] = lambda: 0
    guards: Sequence[Any] = ()


class InPieces:
    """A compiled prompt graph that knows what to do with a chunk; without `prompt_length` it is the graph as compiled.

    Args:
        module: Dynamo's graph.
        ready: it, compiled for a whole prompt: filled, or exact. None: not yet.
        compile_prompt: compiles it so, given a prompt's inputs.
        options: the backend's.
        filled: whether a whole prompt is filled, and so runs just its last `tail` rows exactly.
        compile_chunk: what is filled of a chunk (None: nothing), and the chunk's inputs -> the graph compiled so.
        first_rows: how many rows that begin a sequence stay exact.
    """

    def __init__(
        self,
        module: GraphModule,
        ready: Compiled | None,
        compile_prompt: Callable[[Sequence[Any]], Compiled],
        options: Options,
        filled: bool,
        compile_chunk: Callable[[str | None, Sequence[Any]], Chunk],
        first_rows: Callable[[], int],
    ) -> None:
        self.options, self.tail, self.filled = options, options.tail, filled
        self.compile_prompt, self.compile_chunk, self.first_rows = compile_prompt, compile_chunk, first_rows
        names = [node.name for node in inputs_of(module.graph)]
        given = [(place, name) for place, name in enumerate(names) if "_modules_" not in name and name[:7] != "l_self_"]
        self.padding = [place for place, name in given if "attention_mask" in name]  # [batch, keys]
        self.masks = [place for place, name in given if "mask" in name]  # [batch, heads, rows, keys]
        self.sizes = Sizes(module)
        self.rows: IntLike = next(prompt_rows(module))
        self.graphs: dict[str | None, Chunk] = {}
        if ready is not None:
            self.graphs[PROMPT] = Chunk(ready, self.sizes)  # the sizes it relies on are guarded by Dynamo

    def __call__(self, *inputs: Any) -> Any:
        """Run a prompt, or the next chunk of one."""
        prompt = _current.get()
        if prompt is None:
            return self.run(PROMPT, inputs)[0]
        count = self.sizes.value(self.rows, inputs)
        done, before = prompt.done, tuple(prompt.filled)
        filled = prompt.filled_rows(count, self.tail)
        tail_begins = filled < count and done + filled == prompt.rows - self.tail
        lengths, states = bool(measured_counts(self.options)), bool(self.options.state_correction)
        is_later = tail_begins and any(before) and (lengths or states)
        if filled == (count - self.tail if self.filled else 0) and not is_later:
            return self.run(PROMPT, inputs)[0]
        first = self.first_exact(inputs, count, done, filled) if filled else 0
        exact = [*range(first), *range(filled, count - 1)]
        # States end with a tile of the prompt, as if it had been run at once; nothing is shorter than two rows.
        scanned = min(max((prompt.rows - self.tail) // TILE * TILE - done, 0), filled)
        rows = ChunkRows(count, filled, exact, before, scanned)
        states = states and (scanned > 1 or any(before))
        if tail_begins and (any(before) or first < filled) and (lengths or states):
            kind: str | None = LENGTHS if not states else STATES if scanned > 1 else STATES_AT_START
        elif first == filled:
            kind = None
        else:
            kind = BEGINNING if exact or filled < count else WHOLE
        result, is_filled = self.run(kind, inputs, rows)
        end = filled if kind == WHOLE else min(filled, count - 1)  # of any other, the last row at least is exact
        prompt.filled += [is_filled and first <= row < end for row in range(count)]
        return result

    def first_exact(self, inputs: Sequence[Any], rows: int, done: int, filled: int) -> int:
        """How many of a chunk's first rows stay exact, since some sequence of the batch begins there."""
        wanted = self.first_rows()
        if not wanted:
            return 0  # without a look at the mask, which may lie on a device
        padding = [inputs[place] for place in self.padding if _rank(inputs[place]) == 2]
        if any(mask.shape[1] > done + rows for mask in padding):  # a former turn has begun it
            return 0
        hidden = [mask == 0 for mask in padding] or [
            _hidden_from_last(inputs[place]) for place in self.masks if _rank(inputs[place]) == 4
        ]
        # Of windows a last row sees the end alone, so the mask that shows most counts.
        begins = min((int(each.long().cumprod(1).sum(1).max()) for each in hidden), default=0)
        return min(max(begins + wanted - done, 0), filled)

    def run(self, kind: str | None, inputs: Sequence[Any], rows: ChunkRows | None = None) -> tuple[Any, bool]:
        """A prompt, or a chunk, on the graph for its kind, which is compiled when the first one comes by; and whether
        it was filled.

        Dynamo's guards were made before that. So sizes that this compilation relied on are looked at here.
        """
        if rows is not None and kind not in (None, WHOLE):
            device = next(x.device for x in inputs if isinstance(x, torch.Tensor))
            inputs = (*inputs, *further_inputs(self.options, kind).values(rows, device))
        if kind not in self.graphs:
            before = len(self.sizes.guards())
            if kind == PROMPT:
                self.graphs[kind] = Chunk(self.compile_prompt(inputs), self.sizes)
            else:
                self.graphs[kind] = self.compile_chunk(kind, inputs)
            new, known = self.sizes.guards()[before:], self.graphs[kind].sizes.places
            self.graphs[kind].guards = [guard for guard in new if guard.expr.free_symbols <= known.keys()]
        chunk = self.graphs[kind]
        if not all(chunk.sizes.holds(guard.expr, inputs) for guard in chunk.guards):
            raise CannotFill(
                f"a chunk of another kind of length than the ones before: {chunk.guards[0].expr} no longer holds",
                hint="call torch._dynamo.reset(), or use chunks of equal length",
            )
        before = chunk.rows_filled()
        result = chunk.run(*inputs)
        return result, chunk.rows_filled() > before


def _rank(value: Any) -> int | None:
    return value.dim() if isinstance(value, torch.Tensor) else None


def _hidden_from_last(mask: torch.Tensor) -> torch.Tensor:
    """Keys that no head of the last row sees, bool [batch, keys]; of a mask [batch, heads, rows, keys]."""
    last = mask[:, :, -1]
    return (last.logical_not() if mask.dtype == torch.bool else last < last.amax(-1, keepdim=True) - HIDING).all(1)


class Sizes:
    """What symbolic sizes of a graph are, told from its inputs."""

    def __init__(self, module: GraphModule) -> None:
        self.places: dict[Any, tuple[int, int | None]] = {}
        self.environment: ShapeEnv | None = None
        for place, node in enumerate(inputs_of(module.graph)):
            value = node.meta.get("example_value", node.meta.get("val"))
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            for dim, size in enumerate(sizes):
                if isinstance(size, torch.SymInt):
                    self.environment = size.node.shape_env
                    at = (place, dim if isinstance(value, torch.Tensor) else None)
                    self.places.setdefault(size.node.expr, at)

    def guards(self) -> list[Any]:
        """Conditions on sizes so far."""
        return [] if self.environment is None else self.environment.guards

    def value(self, size: IntLike, inputs: Sequence[Any]) -> int:
        """A size of one call."""
        return size if isinstance(size, int) else int(size.node.expr.subs(self._values(size.node.expr, inputs)))

    def holds(self, condition: Any, inputs: Sequence[Any]) -> bool:
        """Whether a condition is met in one call."""
        return bool(condition.subs(self._values(condition, inputs)) == True)  # noqa: E712 - sympy's own true

    def _values(self, expression: Any, inputs: Sequence[Any]) -> dict[Any, int]:
        found = {}
        for symbol in expression.free_symbols:
            place, dim = self.places[symbol]
            found[symbol] = int(inputs[place] if dim is None else inputs[place].shape[dim])
        return found
