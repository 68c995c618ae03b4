"""Inductor's code of filled prompts on a CUDA device that is not there, as JSON: case -> code.

    python -m tests.no_device.generate result.json pooled padded

Everything but the device is real: torch chooses the attention kernel by the device's properties, which the environment
gives (`NO_DEVICE_CAPABILITY=80`), and Inductor writes Triton and calls. Tensors are fake, and nothing is run.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import LlamaConfig, LlamaForCausalLM

from ridgefill_compile import host_maps
from ridgefill_compile.backend import ridgefill
from tests.toys import random_maps

LAYERS, SPLIT, WIDTH, ROWS, TAIL = 4, 1, 256, 1024, 128
PRESET: dict[str, Any] = {"tail": TAIL, "min_fill": 64, "strict": True, "check_weights": False}

CASES: dict[str, dict[str, Any]] = {
    "pooled": {"rows": "pooled:0.1", "dtype": "int8"},
    "odd length": {"rows": "pooled:0.1", "length": ROWS + 3},
    "padded": {"padded": True},
    "streamed": {"stream_maps": True},
    "CUDA graphs": {"stream_maps": True, "mode": "reduce-overhead"},
}


class _Written(Exception):  # no error: it ends the compilation before anything is loaded or run
    pass


def code_of(length: int = ROWS, dtype: str = "bfloat16", padded: bool = False, **options: Any) -> str:
    """The wrapper and the kernels of one prompt graph of a small Llama in bfloat16."""
    written: list[str] = []

    def write(graph: GraphLowering) -> None:
        written.append(graph.codegen()[0].value)
        raise _Written

    torch._dynamo.reset()
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with fake, torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, vocab_size=512,
                num_attention_heads=WIDTH // 64, num_key_value_heads=2,
            )
        ).eval()  # fmt: skip
        torch.set_default_dtype(torch.float32)
        ids = torch.zeros(1, length, dtype=torch.int64)
        given = {"attention_mask": torch.ones_like(ids)} if padded else {}
    maps = random_maps(WIDTH, layers=LAYERS, splits=(SPLIT,)).to(dtype)
    settings: dict[str, Any] = {**PRESET, **options, "maps": maps}
    fast = torch.compile(model, backend=ridgefill, options=settings, dynamic=False)
    with (
        mock.patch.object(GraphLowering, "compile_to_module", write),
        mock.patch.object(pad_mm, "_should_pad", return_value=False),  # it would time both on the device
        mock.patch.object(host_maps, "in_host_memory", lambda stored, device: stored.contiguous()),
        config.patch(force_disable_caches=True, compile_threads=1),
    ):
        try:
            with fake, torch.no_grad():
                fast(ids, use_cache=True, logits_to_keep=1, **given)
        except Exception:
            if not written:
                raise
    return written[0]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Path(sys.argv[1]).write_text(json.dumps({case: code_of(**CASES[case]) for case in sys.argv[2:]}))
