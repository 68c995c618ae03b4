"""What mixes rows in a random decoder: attention in several forms, and recurrences behind a convolution."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgefill_compile import recurrences  # noqa: F401  (registers the operators)
from ridgefill_compile.testing.config import DecoderConfig

KERNEL = 3  # rows that a convolution sees

States = tuple[Tensor, Tensor]  # of one layer: keys and values, latents and rotated keys, or what a recurrence keeps


class SpeltNorm(nn.Module):
    """RMS norm as most modelling files write it: in fp32, from single ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[.., width], each normed."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


NORMS: dict[str, Callable[[int], nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm, "spelt": SpeltNorm}


@dataclass(frozen=True)
class Sight:
    """What all layers share.

    Attributes:
        positions: of tokens, [batch or 1, rows]
        key_positions: [batch or 1, keys]
        allowed: keys a query sees, bool [batch or 1, 1, rows, keys]; None: its past
        distance: query index minus key index, [rows, keys]
        real: rows that are no padding, bool [batch, rows, 1]; None: all.
        aside: inputs that lead round the residual stream, [batch, rows, layers, width]; None: there are none.
    """

    positions: Tensor
    key_positions: Tensor
    allowed: Tensor | None
    distance: Tensor
    real: Tensor | None = None
    aside: Tensor | None = None

    def alone(self, rows: int) -> Sight:
        """What the last rows share if they are all there is, at their true positions; without padding."""
        places = self.positions[:, -rows:]
        aside = None if self.aside is None else self.aside[:, -rows:]
        return dataclasses.replace(
            self, positions=places, key_positions=places, allowed=None, distance=self.distance[-rows:, -rows:],
            aside=aside,
        )  # fmt: skip


class Attention(nn.Module):
    """Self-attention that keeps keys and values; it may read another layer's instead of its own."""

    def __init__(self, config: DecoderConfig, shares: bool = False) -> None:
        super().__init__()
        self.config = config
        queries = config.heads * config.head_dim
        self.sizes = [queries] if shares else [queries, *self.state_sizes()]
        fused = [sum(self.sizes)] if config.fused else self.sizes
        self.inputs = nn.ModuleList(nn.Linear(config.width, size, bias=config.bias) for size in fused)
        self.output = nn.Linear(config.heads * self.value_dim, config.width, bias=config.bias)
        if config.qk_norm:
            self.query_norm = NORMS[config.norm](config.head_dim)
        self.add_parts(shares)

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.config.head_dim

    def state_sizes(self) -> list[int]:
        """Widths of what is projected for the states, for one row."""
        return [self.config.kv_heads * self.config.head_dim] * 2

    def add_parts(self, shares: bool) -> None:
        """Modules beside the projections."""
        if self.config.qk_norm and not shares:
            self.key_norm = NORMS[self.config.norm](self.config.head_dim)

    def forward(
        self, x: Tensor, sight: Sight, past: States | None = None, lent: States | None = None
    ) -> tuple[Tensor, States]:
        """The output for each row, [batch, rows, width], and the states of all rows so far.

        Args:
            x: [batch, rows, width]
            sight: see there.
            past: states of older rows.
            lent: another layer's states of all rows, to read in place of one's own.
        """
        batch, rows, _ = x.shape
        projected = [project(x) for project in self.inputs]
        if self.config.fused:
            projected = list(projected[0].split(self.sizes, dim=-1))
        query = projected[0].view(batch, rows, -1, self.config.head_dim)
        query = self.query_norm(query) if self.config.qk_norm else query
        query = self.turned_query(query.transpose(1, 2), sight)
        states = self.states(projected[1:], sight, past) if lent is None else lent
        key, value = self.unfold(states, sight)
        mixed = self.mix(query, key, value, sight)
        return self.output(mixed.transpose(1, 2).reshape(batch, rows, -1)), states

    def turned_query(self, query: Tensor, sight: Sight) -> Tensor:
        """Queries [batch, heads, rows, head_dim] with their positions."""
        return rotate(query, sight.positions, self.config.rotary_dim)

    def states(self, projected: Sequence[Tensor], sight: Sight, past: States | None) -> States:
        """Keys and values of old and new rows, in the layout that is kept."""
        key, value = (part.view(*part.shape[:2], -1, self.config.head_dim) for part in projected)
        key = (self.key_norm(key) if self.config.qk_norm else key).transpose(1, 2)
        if not self.config.unrotated:
            key = rotate(key, sight.positions, self.config.rotary_dim)
        dim = 1 if self.config.rows_first else 2
        key, value = self.heads_first(key), self.heads_first(value.transpose(1, 2))
        return key if past is None else torch.cat([past[0], key], dim), (
            value if past is None else torch.cat([past[1], value], dim)
        )

    def unfold(self, states: States, sight: Sight) -> States:
        """Keys and values [batch, heads, keys, head_dim] of states."""
        key, value = self.heads_first(states[0]), self.heads_first(states[1])
        if self.config.unrotated:
            key = rotate(key, sight.key_positions, self.config.rotary_dim)
        return key, value

    def heads_first(self, state: Tensor) -> Tensor:
        """Swaps the layout of a state, [batch, heads, rows, head_dim], if it is kept rows first."""
        return state.transpose(1, 2) if self.config.rows_first else state

    def mix(self, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        """Attention of [batch, heads, rows, head_dim] queries over [batch, kv_heads, keys, head_dim] and values."""
        config = self.config
        if config.attention != "grouped":
            key, value = (repeat(state, config.heads // state.shape[1]) for state in (key, value))
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


class LatentAttention(Attention):
    """Attention that keeps a narrow latent [batch, rows, latent], and one rotated key part [batch, 1, rows, turned].

    Keys and values unfold from the latent; each head's key ends with the rotated part, by which it is wider than its
    value.
    """

    @property
    def turned(self) -> int:
        """Entries of a head that rotate: the last half."""
        return self.config.head_dim // 2

    @property
    def value_dim(self) -> int:
        """See `Attention`."""
        return self.config.head_dim - self.turned

    def state_sizes(self) -> list[int]:
        """See `Attention`."""
        assert self.config.latent is not None
        return [self.config.latent, self.turned]

    def add_parts(self, shares: bool) -> None:
        """See `Attention`. A layer that reads another's latents unfolds them by a matrix of its own."""
        config = self.config
        assert config.latent is not None
        if not shares:
            self.latent_norm = NORMS[config.norm](config.latent)
        unfolded = config.heads * 2 * self.value_dim
        self.unfolding = nn.Linear(config.latent, unfolded, bias=config.bias)

    def turn(self, part: Tensor, positions: Tensor) -> Tensor:
        """Rotates [batch, heads, rows, turned] whole."""
        return rotate(part, positions, self.turned if self.config.rotary_dim else 0)

    def turned_query(self, query: Tensor, sight: Sight) -> Tensor:
        """See `Attention`."""
        plain, turned = query.split([query.shape[-1] - self.turned, self.turned], dim=-1)
        return torch.cat([plain, self.turn(turned, sight.positions)], dim=-1)

    def states(self, projected: Sequence[Tensor], sight: Sight, past: States | None) -> States:
        """See `Attention`."""
        latent, key = self.latent_norm(projected[0]), projected[1].unsqueeze(1)
        key = self.heads_first(key if self.config.unrotated else self.turn(key, sight.positions))
        dim = 1 if self.config.rows_first else 2
        return latent if past is None else torch.cat([past[0], latent], 1), (
            key if past is None else torch.cat([past[1], key], dim)
        )

    def unfold(self, states: States, sight: Sight) -> States:
        """See `Attention`."""
        config = self.config
        turned = self.heads_first(states[1])
        turned = self.turn(turned, sight.key_positions) if config.unrotated else turned
        unfolded = self.unfolding(states[0]).unflatten(-1, (config.heads, -1)).transpose(1, 2)
        plain, value = unfolded.chunk(2, dim=-1)
        return torch.cat([plain, turned.expand(-1, config.heads, -1, -1)], dim=-1), value


class Recurrent(nn.Module):
    """A causal convolution and a recurrence with decay.

    Its states are the last rows before the convolution, [batch, channels, KERNEL - 1], and the recurrence's state.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.sizes = [config.kv_heads * config.head_dim] * 2 + [config.heads * config.head_dim]
        channels = sum(self.sizes)
        self.input = nn.Linear(config.width, channels, bias=config.bias)
        self.convolution = nn.Parameter(torch.linspace(0.5, 1.0, channels * KERNEL).view(channels, 1, KERNEL))
        self.decay = nn.Linear(config.width, config.heads)
        self.rate = nn.Linear(config.width, config.heads) if config.recurrence == "delta" else None
        self.output = nn.Linear(self.sizes[2], config.width, bias=config.bias)

    def forward(
        self, x: Tensor, sight: Sight, past: States | None = None, lent: States | None = None
    ) -> tuple[Tensor, States]:
        """See `Attention`; there is nothing to borrow."""
        assert lent is None
        rows = x.shape[1]
        channels = self.input(x)
        if sight.real is not None:
            channels = channels * sight.real
        channels = channels.transpose(1, 2)
        if past is None:
            kept = functional.pad(channels, (KERNEL - 1 - rows, 0))
            mixed = functional.conv1d(channels, self.convolution, padding=KERNEL - 1, groups=channels.shape[1])
            mixed = mixed[..., :rows]
        else:
            channels = torch.cat([past[0], channels], dim=-1)
            kept = channels[..., -(KERNEL - 1) :]
            mixed = functional.conv1d(channels, self.convolution, groups=channels.shape[1])
        parts = functional.silu(mixed).transpose(1, 2).split(self.sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.config.head_dim)) for part in parts)
        decay = -functional.softplus(self.decay(x))
        old = None if past is None else past[1]
        if self.rate is None:
            outputs, state = torch.ops.ridgefill.linear_attention(query, key, value, decay, old)
        else:
            rate, scale = self.rate(x).sigmoid(), self.config.head_dim**-0.5
            outputs, state = torch.ops.ridgefill.gated_delta_rule(query, key, value, decay, rate, old, scale, True)
        return self.output(outputs.flatten(2)), (kept, state)


def rotate(x: Tensor, positions: Tensor, dim: int) -> Tensor:
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


def repeat(state: Tensor, times: int) -> Tensor:
    """[batch, kv_heads, keys, head_dim] with each head `times` over."""
    if times == 1:
        return state
    batch, heads, keys, dim = state.shape
    return state[:, :, None].expand(batch, heads, times, keys, dim).reshape(batch, -1, keys, dim)
