"""Generated decoders: small plain modules of every anatomy, with sizes that collide with the prompt's.

`fill_cases()` draws a decoder and what to fill of a prompt. A failure shrinks to a line that runs as printed:

    case = FillCase(config=DecoderConfig(residual='post', fused=True), rows=6, tail=2)
    logits, keys, values = case.decoder()(case.ids(), case.padding(), logits_to_keep=case.tail)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.decoders import enliven

LONGEST = 128  # rows that learned positions reach

Past = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


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
    """Anatomy of a generated decoder.

    Attributes:
        layers, width, heads, kv_heads, head_dim, inner, vocabulary: sizes, all free of each other but for
            `heads`, a multiple of `kv_heads`, and `head_dim`, a multiple of 4.
        residual: "pre" x + f(norm x); "post" norm(x + f(x)); "branch" x + norm f(x); "sandwich"
            x + norm f(norm x); "parallel" x + attention(norm x) + mlp(norm x).
        norm: "rms" and "layer" as torch's modules, "spelt" an RMS norm from single ops with a cast to fp32.
        positions: "rotary" on whole heads, "partial" on half of each, "learned", "alibi", or "none".
        attention: "sdpa" with a mask, "causal" SDPA with `is_causal` where no mask is needed, "grouped" SDPA
            that repeats keys itself, "eager" matmul, softmax, matmul.
        bias: biases in every projection.
        fused: one projection for queries, keys and values.
        qk_norm: norm per head on queries and keys.
        gated: SiLU-gated MLP instead of GELU.
        flat: the MLP works on [batch * rows, width].
        rows_first: states are kept as [batch, rows, kv_heads, head_dim] instead of heads first.
        unrotated: the key state is kept before rotation, and rotated on use.
        window: rows that a query sees, itself included; None for all.
        softcap: bound on attention scores; eager attention only.
        tied: the logits use the embedding's weight.
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
    seed: int = 0

    @property
    def rotary_dim(self) -> int:
        """Entries of each head that rotate."""
        return {"rotary": self.head_dim, "partial": self.head_dim // 2}.get(self.positions, 0)


class SpeltNorm(nn.Module):
    """RMS norm as most modelling files write it: in fp32, from single ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


_NORMS: dict[str, Callable[[int], nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm, "spelt": SpeltNorm}


@dataclass(frozen=True)
class Sight:
    """What all layers share."""

    positions: torch.Tensor  # of tokens, [batch or 1, rows]
    key_positions: torch.Tensor  # [batch or 1, keys]
    allowed: torch.Tensor | None  # keys a query sees, bool [batch or 1, 1, rows, keys]; None: its past
    distance: torch.Tensor  # query index minus key index, [rows, keys]


class Attention(nn.Module):
    """Self-attention; returns its output and the keys and values of all rows so far."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        queries, states = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.sizes = [queries, states, states]
        fused = [sum(self.sizes)] if config.fused else self.sizes
        self.inputs = nn.ModuleList(nn.Linear(config.width, size, bias=config.bias) for size in fused)
        self.output = nn.Linear(queries, config.width, bias=config.bias)
        if config.qk_norm:
            self.query_norm = _NORMS[config.norm](config.head_dim)
            self.key_norm = _NORMS[config.norm](config.head_dim)

    def forward(
        self, x: torch.Tensor, sight: Sight, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, rows, _ = x.shape
        config = self.config
        projected = [project(x) for project in self.inputs]
        if config.fused:
            projected = list(projected[0].split(self.sizes, dim=-1))
        query, key, value = (part.view(batch, rows, -1, config.head_dim) for part in projected)
        if config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        query = rotate(query, sight.positions, config.rotary_dim)
        if not config.unrotated:
            key = rotate(key, sight.positions, config.rotary_dim)
        key_state, value_state = self.extend(key, value, past)
        key, value = self.heads_first(key_state), self.heads_first(value_state)
        if config.unrotated:
            key = rotate(key, sight.key_positions, config.rotary_dim)
        mixed = self.mix(query, key, value, sight)
        return self.output(mixed.transpose(1, 2).reshape(batch, rows, -1)), key_state, value_state

    def extend(
        self, key: torch.Tensor, value: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of old and new rows, in the layout that is kept."""
        key, value = self.heads_first(key), self.heads_first(value)
        if past is None:
            return key, value
        dim = 1 if self.config.rows_first else 2
        return torch.cat([past[0], key], dim), torch.cat([past[1], value], dim)

    def heads_first(self, state: torch.Tensor) -> torch.Tensor:
        """Swaps the layout of a state, [batch, heads, rows, head_dim], if it is kept rows first."""
        return state.transpose(1, 2) if self.config.rows_first else state

    def mix(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sight: Sight) -> torch.Tensor:
        """Attention of [batch, heads, rows, head_dim] queries over [batch, kv_heads, keys, head_dim]."""
        config = self.config
        if config.attention != "grouped":
            key, value = (repeat(state, config.heads // config.kv_heads) for state in (key, value))
        mask = sight.allowed
        if config.positions == "alibi":
            slopes = 2.0 ** -torch.arange(1, config.heads + 1, device=query.device)
            bias = -slopes[:, None, None] * sight.distance
            mask = bias[None] if mask is None else bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        if config.attention != "eager":
            return functional.scaled_dot_product_attention(
                query, key, value, mask, is_causal=mask is None, enable_gqa=config.attention == "grouped"
            )
        scores = query @ key.transpose(-1, -2) * config.head_dim**-0.5
        if config.softcap is not None:
            scores = config.softcap * torch.tanh(scores / config.softcap)
        assert mask is not None
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, dim=-1) @ value


class Layer(nn.Module):
    """Attention and MLP, with the norms where the config wants them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, config.inner, bias=config.bias)
        self.down = nn.Linear(config.inner, config.width, bias=config.bias)
        if config.gated:
            self.gate = nn.Linear(config.width, config.inner, bias=config.bias)
        norms = {"sandwich": 4, "parallel": 1}.get(config.residual, 2)
        self.norms = nn.ModuleList(_NORMS[config.norm](config.width) for _ in range(norms))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Two or three matrices, row by row."""
        rows = x.reshape(-1, x.shape[-1]) if self.config.flat else x
        inner = self.up(rows)
        inner = functional.silu(self.gate(rows)) * inner if self.config.gated else functional.gelu(inner)
        return self.down(inner).view(x.shape)

    def forward(
        self, x: torch.Tensor, sight: Sight, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states: list[torch.Tensor] = []

        def attention(y: torch.Tensor) -> torch.Tensor:
            mixed, *kept = self.attention(y, sight, past)
            states.extend(kept)
            return mixed

        norms = self.norms
        match self.config.residual:
            case "pre":
                x = x + attention(norms[0](x))
                x = x + self.mlp(norms[1](x))
            case "post":
                x = norms[0](x + attention(x))
                x = norms[1](x + self.mlp(x))
            case "branch":
                x = x + norms[0](attention(x))
                x = x + norms[1](self.mlp(x))
            case "sandwich":
                x = x + norms[1](attention(norms[0](x)))
                x = x + norms[3](self.mlp(norms[2](x)))
            case "parallel":
                y = norms[0](x)
                x = x + attention(y) + self.mlp(y)
        return x, states[0], states[1]


class Decoder(nn.Module):
    """A decoder as its config says; fp32, eval mode, every weight of use."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        if config.positions == "learned":
            self.places = nn.Embedding(LONGEST, config.width)
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = _NORMS[config.norm](config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)  # torch draws them from its global generator
        enliven(self, config.seed)
        self.eval()

    def __repr__(self) -> str:
        return f"Decoder({self.config!r})"

    def forward(
        self,
        ids: torch.Tensor,
        padding: torch.Tensor | None = None,
        past: Past | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Reads `ids`, int64 [batch, rows], after the rows of `past`.

        Args:
            ids: tokens.
            padding: bool [batch, old and new rows], False on padding; None: none is padded.
            past: keys and values of every layer, as returned.
            logits_to_keep: last rows to give logits for; 0 for all.

        Returns:
            Logits [batch, kept rows, vocabulary], and per layer the keys and the values of all rows so far.
        """
        old = 0 if past is None else past[0][0].shape[1 if self.config.rows_first else 2]
        sight = self.sight(ids, padding, old)
        x = self.embedding(ids)
        if self.config.positions == "learned":
            x = x + self.places(sight.positions)
        keys, values = [], []
        for index, block in enumerate(self.blocks):
            x, key, value = block(x, sight, None if past is None else (past[0][index], past[1][index]))
            keys.append(key)
            values.append(value)
        return self.head(self.norm(x[:, -logits_to_keep:])), keys, values

    def sight(self, ids: torch.Tensor, padding: torch.Tensor | None, old: int) -> Sight:
        """Positions and mask for new rows after `old` ones. A row always sees itself, padded or not."""
        rows, config = ids.shape[1], self.config
        keys = torch.arange(old + rows, device=ids.device)
        distance = keys[old:, None] - keys
        places = keys[None] if padding is None else (padding.long().cumsum(1) - 1).clamp(min=0)
        plain = config.attention == "causal" and config.window is None and config.positions != "alibi"
        if plain and padding is None and old == 0:
            return Sight(places, places, None, distance)
        allowed = (distance >= 0)[None, None]
        if config.window is not None:
            allowed = allowed & (distance < config.window)
        if padding is not None:
            allowed = allowed & (padding[:, None, None, :] | (distance == 0))
        return Sight(places[:, old:], places, allowed, distance)


def rotate(x: torch.Tensor, positions: torch.Tensor, dim: int) -> torch.Tensor:
    """Rotary embedding of the first `dim` entries of each head of [batch, heads, rows, head_dim]."""
    if dim == 0:
        return x
    frequencies = 100.0 ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    angles = positions[:, None, :, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    turned, rest = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([turned, rest], dim=-1)


def repeat(state: torch.Tensor, times: int) -> torch.Tensor:
    """[batch, kv_heads, keys, head_dim] with each head `times` over."""
    if times == 1:
        return state
    batch, heads, keys, dim = state.shape
    return state[:, :, None].expand(batch, heads, times, keys, dim).reshape(batch, -1, keys, dim)


@dataclass(frozen=True, repr=False)
class FillCase(_ShortRepr):
    """A generated decoder and what to fill.

    Attributes:
        config: the decoder.
        batch, rows: shape of the prompt.
        tail: last rows that run exactly, from 1 to rows - 1.
        split: first late layer, from 1 to layers - 1.
        pads: rows of left padding before the first prompt of the batch; fewer than `rows`.
    """

    config: DecoderConfig
    batch: int = 1
    rows: int = 4
    tail: int = 1
    split: int = 1
    pads: int = 0

    def decoder(self) -> Decoder:
        """The decoder, anew at each call."""
        return Decoder(self.config)

    def ids(self, seed: int = 0) -> torch.Tensor:
        """A random prompt, int64 [batch, rows]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.config.vocabulary, (self.batch, self.rows), generator=generator)

    def padding(self) -> torch.Tensor | None:
        """The padding mask, bool [batch, rows], or None."""
        if self.pads == 0:
            return None
        mask = torch.ones(self.batch, self.rows, dtype=torch.bool)
        mask[0, : self.pads] = False
        return mask


_flag = st.booleans()


@st.composite
def decoder_configs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> DecoderConfig:
    """Any decoder. Sizes are small and overlap, so that equal sizes with different meanings are common."""
    attention = draw(st.sampled_from(["sdpa", "causal", "grouped", "eager"]))
    masked = attention != "causal"
    places = ["rotary", "partial", "learned", "none"] + ["alibi"] * masked
    kv_heads = draw(st.integers(1, 3))
    return DecoderConfig(
        layers=draw(st.integers(2, 4)),
        width=draw(st.integers(6, 24)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8, 12])),
        inner=draw(st.integers(6, 24)),
        vocabulary=draw(st.integers(8, 24)),
        residual=draw(st.sampled_from(["pre", "post", "branch", "sandwich", "parallel"])),
        norm=draw(st.sampled_from(["rms", "layer", "spelt"])),
        positions=draw(st.sampled_from(places)),
        attention=attention,
        window=draw(st.none() | st.integers(2, 8)) if masked else None,
        softcap=draw(st.none() | st.sampled_from([1.0, 4.0])) if attention == "eager" else None,
        seed=draw(st.integers(0, 3)),
        **{name: draw(_flag) for name in ("bias", "fused", "qk_norm", "gated", "flat", "rows_first", "tied")},
        unrotated=draw(_flag),
    )


@st.composite
def fill_cases(draw: Callable[[st.SearchStrategy[Any]], Any], padded: bool = True) -> FillCase:
    """Any decoder with any prompt; half of the prompts are as long as one of the decoder's sizes."""
    config = draw(decoder_configs())
    batch = draw(st.integers(1, 3))
    heads = config.heads, config.kv_heads, config.heads // config.kv_heads
    widths = config.width, config.inner, config.vocabulary, config.head_dim, config.heads * config.head_dim
    shares = [width // batch for width in widths if width % batch == 0]  # batch * rows is that width
    colliding = sorted({size for size in (*heads, *widths, *shares, config.layers) if size >= 3})
    rows = draw(st.integers(3, 24) | st.sampled_from(colliding))
    return FillCase(
        config,
        batch=batch,
        rows=rows,
        tail=draw(st.integers(1, rows - 1)),
        split=draw(st.integers(1, config.layers - 1)),
        pads=draw(st.integers(0, rows - 1)) if padded else 0,
    )
