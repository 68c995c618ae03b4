"""Which fills of a model that is spread over two devices are refused, and why: as JSON, name -> reason.

    python -m tests.no_device.two_devices result.json

Graphs are captured and rewritten on fake values. Nothing is lowered or run.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import scaled_dot_product_attention, silu

from ridgefill_compile import CannotFill, host_maps
from ridgefill_compile.backend import ridgefill
from tests.toys import random_maps

WIDTH, HEADS, VOCABULARY, ROWS = 64, 4, 100, 60
PLACES = ("cuda:0", "cuda:0", "cuda:0", "cuda:1", "cuda:1")
PRESET: dict[str, Any] = {"tail": 16, "min_fill": 10, "strict": True, "check_weights": False, "inner": "eager"}
CASES: dict[str, dict[str, Any]] = {
    "maps": {},
    "no fill": {"route": "none", "split": 1},
    "first rows": {"first_rows": 4},
    "selected rows": {"rows": "pooled:0.1"},
    "rescaled values": {"value_rescale": 8},
    "streamed maps": {"stream_maps": True},
}


class Layer(nn.Module):
    """Attention and an MLP on a device, and what brings rows there."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, device=device) for _ in range(2))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, rows, width], keys and values [1, heads, rows, head size]."""
        rows = rows.to(self.device)
        query, key, value, out, up, down = self.projections
        read = self.norms[0](rows)
        q, k, v = (each(read).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (query, key, value))
        rows = rows + out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return rows + down(silu(up(self.norms[1](rows)))), k, v


class Spread(nn.Module):
    """A decoder whose late layers lie on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, device=PLACES[0])
        self.layers = nn.ModuleList(Layer(place) for place in PLACES)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, device=PLACES[-1])

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits of the last row, and every layer's states."""
        rows, states = self.embedding(ids), []
        for layer in self.layers:
            rows, *written = layer(rows)
            states += written
        return self.head(rows[:, -1:]), states


def refusal(options: dict[str, Any]) -> str | None:
    """Why a fill is refused; None if it is not."""
    torch._dynamo.reset()
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with fake:
        model, ids = Spread().eval(), torch.zeros(1, ROWS, dtype=torch.int64, device=PLACES[0])
    settings = PRESET | options
    if "route" not in options:
        settings["maps"] = random_maps(WIDTH, layers=len(PLACES))
    try:
        with fake, torch.no_grad():
            torch.compile(model, backend=ridgefill, options=settings, dynamic=False)(ids)
    except CannotFill as error:
        return str(error)
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with mock.patch.object(host_maps, "in_host_memory", lambda stored, device: stored.contiguous()):
        Path(sys.argv[1]).write_text(json.dumps({name: refusal(options) for name, options in CASES.items()}))
