"""Prefill in pieces: chunks of a long prompt, each run by itself, filled as if the prompt had been run at once.

A row is filled if at least `tail` rows of the *prompt* come after it. A chunk alone does not show that, so the prompt's
length is said once:

    with ridgefill_compile.prompt_length(ids.shape[1]):
        model.generate(ids, prefill_chunk_size=1024)

or around a chunk loop of one's own. A chunk before the tail is filled whole, one in the tail runs exactly, and in one
that the tail begins in, its rows of the tail are exact. A chunk that is filled whole has no true logits: they are NaN.
Where maps do not predict the first rows of a sequence, those are exact, and so is the last one of their chunk. So are
rows that selectors keep, those that go by tokens and positions alone: `prompt_length(ids)` tells them the prompt's ids.

Corrections are made once, in the chunk that the tail's first row is in: lengths are measured on the rows of the tail
that it holds, and what earlier chunks filled is rescaled in the cache; states of recurrences are corrected where the
prefix ends. So each is what it is for a prompt at once, where that chunk holds the rows to measure (`value_rescale`,
`key_rescale`) and the last tile of filled rows.
"""

from __future__ import annotations

import functools
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
from ridgefill_compile.plan import prompt_rows, sources_of_ids
from ridgefill_compile.prompt import HIDING
from ridgefill_compile.recurrences.tiles import TILE
from ridgefill_compile.rows_in_pieces import rows_to_keep
from ridgefill_compile.selectors import parse_rows
from ridgefill_compile.tokens import TokenTable

Compiled = Callable[..., Any]

PROMPT, WHOLE, BEGINNING, REFUSED = "prompt", "whole", "beginning", "refused"
"""A whole prompt; and what is filled of a chunk: all of it, some rows before the tail, or none though some were wanted
(None: none is wanted)."""
CORRECTED = LENGTHS, STATES, STATES_AT_START = "lengths corrected", "states corrected", "states corrected at its start"
"""As BEGINNING, with corrections: of lengths alone, or of states, too, behind some rows of the chunk or before them."""


@dataclass
class PromptInPieces:
    """A prompt of `rows` rows, of which the first `done` have run.

    Attributes:
        ids: of the whole prompt, int64 [batch, rows], on the CPU, if they were said.
        filled: of each row that has run, whether it was filled.
        former: rows of former turns; None: nobody has asked yet.
    """

    rows: int
    ids: torch.Tensor | None = None
    done: int = 0
    filled: list[bool] = field(default_factory=list)
    former: int | None = None

    def filled_rows(self, rows: int, options: Options) -> int:
        """How many of the next `rows` are before the tail, if it is worth filling these; all are done from now on."""
        before_tail = self.rows - options.tail - self.done
        self.done += rows
        return min(max(before_tail, 0), rows) if self.rows - options.tail >= options.min_fill else 0


_current: ContextVar[PromptInPieces | None] = ContextVar("ridgefill_prompt", default=None)


