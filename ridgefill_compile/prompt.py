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

    def sees_row_before(self, rows: int) -> Tensor | None:
        """Of the second and each later prompt row, whether some head lets it see the row before: bool [batch or 1,
        rows - 1]; None where nothing but causality hides any.
        """
        if self.weights_of is not None:
            return (self._of_columns(self.weights_of[..., : self.keys], rows, 1) > 0).any(1)
        if self.mask is None:
            return None
        mask = self.mask[(None,) * (4 - self.mask.dim())]
        before = self._of_columns(mask, rows, 1)
        if mask.dtype == torch.bool:
            return before.any(1)
        return (before > self._of_columns(mask, rows, 0) - HIDING).any(1)

    def _of_columns(self, value: Tensor, rows: int, back: int) -> Tensor:
        """Of [.., rows or 1, keys], each prompt row's entry for the row `back` before it, [batch, heads, rows - 1], but
        the first one's.
        """
        row = torch.arange(rows, device=value.device)
        if isinstance(self.columns, Tensor):
            row = self.columns[:rows]
        elif self.columns == "last":
            row = row + (self.keys - rows)
        column = row[1 - back : rows - back]
        if value.shape[-2] == 1:
            return value[:, :, 0].index_select(-1, column)
        index = column.reshape(1, 1, -1, 1).expand(value.shape[0], value.shape[1], -1, 1)
        return value[:, :, 1:].gather(-1, index).squeeze(-1)

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
        valid: rows that are not padding, bool [batch, rows]: by the padding mask that the model was called with, else
            by what attention sees; None: all.
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
            raise CannotFill(
                "rows are to be selected by their tokens, and the model was given none", hint="pass input_ids"
            )
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


def real_rows(attention: Sequence[LayerAttention], rows: int) -> Tensor | None:
    """Which rows are not padding in front of a sequence, by what attention sees: bool [batch or 1, rows]; None: all.

    Behind its first row, each row of a sequence sees the one before in some layer, and the first one does not see
    padding. So a sequence begins where the last unbroken run of such rows does.
    """
    told = [seen for each in attention if (seen := each.sees_row_before(rows)) is not None]
    if not told:
        return None
    joined = told[0]
    for seen in told[1:]:
        joined = joined | seen
    is_joined_later = joined.long().flip(-1).cumsum(-1).flip(-1) > 0
    row = torch.arange(rows, device=joined.device)
    begin = (joined.logical_not() & is_joined_later).long() * row[1:]
    return row >= begin.amax(-1, keepdim=True)
