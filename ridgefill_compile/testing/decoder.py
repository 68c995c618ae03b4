"""Random decoders: small plain modules of every anatomy, as a `DecoderConfig` says.

decoder = Decoder(DecoderConfig(residual="post", fused=True))
logits, keys, values = decoder(ids, padding, logits_to_keep=2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import transformers.integrations.moe  # noqa: F401  (registers the grouped product)
from torch import Tensor, nn
from torch.nn import functional

from ridgefill_compile.testing.config import DecoderConfig, Routing
from ridgefill_compile.testing.mixing import NORMS, Attention, LatentAttention, Recurrent, Sight, States
from ridgefill_compile.zoo.shrink import enliven

LONGEST = 128  # rows that learned positions reach
PER_ROW = 2  # experts that a row takes

Past = tuple[Sequence[Tensor], Sequence[Tensor]]
Branch = Callable[[Tensor], Tensor]


class MLP(nn.Module):
    """Two or three matrices, row by row."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(config.width, config.inner, bias=config.bias)
        self.down = nn.Linear(config.inner, config.width, bias=config.bias)
        if config.gated:
            self.gate = nn.Linear(config.width, config.inner, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, rows, width]"""
        rows = x.reshape(-1, x.shape[-1]) if self.config.flat else x
        inner = self.up(rows)
        inner = functional.silu(self.gate(rows)) * inner if self.config.gated else functional.gelu(inner)
        result: Tensor = self.down(inner)
        return result.view(x.shape)


class Experts(nn.Module):
    """A mixture of experts, each of two or three matrices; `DecoderConfig.grouped` says how it is written."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.per_row = min(PER_ROW, config.experts)
        self.choice = nn.Linear(config.width, config.experts, bias=False)
        up, down = (config.experts, config.width, config.inner), (config.experts, config.inner, config.width)
        self.up, self.down = nn.Parameter(torch.ones(up)), nn.Parameter(torch.ones(down))
        self.gate = nn.Parameter(torch.ones(up)) if config.gated else None
        generator = torch.Generator().manual_seed(config.seed)
        for weight in self.parameters():  # `enliven` leaves stacks that are all alike nearly so
            nn.init.normal_(weight, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, rows, width]"""
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = self.choice(rows).softmax(-1).topk(self.per_row, dim=-1)
        mixed = self.sorted(rows, shares, chosen) if self.config.grouped else self.masked(rows, shares, chosen)
        return mixed.view(x.shape)

    def activated(self, product: Callable[[Tensor], Tensor]) -> Tensor:
        """What the last matrix reads; `product`: of the rows with a stack of matrices."""
        inner = product(self.up)
        return functional.gelu(inner) if self.gate is None else functional.silu(product(self.gate)) * inner

    def masked(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Every expert on every row, weighted: most of them by 0."""
        weights = (functional.one_hot(chosen, self.config.experts) * shares.unsqueeze(-1)).sum(1)
        inner = self.activated(lambda matrices: torch.einsum("nd,edi->nei", rows, matrices))
        return (torch.einsum("nei,eid->ned", inner, self.down) * weights.unsqueeze(-1)).sum(1)

    def sorted(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Rows in the order of their experts, one product a run, and back."""
        product, experts = torch.ops.transformers.grouped_mm_fallback, self.config.experts
        keys, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(keys.float(), experts, 0, experts - 1).cumsum(0, dtype=torch.int32)
        selected = rows[order // self.per_row]
        inner = self.activated(lambda matrices: product(selected, matrices, ends))
        results: Tensor = product(inner, self.down, ends) * shares.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=order.device)
        return results[back].view(-1, self.per_row, rows.shape[-1]).sum(1)


class Connection(nn.Module):
    """How one branch hangs on the residual: a sum, or a mixture of several streams that is read and written to."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams
        if streams > 1:
            self.reading, self.writing = (nn.Parameter(torch.linspace(0.5, 1.0, streams)) for _ in range(2))
            self.mixing = nn.Parameter(torch.eye(streams))

    def read(self, x: Tensor) -> Tensor:
        """What the branch reads, [batch, rows, width]."""
        return x if self.streams == 1 else (x * self.reading[:, None]).sum(2)

    def forward(self, x: Tensor, branch: Branch) -> Tensor:
        """The residual [batch, rows, width] (or [batch, rows, streams, width]) with the branch's output."""
        output = branch(self.read(x))
        if self.streams == 1:
            return x + output
        mixed: Tensor = self.mixing @ x
        return mixed + self.writing[:, None] * output.unsqueeze(2)


class Layer(nn.Module):
    """A mixer of rows and an MLP, with the norms where the config wants them."""

    def __init__(self, config: DecoderConfig, index: int = 0) -> None:
        super().__init__()
        self.config, self.index = config, index
        kind = Attention if config.latent is None else LatentAttention
        self.attention: nn.Module = (
            Recurrent(config) if config.is_recurrent(index) else kind(config, index >= config.writing_layers)
        )
        self.mlp: nn.Module = Experts(config) if config.experts else MLP(config)
        norms = {"sandwich": 4, "parallel": 1}.get(config.residual, 2)
        self.norms = nn.ModuleList(NORMS[config.norm](config.width) for _ in range(norms))
        branches = (1 if config.residual == "parallel" else 2) + (1 if config.per_layer else 0)
        self.connections = nn.ModuleList(Connection(config.streams) for _ in range(branches))
        if config.per_layer:
            self.aside_in = nn.Linear(config.width, config.per_layer, bias=False)
            self.aside_out = nn.Linear(config.per_layer, config.width, bias=False)

    def reads(self, x: Tensor) -> Tensor:
        """What the layer reads of the residual before anything else, [batch, rows, width]."""
        connection = self.connections[0]
        assert isinstance(connection, Connection)
        return connection.read(x)

    def forward(
        self,
        x: Tensor,
        sight: Sight,
        past: States | None = None,
        lent: States | None = None,
        predicted: Tensor | None = None,
    ) -> tuple[Tensor, States]:
        """The residual behind the layer, and the layer's states.

        Args:
            x: residual, [batch, rows, width] or [batch, rows, streams, width]
            sight: see there.
            past: states of older rows.
            lent: another layer's states of all rows, to read in place of one's own.
            predicted: what the layer reads on its first rows instead of what the residual holds there.
        """
        states: list[States] = []

        def attention(y: Tensor) -> Tensor:
            mixed: Tensor
            mixed, kept = self.attention(y, sight, past, lent)
            states.append(kept)
            return mixed

        def filled(y: Tensor) -> Tensor:
            return y if predicted is None else torch.cat([predicted, y[:, predicted.shape[1] :]], dim=1)

        norms, mlp, connections = self.norms, self.mlp, iter(self.connections)
        first = next(connections)
        match self.config.residual:
            case "pre":
                x = first(x, lambda y: attention(norms[0](filled(y))))
                x = next(connections)(x, lambda y: mlp(norms[1](y)))
            case "post":
                x = norms[0](first(x, lambda y: attention(filled(y))))
                x = norms[1](next(connections)(x, mlp))
            case "branch":
                x = first(x, lambda y: norms[0](attention(filled(y))))
                x = next(connections)(x, lambda y: norms[1](mlp(y)))
            case "sandwich":
                x = first(x, lambda y: norms[1](attention(norms[0](filled(y)))))
                x = next(connections)(x, lambda y: norms[3](mlp(norms[2](y))))
            case "parallel":
                x = first(x, lambda y: self._side_by_side(norms[0](filled(y)), attention))
        for connection in connections:
            x = connection(x, lambda y: self._aside(y, sight))
        return x, states[0]

    def _side_by_side(self, y: Tensor, attention: Branch) -> Tensor:
        result: Tensor = attention(y) + self.mlp(y)
        return result

    def _aside(self, y: Tensor, sight: Sight) -> Tensor:
        assert sight.aside is not None
        aside: Tensor = self.aside_out(functional.gelu(self.aside_in(y)) * sight.aside[:, :, self.index])
        return aside


class Decoder(nn.Module):
    """A decoder as its config says; fp32, eval mode, every weight of use."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        if config.positions == "learned":
            self.places = nn.Embedding(LONGEST, config.width)
        if config.per_layer:
            self.aside = nn.Embedding(config.vocabulary, config.layers * config.per_layer)
            self.aside_of_tokens = nn.Linear(config.width, config.layers * config.per_layer, bias=False)
        self.blocks = nn.ModuleList(Layer(config, index) for index in range(config.layers))
        self.norm = NORMS[config.norm](config.width)
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
        ids: Tensor,
        padding: Tensor | None = None,
        past: Past | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Reads `ids`, int64 [batch, rows], after the rows of `past`.

        Args:
            ids: tokens.
            padding: bool [batch, old and new rows], False on padding; None: none is padded.
            past: both states of every layer, as returned.
            logits_to_keep: last rows to give logits for; 0 for all.

        Returns:
            Logits [batch, kept rows, vocabulary], and both states of every layer that writes any: keys and values of
            all rows so far, or what the config keeps in their place.
        """
        x, sight = self.begin(ids, padding, 0 if past is None else self.rows_of(past))
        kept: list[States] = []
        for index, block in enumerate(self.blocks):
            shares = index >= self.config.writing_layers
            old = None if past is None or shares else (past[0][index], past[1][index])
            x, states = block(x, sight, old, kept[self.config.source_layer] if shares else None)
            if not shares:
                kept.append(states)
        return self.end(x, logits_to_keep), [one for one, _ in kept], [other for _, other in kept]

    def begin(self, ids: Tensor, padding: Tensor | None, old: int) -> tuple[Tensor, Sight]:
        """The residual before the first layer, and what all layers share, after `old` rows."""
        sight = self.sight(ids, padding, old)
        x = self.embedding(ids)
        if self.config.positions == "learned":
            x = x + self.places(sight.positions)
        if self.config.streams > 1:
            x = x.unsqueeze(2).expand(-1, -1, self.config.streams, -1)
        return x, sight

    def end(self, x: Tensor, keep: int = 0) -> Tensor:
        """Logits of the last rows of the residual behind the last layer."""
        x = x if self.config.streams == 1 else x.sum(2)
        logits: Tensor = self.head(self.norm(x[:, -keep:]))
        return logits

    def rows_of(self, past: Past) -> int:
        """How many rows a cache holds."""
        latent, rows_first = self.config.latent is not None, self.config.rows_first
        return past[0][self.config.source_layer].shape[1 if latent or rows_first else 2]

    def sight(self, ids: Tensor, padding: Tensor | None, old: int) -> Sight:
        """Positions and mask for new rows after `old` ones. A row always sees itself, padded or not."""
        rows, config = ids.shape[1], self.config
        keys = torch.arange(old + rows, device=ids.device)
        distance = keys[old:, None] - keys
        places = keys[None] if padding is None else (padding.long().cumsum(1) - 1).clamp(min=0)
        aside = None
        if config.per_layer:
            aside = self.aside(ids) + self.aside_of_tokens(self.embedding(ids))
            aside = aside.unflatten(-1, (config.layers, config.per_layer))
        plain = config.attention == "causal" and config.window is None and config.positions != "alibi"
        if plain and padding is None and old == 0:
            return Sight(places, places, None, distance, None, aside)
        allowed = (distance >= 0)[None, None]
        if config.window is not None:
            allowed = allowed & (distance < config.window)
        if padding is not None:
            allowed = allowed & (padding[:, None, None, :] | (distance == 0))
        real = None if padding is None else padding[:, old:, None]
        return Sight(places[:, old:], places, allowed, distance, real, aside)


@dataclass(frozen=True, repr=False)
class FillCase(Routing):
    """A routing, with the decoder that it is for."""

    config: DecoderConfig = field(default_factory=DecoderConfig)

    def decoder(self) -> Decoder:
        """The decoder, anew at each call."""
        return Decoder(self.config)

    def ids(self, seed: int = 0) -> Tensor:
        """A random prompt, int64 [batch, rows]."""
        return self.prompt(self.config.vocabulary, seed)