@contextmanager
def prompt_length(rows: Any) -> Iterator[None]:
    """Inside, calls of a compiled model are chunks of one prompt of so many rows, in order.

    Args:
        rows: of the prompt, padding included; or its ids, int64 [batch, rows], which selectors of tokens need. Rows of
            former turns, which the cache holds already, do not count.

    Raises:
        OptionError: the length is no whole number above 0.

    Warns:
        RidgefillWarning: no chunk of a compiled model came by, or fewer rows than were said.
    """
    ids = None
    if isinstance(rows, torch.Tensor):
        if rows.dim() != 2 or rows.is_floating_point():
            raise OptionError(f"prompt_length needs ids [batch, rows], not {rows.dtype} {list(rows.shape)}")
        ids, rows = rows.cpu(), rows.shape[1]
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise OptionError(f"prompt_length needs a whole number of rows, not {rows!r}")
    prompt = PromptInPieces(rows, ids)
    before = _current.set(prompt)
    try:
        yield
    finally:
        _current.reset(before)
    if prompt.done == 0:
        warnings.warn(
            "prompt_length: no model compiled with backend 'ridgefill' ran in it", RidgefillWarning, stacklevel=3
        )
    elif prompt.done < prompt.rows:
        warnings.warn(
            f"prompt_length: {prompt.rows} rows were said and {prompt.done} came, so the last ones were taken for rows "
            "before the tail, and logits may be NaN; say the rows that come, without those that the cache holds",
            RidgefillWarning,
            stacklevel=3,
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
        refused: tells why another chunk that could be filled runs on it exactly, given that chunk's inputs.
        guards: what must hold of the sizes.
    """

    run: Compiled
    sizes: Sizes
    rows_filled: Callable[[], int] = lambda: 0
    refused: Callable[[CannotFill, Sequence[Any]], None] = lambda refusal, inputs: None
    guards: Sequence[Any] = ()


class InPieces:
    """A compiled prompt graph that knows what to do with a chunk; without `prompt_length` it is the graph as compiled.

    Args:
        module: Dynamo's graph.
        ready: it, compiled for a whole prompt: filled, or exact. None: not yet.
        compile_prompt: compiles it so, given a prompt's inputs.
        options: the backend's.
        filled: whether a whole prompt is filled, and so runs just its last `tail` rows exactly.
        compile_chunk: what is filled of a chunk (None: nothing), the chunk's inputs, and why it is not filled -> the
            graph compiled so.
        first_rows: how many rows that begin a sequence stay exact.
        tokens: the tokenizer's table, if the maps hold it.
    """

    def __init__(
        self,
        module: GraphModule,
        ready: Compiled | None,
        compile_prompt: Callable[[Sequence[Any]], Compiled],
        options: Options,
        filled: bool,
        compile_chunk: Callable[[str | None, Sequence[Any], CannotFill | None], Chunk],
        first_rows: Callable[[], int],
        tokens: Callable[[], TokenTable | None],
    ) -> None:
        self.options, self.tail, self.filled = options, options.tail, filled
        self.compile_prompt, self.compile_chunk = compile_prompt, compile_chunk
        self.first_rows, self.tokens, self.selectors = first_rows, tokens, parse_rows(options.rows)
        names = [node.name for node in inputs_of(module.graph)]
        given = [(place, name) for place, name in enumerate(names) if "_modules_" not in name and name[:7] != "l_self_"]
        looked_up = sources_of_ids(module)
        if any("inputs_embeds" in name for name in names):
            looked_up = set()  # positions, at most
        self.ids = [place for place, node in enumerate(inputs_of(module.graph)) if node in looked_up]
        self.masks_of_rows = [place for place, name in given if "attention_mask" in name]  # [batch, keys]
        self.masks = [place for place, name in given if "mask" in name]  # [batch, heads, rows, keys]
        self.others = [place for place, name in given if "mask" not in name]  # caches among them
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
        filled = prompt.filled_rows(count, self.options)
        tail_begins = filled < count and done + filled == prompt.rows - self.tail
        lengths, states = bool(measured_counts(self.options)), bool(self.options.state_correction)
        is_later = tail_begins and any(before) and (lengths or states)
        if filled == (count - self.tail if self.filled else 0) and not is_later and not (done and self.selectors):
            return self.run(PROMPT, inputs)[0]
        try:
            kept = self.kept_rows(prompt, inputs, done, filled) if filled else set()
        except CannotFill as refusal:
            prompt.filled += [False] * count
            return self.run(REFUSED, inputs, refusal=refusal)[0]
        exact = sorted({*kept, *range(filled, count)} - {count - 1})
        # States end with a tile of the prompt, as if it had been run at once; nothing is shorter than two rows.
        scanned = min(max((prompt.rows - self.tail) // TILE * TILE - done, 0), filled)
        rows = ChunkRows(count, filled, exact, before, scanned)
        states = states and (scanned > 1 or any(before))
        if tail_begins and (any(before) or len(kept) < filled) and (lengths or states):
            kind: str | None = LENGTHS if not states else STATES if scanned > 1 else STATES_AT_START
        elif len(kept) == filled:
            kind = None
        else:
            kind = BEGINNING if kept or filled < count else WHOLE
        result, is_filled = self.run(kind, inputs, rows)
        never = {*exact} if kind == WHOLE else {*exact, count - 1}  # of any other, the last row at least is exact
        prompt.filled += [is_filled and row not in never for row in range(count)]
        return result

    def kept_rows(self, prompt: PromptInPieces, inputs: Sequence[Any], done: int, filled: int) -> set[int]:
        """Which of a chunk's first `filled` rows, those before the tail, stay exact.

        Raises:
            CannotFill: selectors cannot choose them, or the prompt was said to have other ids.
        """
        if prompt.ids is not None:
            self.check_ids(prompt, inputs, done)
        wanted = self.first_rows()
        if not wanted and not self.selectors:
            return set()  # without a look at the mask, which may lie on a device
        padding, former = self.padding(prompt, inputs, done)
        kept: set[int] = set()
        if wanted and not former:
            begins = 0 if padding is None else int(padding.max())
            kept.update(range(done, begins + wanted))
        if self.selectors:
            kept |= rows_to_keep(
                self.selectors,
                prompt.rows,
                self.tail,
                first_rows=0 if former else wanted,
                former=former,
                padding=padding,
                ids=prompt.ids,
                tokens=self.tokens(),
            )
        return {row - done for row in kept if done <= row < done + filled}

    def padding(self, prompt: PromptInPieces, inputs: Sequence[Any], done: int) -> tuple[torch.Tensor | None, int]:
        """How many rows of padding each sequence begins with, int64 [batch] on the CPU, as far as rows until now tell
        (None: nothing does); and how many rows of former turns there are.
        """
        masks = [inputs[place] for place in self.masks_of_rows if _rank(inputs[place]) == 2]
        if prompt.former is None:
            prompt.former = self.former_rows(prompt, masks[0].shape[1], inputs, done) if masks else 0
        former = prompt.former
        hidden = [mask[:, former : former + prompt.done] == 0 for mask in masks] or [
            _hidden_from_last(inputs[place]) for place in self.masks if _rank(inputs[place]) == 4
        ]
        # Of windows a last row sees the end alone, so the mask that shows most counts.
        begins = [each.long().cumprod(1).sum(1).cpu() for each in hidden]
        return (functools.reduce(torch.minimum, begins) if begins else None), former

    def former_rows(self, prompt: PromptInPieces, length: int, inputs: Sequence[Any], done: int) -> int:
        """How many rows of former turns there are, given how long the padding mask is and the rows before the chunk.

        The mask counts rows until now, or a loop hands every chunk that of the whole prompt, or of all rows of a static
        cache. A cache tells which: by what it counts (static ones), or by what it holds (growing ones).
        """
        others = [inputs[place] for place in self.others if isinstance(inputs[place], torch.Tensor)]
        counted = [int(value) for value in others if value.dim() == 0 and not value.is_floating_point()]
        if counted:
            return max(max(counted) - done, 0)
        held = [value.shape[2] for value in others if value.dim() == 4]
        by_mask = [rows for rows in (length - prompt.done, length - prompt.rows) if rows >= 0]
        known = [rows for rows in by_mask if rows + done in held]
        if known or not held:
            return known[0] if known else 0
        return by_mask[0] if by_mask else 0  # of sliding windows, say

    def check_ids(self, prompt: PromptInPieces, inputs: Sequence[Any], done: int) -> None:
        """Whether a chunk's ids are those that the prompt was said to have.

        Raises:
            CannotFill: they are others.
        """
        if prompt.ids is None or not self.ids:
            return
        said = prompt.ids[:, done : prompt.done]
        # Positions are looked up, too: the ids are one of the inputs that lookups come from.
        for mine in (torch.atleast_2d(inputs[place].cpu()) for place in self.ids):
            beams = max(len(mine) // len(said), 1)
            if torch.equal(said.repeat_interleave(beams, 0), mine):
                return
        raise CannotFill(
            "the ids of a chunk are not those that prompt_length was given",
            hint="give it the ids of the prompt that is run, [batch, rows], padding included",
        )

    def run(
        self,
        kind: str | None,
        inputs: Sequence[Any],
        rows: ChunkRows | None = None,
        refusal: CannotFill | None = None,
    ) -> tuple[Any, bool]:
        """A prompt, or a chunk, on the graph for its kind, which is compiled when the first one comes by; and whether
        it was filled (`refusal`: why it is not, if it could be).

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
                self.graphs[kind] = self.compile_chunk(kind, inputs, refusal)
            new, known = self.sizes.guards()[before:], self.graphs[kind].sizes.places
            self.graphs[kind].guards = [guard for guard in new if guard.expr.free_symbols <= known.keys()]
        elif refusal is not None:
            self.graphs[kind].refused(refusal, inputs)
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
