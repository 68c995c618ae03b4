"""What a selector may look at: a prompt's ids, which of its rows are padding, and the attention of its layers.

Plain torch on tensors whose length may be symbolic, without reading values on the host: it is traced into the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.tokens import TokenTable

STUDIED_LAYERS = (3, 7, 11, 15)
"""Of the layers below the split, those whose attention the reference study sums (paper, table 5)."""


NO_TOKENS = "rows are to be selected by their tokens, and the model was given none"

HIDING = 5e3
"""How much lower than another a score's bias is that hides it: masks take 1e4, 1e9, or the lowest number there is."""


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer below the split, on true values.

    Attributes:
        layer: counted from 0.
        query: [batch, heads, rows, head size].
        key: [batch, heads or fewer, keys, head size].
        mask: bool (True: seen) or additive, broadcasting against [batch, heads, rows, keys]; None: no mask.
        causal: row i sees keys 0..i.
        scale: of the products; None: 1 / sqrt(head size).
        columns: where the prompt's own rows are among the keys: "first", "last", or their positions, int64 [rows].
        weights_of: where a model computes them itself: [batch, heads, rows, keys and sinks], after the softmax.
        sinks: columns behind the keys that take attention and give nothing.
    """

    layer: int
    query: Tensor | None
    key: Tensor | None
    mask: Tensor | None
    causal: bool
    scale: float | None
    columns: Any = "first"
    weights_of: Tensor | None = None
    sinks: int = 0

    @property
    def keys(self) -> int:
        """How many keys there are, rows of former turns among them."""
        if self.weights_of is not None:
            return self.weights_of.shape[-1] - self.sinks
        assert self.key is not None
        return self.key.shape[-2]

    def weights(self, start: int, end: int | None) -> Tensor:
        """Attention weights of prompt rows `start:end`, float32 [batch, heads, end - start, keys]."""
        if self.weights_of is not None:
            return self.weights_of[..., start:end, : self.keys].float()
        assert self.query is not None and self.key is not None
        key, rows = self.key, self.query.shape[-2]
        groups = self.query.shape[1] // key.shape[1]
        if groups > 1:
            key = key.repeat_interleave(groups, 1)
        query = self.query[..., start:end, :]
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (query @ key.transpose(-1, -2)).float() * scale
        if self.causal:
            row = torch.arange(rows, device=key.device)[start:end]
            hidden = torch.arange(key.shape[-2], device=key.device) > row.unsqueeze(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        if self.mask is not None:
            mask = self.mask if self.mask.shape[-2] == 1 else self.mask[..., start:end, :]
            seen = mask.dtype == torch.bool
            scores = scores.masked_fill(mask.logical_not(), -torch.inf) if seen else scores + mask.float()
        return scores.softmax(-1).nan_to_num(0.0)  # rows of padding see nothing

    def first_seen(self, rows: int) -> Tensor | None:
        """The first of the prompt's rows that each of them sees in some head, int64 [batch or 1, rows]; `rows` where it
        sees none; None where nothing but causality hides any.
        """
        if self.weights_of is not None:
            return _first(self._of_rows(self.weights_of[..., : self.keys].amax(1), rows) > 0)
        if self.mask is None:
            return None
        mask = self.mask[(None,) * (4 - self.mask.dim())]
        seen = self._of_rows(mask.expand(*mask.shape[:-1], self.keys), rows)
        if seen.dtype != torch.bool:
            most = seen.amax(-1, keepdim=True)
            seen = (seen > most - HIDING) & (most > -HIDING)
        seen = seen.any(1)
        if self.causal:
            row = torch.arange(rows, device=seen.device)
            seen = seen & (row <= row.unsqueeze(1))
        return _first(seen)

    def _of_rows(self, value: Tensor, rows: int) -> Tensor:
        """Of [.., keys], the columns of the prompt's own rows."""
        if isinstance(self.columns, Tensor):
            return value.index_select(-1, self.columns[:rows])
        return value[..., self.keys - rows :] if self.columns == "last" else value[..., :rows]

    def on_prefix(self, weights: Tensor, rows: int, prefix: int) -> Tensor:
        """Of attention weights, the columns of prefix rows: [.., prefix]."""
        if isinstance(self.columns, Tensor):
            return weights.index_select(-1, self.columns[:prefix])
        if self.columns == "last":
            return weights[..., -rows:][..., :prefix]
        return weights[..., :prefix]


