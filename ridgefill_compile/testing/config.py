"""What a random decoder looks like and what is filled of it: values that print as the call that makes them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch


class _ShortRepr:
    """Prints the entries that differ from their defaults, so that shrunk examples are short."""

    def __repr__(self) -> str:
        entries = [
            (field, getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        ]
        shown = ", ".join(f"{field.name}={value!r}" for field, value in entries if value != field.default)
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, repr=False)
class DecoderConfig(_ShortRepr):
    """Anatomy of a random decoder. The defaults are the plain one.

    Attributes:
        layers, width, heads, kv_heads, head_dim, inner, vocabulary: sizes, all free of each other but for
            `heads`, a multiple of `kv_heads`, and `head_dim`, a multiple of 4.
        residual: "pre" x + f(norm x); "post" norm(x + f(x)); "branch" x + norm f(x); "sandwich"
            x + norm f(norm x); "parallel" x + attention(norm x) + mlp(norm x).
        norm: "rms" and "layer" as torch's modules, "spelt" an RMS norm from single ops with a cast to fp32.
        positions: "rotary" on whole heads, "partial" on half of each, "learned", "alibi", or "none".
        attention: "sdpa" with a mask, "causal" SDPA with `is_causal` where no mask is needed, "grouped" SDPA
            that repeats keys itself, "eager" matmul, softmax, matmul.
        bias: biases in every projection of attention and MLP.
        fused: one projection for queries, keys and values.
        qk_norm: norm per head on queries and keys.
        gated: SiLU-gated MLP instead of GELU.
        flat: the MLP works on [batch * rows, width].
        rows_first: states are kept as [batch, rows, kv_heads, head_dim] instead of heads first.
        unrotated: the key state is kept before rotation, and rotated on use.
        window: rows that a query sees, itself included; None for all.
        softcap: bound on attention scores; eager attention only.
        tied: the logits use the embedding's weight.
        latent: width of the latent that attention keeps in place of keys and values, which unfold from it, with one
            rotated key part for all heads beside it; None: keys and values are kept.
        experts: of each MLP, of which a row takes two (or the one there is): 0 for one MLP without a choice.
        grouped: experts run as sort, gather, grouped matrix product and scatter; otherwise as a sum over all of them,
            most of them times 0.
        recurrence: what mixes rows in every other layer, from the first on, in place of attention: a causal
            convolution and then the "delta" rule or "linear" attention, both with decay; None: attention everywhere.
        shared: last layers that read the keys and values of the last layer before them that writes any.
        streams: residual streams; each branch reads a mixture of them and writes to all.
        per_layer: width of an input to each layer that leads round the residual stream, made of the tokens; 0 for none.
        seed: of the weights.
    """

    layers: int = 3
    width: int = 10
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 4
    inner: int = 14
    vocabulary: int = 31
    residual: Literal["pre", "post", "branch", "sandwich", "parallel"] = "pre"
    norm: Literal["rms", "layer", "spelt"] = "rms"
    positions: Literal["rotary", "partial", "learned", "alibi", "none"] = "rotary"
    attention: Literal["sdpa", "causal", "grouped", "eager"] = "sdpa"
    bias: bool = False
    fused: bool = False
    qk_norm: bool = False
    gated: bool = False
    flat: bool = False
    rows_first: bool = False
    unrotated: bool = False
    window: int | None = None
    softcap: float | None = None
    tied: bool = False
    latent: int | None = None
    experts: int = 0
    grouped: bool = False
    recurrence: Literal["delta", "linear"] | None = None
    shared: int = 0
    streams: int = 1
    per_layer: int = 0
    seed: int = 0

    @property
    def rotary_dim(self) -> int:
        """Entries of each head that rotate."""
        return {"rotary": self.head_dim, "partial": self.head_dim // 2}.get(self.positions, 0)

    @property
    def writing_layers(self) -> int:
        """Layers that write states: the first ones."""
        return self.layers - self.shared

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer mixes rows by a recurrence."""
        return self.recurrence is not None and layer % 2 == 0 and layer < self.writing_layers

    @property
    def source_layer(self) -> int:
        """The layer whose keys and values the last layers share."""
        return max(layer for layer in range(self.writing_layers) if not self.is_recurrent(layer))


@dataclass(frozen=True, repr=False)
class Routing(_ShortRepr):
    """A prompt, and what to fill of it.

    Attributes:
        batch, rows: shape of the prompt.
        tail: last rows that run exactly, from 1 to rows - 1.
        split: first late layer, fewer than the decoder's layers.
        pads: rows of left padding before the first prompt of the batch; fewer than `rows`.
        route: what prefix rows of late layers read (see the option of that name).
        selected: prefix rows that stay exact, as the option `rows` has them; None: none do.
        first_rows: how many first rows stay exact, too; at most `rows - tail`.
    """

    batch: int = 1
    rows: int = 4
    tail: int = 1
    split: int = 1
    pads: int = 0
    route: Literal["ridge", "identity"] = "ridge"
    selected: str | None = None
    first_rows: int = 0

    def prompt(self, vocabulary: int, seed: int = 0) -> torch.Tensor:
        """Random ids, int64 [batch, rows]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(vocabulary, (self.batch, self.rows), generator=generator)

    def padding(self) -> torch.Tensor | None:
        """The padding mask, bool [batch, rows], or None."""
        if self.pads == 0:
            return None
        mask = torch.ones(self.batch, self.rows, dtype=torch.bool)
        mask[0, : self.pads] = False
        return mask

    def inputs(self, config: DecoderConfig, keep: int = 1) -> dict[str, Any]:
        """Arguments of a call of a random decoder: `ids`, `padding` if there is any, and `logits_to_keep`."""
        padding = self.padding()
        given = {} if padding is None else {"padding": padding}
        return {"ids": self.prompt(config.vocabulary), **given, "logits_to_keep": keep}
