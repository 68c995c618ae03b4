"""Arguments on which a modelling file's function and the operator that might stand for it are compared.

Each function gives pairs of arguments by name, and whether the function may refuse them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgefill_compile.recurrences.block_index import FormerKeys

Arguments = dict[str, Any]


def with_settings(kind: type) -> Any:
    """A module that computes by a configuration, with a small chunk and a large `eps`, so that it shows."""
    config = SimpleNamespace(
        mode="inference",
        chunk_size=32,
        eps=1e-2,
        return_last_states=True,
        autocast_kernel_dtype="float32",
        inference_state_dtype="float32",
    )
    return kind(config)


def delta_rule(channels: bool) -> Iterator[tuple[Arguments, bool]]:
    """Rows off the tile, with and without a state, with and without unit rows, in bf16; grouped heads where taken."""
    draw = _Draw()
    for rows, key_heads, with_state, dtype in (
        (70, 4, False, torch.float32),
        (131, 4, True, torch.float32),
        (70, 4, True, torch.bfloat16),
        (70, 2, True, torch.float32),
    ):
        arguments: Arguments = {
            "query": draw(2, rows, key_heads, 8, dtype=dtype),
            "key": draw(2, rows, key_heads, 8, dtype=dtype),
            "value": draw(2, rows, 4, 12, dtype=dtype),
            "g": -draw(*((2, rows, 4, 8) if channels else (2, rows, 4))).abs(),
            "beta": draw(2, rows, 4, dtype=dtype).sigmoid(),
            "initial_state": draw(2, 4, 8, 12) if with_state else None,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }
        yield arguments, key_heads < 4
        if not with_state:  # unscaled rows grow; short ones do not
            short = {k: v * 0.3 if k in ("query", "key") else v for k, v in arguments.items()}
            yield short | {"use_qk_l2norm_in_kernel": False, "output_final_state": False}, False


def selective_scan() -> Iterator[tuple[Arguments, bool]]:
    """With everything that a scan may be given, and with as little as it may."""
    draw = _Draw()
    for rows, everything, dtype in ((37, True, torch.float32), (70, False, torch.float32), (37, True, torch.bfloat16)):
        yield (
            {
                "hidden_states": draw(2, 6, rows, dtype=dtype),
                "dt": draw(2, 6, rows, dtype=dtype) if everything else draw(2, 6, rows).abs(),
                "A": -draw(6, 4).exp(),
                "B": draw(2, 4, rows, dtype=dtype),
                "C": draw(2, 4, rows, dtype=dtype),
                "D": draw(6) if everything else None,
                "z": draw(2, 6, rows, dtype=dtype) if everything else None,
                "delta_bias": draw(6) if everything else None,
                "delta_softplus": everything,
                "return_last_state": everything,
            },
            False,
        )


def state_space() -> Iterator[tuple[Arguments, bool]]:
    """With everything that a scan may be given, and with as little as it may."""
    draw = _Draw()
    for rows, everything, dtype in (
        (70, False, torch.float32),
        (131, True, torch.float32),
        (70, True, torch.bfloat16),
    ):
        yield (
            {
                "hidden_states": draw(2, rows, 4, 6, dtype=dtype),
                "dt": draw(2, rows, 4, dtype=dtype) if everything else draw(2, rows, 4).abs(),
                "A": -draw(4).exp(),
                "B": draw(2, rows, 2, 5, dtype=dtype),
                "C": draw(2, rows, 2, 5, dtype=dtype),
                "chunk_size": 32,
                "D": draw(4) if everything else None,
                "dt_bias": draw(4) if everything else None,
                "initial_states": draw(2, 4, 6, 5) if everything else None,
                "dt_softplus": everything,
                "dt_limit": (0.1, 1.5) if everything else (0.0, float("inf")),
                "return_final_states": everything,
            },
            False,
        )


def wkv() -> Iterator[tuple[Arguments, bool]]:
    """Keys that differ by orders of magnitude, with and without a state."""
    draw = _Draw()
    for rows, with_state, dtype in ((37, False, torch.float32), (70, True, torch.float32), (37, True, torch.bfloat16)):
        arguments: Arguments = {
            "time_decay": draw(6, dtype=dtype),
            "time_first": draw(6, dtype=dtype),
            "key": 3 * draw(2, rows, 6, dtype=dtype),
            "value": draw(2, rows, 6, dtype=dtype),
            "state": [draw(2, 6), draw(2, 6).exp(), draw(2, 6)] if with_state else None,
            "return_state": with_state,
        }
        yield arguments, False


def linear_recurrence() -> Iterator[tuple[Arguments, bool]]:
    """Resets in the middle of a sequence, with and without a state."""
    draw = _Draw()
    for rows, with_state, dtype in ((37, False, torch.float32), (70, True, torch.float32), (37, True, torch.bfloat16)):
        arguments: Arguments = {
            "hidden_states": draw(2, rows, 6, dtype=dtype),
            "recurrent_gate": draw(2, rows, 6, dtype=dtype).sigmoid(),
            "reset": draw(2, rows, 1) > 1.5,
            "recurrent_states": draw(2, 6) if with_state else None,
            "acc_dtype": torch.float32,
        }
        yield arguments, False


def block_index() -> Iterator[tuple[Arguments, bool]]:
    """Batches with padding, masks of both kinds, former keys, rows that see less than a block."""
    draw = _Draw()
    heads, width, turned, hidden = 12, 8, 4, 6  # of few heads, many blocks score nothing
    for rows, former, padding, ratio, floats in ((19, 0, 0, 4, False), (13, 10, 5, 3, True), (1, 22, 2, 4, False)):
        keys, masks = former + rows, torch.ones(2, 1, former + rows, former + rows, dtype=torch.bool).tril()
        masks[1, ..., :padding] = False
        masks = masks[:, :, former:]
        index = SimpleNamespace(
            layer_idx=0,
            index_n_heads=heads,
            index_kv_heads=1,
            index_head_dim=width,
            compress_ratio=ratio,
            token_budget=2 * ratio,
            block_topk=2,
            index_qk_proj=functools.partial(F.linear, weight=draw((heads + 1) * width, hidden)),
            q_layernorm=functools.partial(F.rms_norm, normalized_shape=(width,), weight=draw(width)),
            k_layernorm=functools.partial(F.rms_norm, normalized_shape=(width,), weight=draw(width)),
        )
        angles, cache = draw(2, keys, turned), FormerKeys(draw(2, former, width)) if former else None
        yield (
            {
                "self": index,
                "hidden_states": draw(2, rows, hidden),
                "position_embeddings": (angles.cos(), angles.sin()),
                "attention_mask": torch.where(masks, 0.0, -1e9) if floats else masks,
                "cache": cache,
                "past_key_values": cache,
            },
            False,
        )


def mlstm() -> Iterator[tuple[Arguments, bool]]:
    """Rows off the chunk, with and without a state."""
    draw = _Draw()
    for rows, with_state, dtype in ((70, False, torch.float32), (131, True, torch.float32), (37, True, torch.bfloat16)):
        arguments: Arguments = {
            "query": draw(2, 3, rows, 6, dtype=dtype),
            "key": draw(2, 3, rows, 6, dtype=dtype),
            "value": draw(2, 3, rows, 5, dtype=dtype),
            "igate": draw(2, 3, rows, dtype=dtype) - 1,
            "fgate": draw(2, 3, rows, dtype=dtype) + 3,
            "c_initial": draw(2, 3, 6, 5, dtype=dtype) if with_state else None,
            "n_initial": draw(2, 3, 6, dtype=dtype) if with_state else None,
            "m_initial": draw(2, 3, 1, dtype=dtype) if with_state else None,
        }
        yield arguments, False


class _Draw:
    """Random tensors, the same ones every time, whatever the default device, type or seed."""

    def __init__(self) -> None:
        self.generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=torch.float32, device="cpu").to(dtype)