@dataclass(frozen=True)
class Prompt:
    """What a selector may look at.

    Attributes:
        batch, rows, prefix: sequences; prompt rows of each; those of them before the tail.
        device: of the split state.
        ids: token ids [batch, rows]; None where the model was given embeddings.
        valid: rows that are not padding, bool [batch, rows]: by the padding mask that the model was called with, where
            its columns for these rows are known, else by what attention sees; None: all.
        first: position of the first row: the rows of former turns in a cache that grows, else 0.
        attention: of the layers below the split that have any, in order.
        late_attention: of the late layers, in a first sweep in which the last rows ran them over filled rows alone;
            only where a selector asks for it (`sweep`).
        tokens: the tokenizer's table, if it was saved with the maps.
    """

    batch: int
    rows: int
    prefix: int
    device: torch.device
    ids: Tensor | None = None
    valid: Tensor | None = None
    first: int = 0
    attention: tuple[LayerAttention, ...] = ()
    late_attention: tuple[LayerAttention, ...] = ()
    tokens: TokenTable | None = None

    def table(self) -> tuple[Tensor, TokenTable]:
        """Token ids and what they are.

        Raises:
            CannotFill: the model was given embeddings, or the maps know no tokenizer.
        """
        if self.ids is None:
            raise CannotFill(NO_TOKENS, hint="pass input_ids")
        if self.tokens is None:
            raise CannotFill(
                "rows are to be selected by their tokens, and the maps hold no table of them",
                hint="calibrate with tokenizer=..., or choose another selector",
            )
        return self.ids, self.tokens

    def read_by(self, start: int, end: int | None, layers: Sequence[int] | None = None) -> list[Tensor]:
        """Attention of prompt rows `start:end` to the prefix in each of some layers, [batch, heads, end - start,
        prefix]; by default the layers of the reference study, or all where none of those is there.

        Raises:
            CannotFill: no layer below the split has attention whose weights can be computed.
        """
        wanted = STUDIED_LAYERS if layers is None else tuple(layers)
        found = [each for each in self.attention if each.layer in wanted] or list(self.attention)
        if not found:
            raise CannotFill(
                "rows are to be selected by attention, and no layer below the split has attention in one call",
                hint="load the model with attn_implementation='sdpa', raise the split, or choose another selector",
            )
        return [each.on_prefix(each.weights(start, end), self.rows, self.prefix) for each in found]


def _first(seen: Tensor) -> Tensor:
    """The first column that is seen, of [batch, rows, columns]; their number where none is."""
    first = seen.view(torch.int8).argmax(-1)
    return torch.where(seen.any(-1), first, seen.shape[-1])


def real_rows(attention: Sequence[LayerAttention], rows: int) -> Tensor | None:
    """Which rows are not padding in front of a sequence, by what attention sees: bool [batch or 1, rows]; None: all.

    A sequence's first row sees itself, some row behind sees it, and neither it nor any row behind it sees a row before.
    So a sequence begins at the last row of which this is true in all layers at once. (A row need not see the one before
    it: an index may have chosen others.)
    """
    told = [first for each in attention if (first := each.first_seen(rows)) is not None]
    if not told:
        return None
    first = told[0]
    for other in told[1:]:
        first = torch.minimum(first, other)
    row = torch.arange(rows, device=first.device)
    first = first.expand(-1, rows)
    behind = first.flip(-1).cummin(-1).values.flip(-1)[:, 1:]
    begins = (first[:, :-1] == row[:-1]) & (behind == row[:-1])
    return row >= (begins * row[:-1]).amax(-1, keepdim=True)
