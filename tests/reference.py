"""A fill of a Llama by hand, in eager mode, on the model's own modules: slow, and plainly what the method says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from ridgefill_compile.maps import RidgeMaps

Correct = Callable[[int, str, Tensor, Tensor, Tensor], Tensor]
"""(layer, "keys" or "values", those of all rows, of the first tail rows as predicted, as they are) -> of all rows."""


def fill_by_hand(
    model: Any,
    ids: Tensor,
    maps: RidgeMaps,
    tail: int,
    count: int,
    correct: Correct,
    mask: Tensor | None = None,
    past: Any = None,
) -> dict[str, Tensor]:
    """Logits of the tail, and keys and values of every layer, all rows of `ids` in order.

    Args:
        model: a Llama.
        ids: prompt, int64 [batch, rows].
        maps: of one split.
        tail: last rows that are exact.
        count: of the first tail rows, how many are handed to `correct`.
        correct: called for the keys and the values of every layer whose input is predicted.
        mask: padding on the left, int64 [batch, rows].
        past: (keys, values) of each layer in front of the prompt.
    """
    batch, rows = ids.shape
    before = past[0][0].shape[-2] if past is not None else 0
    mask = torch.ones(batch, rows, dtype=torch.int64) if mask is None else mask
    base = model.model
    x = base.embed_tokens(ids)
    rotary = base.rotary_emb(x, torch.arange(before, before + rows)[None].expand(batch, -1))
    at = torch.arange(before, before + rows)
    seen = torch.arange(before + rows)[None] <= at[:, None]
    keys_seen = torch.cat([torch.ones(batch, before, dtype=torch.int64), mask], 1).bool()
    seen = seen[None, None] & keys_seen[:, None, None]
    found: dict[str, Tensor] = {}
    state = x
    for index, layer in enumerate(base.layers):
        if index == maps.split:
            state = x
        predicted = None
        if index > maps.split:
            predicted = state @ maps.matrix(index).T + maps.offset(index)
            x = torch.cat([predicted[:, :-tail], x[:, -tail:]], 1)
        new = dict(zip(("keys", "values"), keys_and_values(layer, x, rotary), strict=True))
        if predicted is not None:
            twice = dict(zip(("keys", "values"), keys_and_values(layer, predicted, rotary), strict=True))
            first = slice(rows - tail, rows - tail + count)
            new = {
                name: correct(index, name, value, twice[name][:, :, first], value[:, :, first])
                for name, value in new.items()
            }
        if past is not None:
            new = {name: torch.cat([past[index][i], value], -2) for i, (name, value) in enumerate(new.items())}
        found |= {f"{index}.{name}": value for name, value in new.items()}
        x = behind(layer, x, rotary, new["keys"], new["values"], seen)
    found["logits"] = model.lm_head(base.norm(x[:, -tail:]))
    return found


def keys_and_values(layer: Any, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """[batch, heads, rows, head size] each."""
    size = layer.self_attn.head_dim
    normed = layer.input_layernorm(x)
    keys, values = (
        each(normed).unflatten(-1, (-1, size)).transpose(1, 2)
        for each in (layer.self_attn.k_proj, layer.self_attn.v_proj)
    )
    return apply_rotary_pos_emb(keys, keys, *rotary)[0], values


def behind(layer: Any, x: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """The layer's result; that of filled rows is nonsense, and nobody reads it."""
    own = layer.self_attn
    queries = own.q_proj(layer.input_layernorm(x)).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
    queries = apply_rotary_pos_emb(queries, queries, *rotary)[0]
    shared = queries.shape[1] // keys.shape[1]
    scores = queries @ repeat_kv(keys, shared).mT * own.scaling
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    x = x + own.o_proj((weights @ repeat_kv(values, shared)).transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))
