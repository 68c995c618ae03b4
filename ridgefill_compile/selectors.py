"""Which prefix rows stay exact in every layer, like the tail: scores from values that the graph holds anyway.

A selector is a share of the prefix and a function `scores(prompt) -> [batch, prefix]`: the rows with the highest scores
are kept exact, ties to the lower row. It is traced into the compiled graph, so it is plain torch on tensors whose
length may be symbolic, without reading values on the host. One of your own is ten lines:

    @dataclass(frozen=True)
    class EverySoOften:
        share: float = 0.1

        def scores(self, prompt):
            row = torch.arange(prompt.prefix, device=prompt.device)
            return (row % 10 == 0).float().expand(prompt.batch, -1)

    model.compile(backend="ridgefill", options={"maps": "maps/", "rows": EverySoOften()})

Selectors are composed: of `"pooled:0.05+attention:0.05"` the first takes its share, the next its own of what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from ridgefill_compile.errors import CannotFill, OptionError
from ridgefill_compile.prompt import Prompt
from ridgefill_compile.token_selectors import lexical_rows, number_rows, protected_scores, special_rows

READERS = 64
"""Prompt rows whose attention ranks the prefix."""


@runtime_checkable
class Selector(Protocol):
    """See the module: `share` of the prefix is kept, the rows that score highest.

    A selector whose scores come from ids, positions and padding alone may say so with `from_tokens = True`: then it
    also selects rows of a prompt in pieces, whose end is not there yet.
    """

    @property
    def share(self) -> float:
        """Of the prefix rows, between 0 and 1."""

    def scores(self, prompt: Prompt) -> Tensor:
        """[batch, prefix], any dtype; the higher the sooner it is kept."""


@dataclass(frozen=True)
class Attention:
    """Rows that get most attention from the last prompt rows, summed over heads, readers and layers (paper, "+ rows").

    A value error `e` of row j moves the output of reader i by exactly `a_ij e`.

    Attributes:
        before: last prompt rows that do not read: where they are scored, those who choose must not see them.
    """

    share: float = 0.1
    readers: int = READERS
    layers: tuple[int, ...] | None = None
    before: int = 0

    def scores(self, prompt: Prompt) -> Tensor:
        """[batch, prefix]"""
        start, end = last_rows(self.readers, self.before)
        return torch.stack([w.sum((1, 2)) for w in prompt.read_by(start, end, self.layers)]).sum(0)


@dataclass(frozen=True)
class QuestionBlind:
    """The control to `Attention`: read by the rows before the tail, which do not know the question."""

    share: float = 0.1
    readers: int = READERS
    layers: tuple[int, ...] | None = None

    def scores(self, prompt: Prompt) -> Tensor:
        """[batch, prefix]"""
        end = prompt.prefix
        read = prompt.read_by(torch.sym_max(end - self.readers, 0), end, self.layers)
        return torch.stack([w.sum((1, 2)) for w in read]).sum(0)


@dataclass(frozen=True)
class Pooled:
    """Each row's largest attention over heads, readers and layers, and that of its neighbours.

    A sum drowns one head's sharp look in every head's habits. And what is looked up, a number say, is read token by
    token: so a row counts as much as the best of the `pool` rows around it.

    Attributes:
        before: see `Attention`.
    """

    share: float = 0.1
    readers: int = READERS
    layers: tuple[int, ...] | None = None
    pool: int = 31
    before: int = 0

    def scores(self, prompt: Prompt) -> Tensor:
        """[batch, prefix]"""
        read = prompt.read_by(*last_rows(self.readers, self.before), self.layers)
        best = torch.stack([w.amax((1, 2)) for w in read]).amax(0)
        return best_around(best, self.pool)


def best_around(scores: Tensor, pool: int) -> Tensor:
    """The largest of the `pool` scores around each, [batch, prefix]; torch's max_pool1d holds a graph to one length."""
    edges = (pool // 2, (pool - 1) // 2)
    return torch.nn.functional.pad(scores, edges, value=-torch.inf).unfold(-1, pool, 1).amax(-1)


def last_rows(readers: int, before: int) -> tuple[int, int | None]:
    """Ends of the slice that holds the last `readers` rows but for the very last `before`."""
    return -(readers + before), -before or None


@dataclass(frozen=True)
class Random:
    """The control to every other: as many rows, by a hash of seed and position."""

    from_tokens: ClassVar[bool] = True
    share: float = 0.1
    seed: int = 0

    def scores(self, prompt: Prompt) -> Tensor:
        """[batch, prefix]"""
        row = torch.arange(prompt.prefix, device=prompt.device) + prompt.first
        return scrambled(row, self.seed).expand(prompt.batch, -1)


def scrambled(number: Tensor, seed: int) -> Tensor:
    """A hash of whole numbers, int64 in [0, 2^31): the same on every machine (a multiplicative hash, twice)."""
    mixed = (number + (seed * 0x9E3779B1) % 2**31) % 2**31
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed = ((mixed ^ (mixed >> 15)) * factor) % 2**31
    return mixed ^ (mixed >> 15)


@dataclass(frozen=True)
class LongerTail:
    """The control of equal cost: the last rows of the prefix, as if the tail were longer."""

    from_tokens: ClassVar[bool] = True
    share: float = 0.1

    def scores(self, prompt: Prompt) -> Tensor:
        """[batch, prefix]"""
        return torch.arange(prompt.prefix, device=prompt.device).expand(prompt.batch, -1)


@dataclass(frozen=True)
class Protected:
    """Rows of rare names, identifiers and parts of words, whatever is asked (paper, quality mode).

    The rarest first, by how often the token occurs in the calibration text; rows of other tokens come after all of
    them. The paper keeps the rarest quarter of these rows, which came to 3 to 10 % of the prefix; here the share is of
    the prefix, since how many rows are computed must not depend on what the prompt says.
    """

    from_tokens: ClassVar[bool] = True
    share: float = 0.1

    def scores(self, prompt: Prompt) -> Tensor:
        """[batch, prefix]"""
        ids, table = prompt.table()
        valid = None if prompt.valid is None else prompt.valid[:, : prompt.prefix]
        _, score = protected_scores(ids[:, : prompt.prefix], table, valid)
        return score


@dataclass(frozen=True)
class Numbers:
    """Rows of numbers; what is left of the share goes to the last rows of the prefix."""

    from_tokens: ClassVar[bool] = True
    share: float = 0.1

    def scores(self, prompt: Prompt) -> Tensor:
        """[batch, prefix]"""
        ids, table = prompt.table()
        found = number_rows(ids[:, : prompt.prefix], table).long()
        return found * prompt.prefix + torch.arange(prompt.prefix, device=prompt.device)


@dataclass(frozen=True)
class Probe:
    """Two sweeps (paper, 27B): the last rows first run the late layers over filled rows alone, and what they look at
    there is kept exact in the second sweep.

    Special tokens come first, then sentences that share words with the question (the lexical net), up to `net` of the
    prefix, then rows by the probe's attention, pooled as in `Pooled`. The paper's share depends on what the prompt says
    and came to 28 to 31 % of the prefix; here it is fixed. Late layers that are recurrences run over the filled prefix
    in the first sweep, too, where the paper's start from an empty state.
    """

    share: float = 0.3
    sweep: int = 256
    pool: int = 31
    net: float = 0.05

    def scores(self, prompt: Prompt) -> Tensor:
        """[batch, prefix]"""
        if not prompt.late_attention:
            raise CannotFill("rows are to be selected by a probe, and no late layer has attention in one call")
        read = [w.on_prefix(w.weights(-self.sweep, None), prompt.rows, prompt.prefix) for w in prompt.late_attention]
        best = torch.stack([w.amax((1, 2)) for w in read]).amax(0)
        probed = best_around(best, self.pool).double()
        if self.net == 0:
            return probed
        ids, table = prompt.table()
        shared = lexical_rows(ids, table, prompt.prefix, prompt.valid)
        netted = shared & (shared.long().cumsum(1) <= count_of(self.net, prompt.prefix))
        return probed + 2 * netted + 4 * special_rows(ids[:, : prompt.prefix], table)


SELECTORS: dict[str, Callable[[float], Sequence[Selector]]] = {
    "attention": lambda share: [Attention(share)],
    "pooled": lambda share: [Pooled(share)],
    "mixed": lambda share: [Pooled(share / 2), Attention(share / 2)],
    "question_blind": lambda share: [QuestionBlind(share)],
    "random": lambda share: [Random(share)],
    "tail": lambda share: [LongerTail(share)],
    "protected": lambda share: [Protected(share)],
    "numbers": lambda share: [Numbers(share)],
    "probe": lambda share: [Probe(share)],
}


def parse_rows(spec: Any) -> tuple[Selector, ...]:
    """The selectors of option `rows`: a text such as `"pooled:0.05+attention:0.05"`, a selector, or several.

    A share alone is of rows that `Pooled` chooses: of the selectors that read the question it finds as many needles as
    any, and wins back most of the loss.

    Raises:
        OptionError: an unknown selector, or a share that is none.
    """
    if spec is None:
        return ()
    if isinstance(spec, int | float) and not isinstance(spec, bool):
        spec = Pooled(spec)
    found: list[Any] = list(spec) if isinstance(spec, list | tuple) else [spec]
    if isinstance(spec, str):
        found = [selector for part in spec.split("+") for selector in _parse_part(part.strip())]
    for selector in found:
        if not isinstance(selector, Selector):
            raise OptionError(f"option 'rows' must be text or selectors, not {selector!r}")
        share: Any = selector.share
        if not isinstance(share, int | float) or share is True or not 0 < share <= 1:
            raise OptionError(f"option 'rows': a share is above 0 and at most 1, not {share!r}")
    if sum(selector.share for selector in found) > 1 + 1e-9:
        raise OptionError(f"option 'rows': the shares of {spec!r} add up to more than 1")
    return tuple(found)


def _parse_part(part: str) -> Sequence[Selector]:
    name, *settings = part.split(":")
    if name not in SELECTORS or len(settings) > (2 if name == "random" else 1):
        known = ", ".join(sorted(SELECTORS))
        raise OptionError(f"option 'rows': {part!r} is no selector such as 'pooled:0.1'; known: {known}")
    try:
        share = float(settings[0]) if settings else 0.1
        seed = int(settings[1]) if len(settings) > 1 else 0
    except ValueError:
        raise OptionError(f"option 'rows': {part!r} needs a share such as 0.1 after the colon") from None
    return [Random(share, seed)] if name == "random" else SELECTORS[name](share)


def choose(prompt: Prompt, selectors: Sequence[Selector], first_rows: int = 0) -> Tensor:
    """Positions of the rows to keep, int64 [batch, count], ascending: the first ones of each sequence, and those that
    selectors choose of the others.
    """
    taken = torch.zeros(prompt.batch, prompt.prefix, dtype=torch.bool, device=prompt.device)
    if prompt.valid is not None:
        invalid = prompt.valid[:, : prompt.prefix].logical_not()
    parts: list[Tensor] = []
    if first_rows:
        parts.append(first_of(prompt, first_rows))
        taken = taken.scatter(1, parts[0], True)
    share, rest = 0.0, prompt.prefix - first_rows
    for selector in selectors:
        scores = scores_of(selector, prompt)
        if prompt.valid is not None:
            scores = scores.masked_fill(invalid, -1e300)  # before rows that are taken: a row is kept once
        scores = scores.masked_fill(taken, -torch.inf)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        before, share = count_of(share, rest), share + selector.share
        part = order[:, : count_of(share, rest) - before]  # rounded once: halves of an odd prefix are no more
        taken = taken.scatter(1, part, True)
        parts.append(part)
    return torch.cat(parts, -1).sort(-1).values


def scores_of(selector: Selector, prompt: Prompt) -> Tensor:
    """A selector's scores, float64 [batch, prefix], finite.

    Raises:
        CannotFill: it needs what is not there, raises anything, or gives another shape.
    """
    try:
        scores = selector.scores(prompt).double().nan_to_num(-1e299, neginf=-1e299)
        return scores.expand(prompt.batch, prompt.prefix)
    except CannotFill:
        raise
    except Exception as error:
        raise CannotFill(
            f"rows could not be selected by {type(selector).__name__}: {type(error).__name__}: {error}",
            hint="its scores(prompt) must give a tensor [batch, prefix], in operations that torch.compile can trace",
        ) from error


def first_of(prompt: Prompt, count: int) -> Tensor:
    """Positions of the first rows of each sequence that are not padding, int64 [batch, count]."""
    row = torch.arange(count, device=prompt.device).expand(prompt.batch, -1)
    if prompt.valid is None:
        return row
    return row + prompt.valid[:, : prompt.prefix - count].logical_not().long().cumprod(1).sum(1, keepdim=True)


def count_of_rows(share: float, first_rows: int, prefix: int) -> int:
    """How many rows `choose` keeps of a prefix, for selectors of this share in all."""
    return first_rows + count_of(share, prefix - first_rows)


def count_of(share: float, prefix: int) -> int:
    """How many of the prefix rows a share is, rounded half up; symbolic if `prefix` is."""
    exact = Fraction(str(share)).limit_denominator(10_000)
    return (2 * prefix * exact.numerator + exact.denominator) // (2 * exact.denominator)
