"""What tests of the backend share: small models, maps of random numbers, and everything a call returns, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ridgefill_compile.backend import ridgefill
from ridgefill_compile.fingerprint import ModelFingerprint
from ridgefill_compile.maps import RidgeMaps, SplitMaps
from ridgefill_compile.testing import Decoder, DecoderConfig
from tests.decoders import FILLED, states_of

TAIL, MIN_FILL = 16, 8
LONG = 40  # rows of a prompt worth filling
SHORT = TAIL + MIN_FILL - 1  # rows of one that is not
ORACLE: dict[str, Any] = {"route": "oracle", "split": 1, "tail": TAIL, "min_fill": MIN_FILL, "inner": "eager"}
IDENTITY = ORACLE | {"route": "identity"}


def pretrained(name: str = "llama", layers: int = 2, **settings: Any) -> Any:
    """A model of transformers with as few layers as say something: each costs compile time."""
    return FILLED[name].build(num_hidden_layers=layers, **settings)


def plain(**settings: Any) -> Decoder:
    """A decoder that is a plain module: compiles several times as fast as one of transformers."""
    return Decoder(DecoderConfig(**{"layers": 3, "attention": "causal", **settings}))


def prompt(rows: int = LONG, batch: int = 1, seed: int = 0) -> Tensor:
    """Ids for a `plain()` decoder, [batch, rows]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(DecoderConfig.vocabulary, (batch, rows), generator=generator)


def random_maps(width: int, layers: int = 3, splits: tuple[int, ...] = (1,), of: nn.Module | None = None) -> RidgeMaps:
    """Maps that predict nonsense, the same at every call; `of`: the model they claim to be calibrated on."""
    generator = torch.Generator().manual_seed(1)

    def part(split: int) -> SplitMaps:
        late = range(split + 1, layers)
        matrices = {layer: torch.randn(width, width, generator=generator) / width**0.5 for layer in late}
        return SplitMaps(split, matrices, {layer: torch.randn(width, generator=generator) for layer in late})

    model = None if of is None else ModelFingerprint.of(of)
    return RidgeMaps([part(split) for split in splits], layer_count=layers, model=model)


def compiled(model: nn.Module, options: Mapping[str, Any]) -> Any:
    """The model behind the backend, for direct calls under `no_grad`."""
    fast = torch.compile(model, backend=ridgefill, options=dict(options))

    def call(*args: Any, **settings: Any) -> Any:
        with torch.no_grad():
            return fast(*args, **settings)

    return call


def results(output: Any) -> dict[str, Tensor]:
    """Logits and every state write, of a `plain()` decoder's output or of one of transformers."""
    if isinstance(output, tuple):
        logits, keys, values, *_ = output
        named = {"keys": keys, "values": values}
        states = {f"{layer}.{name}": state for name, part in named.items() for layer, state in enumerate(part)}
        return {"logits": logits, **states}
    return {"logits": output.logits, **states_of(output)}


def distance(left: Any, right: Any) -> float:
    """The largest difference between two outputs, of any result."""
    one, other = results(left), results(right)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].shape == other[name].shape, name
        assert one[name].dtype == other[name].dtype, name
    return max((one[name] - other[name]).abs().max().item() for name in one)
