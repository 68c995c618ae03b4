"""Every causal decoder of transformers: filled, right and no wider than need be, or exact with a reason.

The fast tests take a cross-section, one of each family of anatomies that other tests do not fill.
"""

from __future__ import annotations

from typing import Any

import pytest

from ridgefill_compile.zoo.pool import check_type
from ridgefill_compile.zoo.shrink import model_types

FILLED: dict[str, str] = {
    "llama": "pre-norm, grouped-query",
    "gpt2": "fused projection, learned positions",
    "bloom": "ALiBi, residual inside the branch",
    "opt": "positions counted from the mask",
    "falcon": "parallel, multi-query",
    "gpt_neox": "parallel, fused head by head",
    "phi3": "fused projections",
    "gemma2": "sandwich norms, softcap, sliding",
    "gemma3": "a wrapper, two rotary bases",
    "olmo2": "norms after the branches",
    "cohere2": "parallel, sliding",
    "minicpm3": "latent attention, dense",
    "mixtral": "experts",
    "qwen3_moe": "experts, norms per head",
    "gpt_oss": "experts, sinks",
    "deepseek_v3": "experts, latent attention",
    "bert": "an encoder as a decoder",
    "bart": "the decoder of a pair",
    "whisper": "the decoder of a speech model",
    "mamba2": "recurrent",
    "qwen3_next": "recurrent layers and experts",
    "falcon_h1": "attention and recurrence side by side",
    "xlstm": "recurrent, states in three parts",
    "lfm2": "convolutions",
    "gemma3n_text": "several residual streams",
    "git": "a mask made of a value's size",
    "moshi": "hidden states of the tail beside its logits",
}
ELSEWHERE = {  # filled by tests/test_endpoints.py and tests/passes/test_select_rows.py; how wide, heavy tests look
    "falcon", "gpt_neox", "phi3", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3_moe", "opt",
}  # fmt: skip
FILLED_SLOWLY: dict[str, str] = {
    "phimoe": "experts chosen one after another",
    "inkling_text": "convolutions behind attention",
    "minimax": "a recurrence written out",
    "recurrent_gemma": "recurrent, with a cache that the caller makes",
}
SOUND: dict[str, str] = {
    "llama4_text": "chunked attention, experts that see every row",
    "openai-gpt": "no cache",
    "xlnet": "rows before batch",
}


def heavy(kind: str) -> Any:
    """The parameter, left out of the fast tests."""
    return pytest.param(kind, marks=pytest.mark.heavy)


@pytest.mark.parametrize(
    "kind", [*(heavy(kind) if kind in ELSEWHERE else kind for kind in FILLED), *map(heavy, FILLED_SLOWLY)]
)
def test_filled_right_and_no_wider_than_need_be(kind: str) -> None:
    found = check_type(kind, quick=True)
    assert found.sound, found
    assert found.filled, found
    assert found.eliminated, found


@pytest.mark.parametrize("kind", SOUND)
def test_sound(kind: str) -> None:
    found = check_type(kind, quick=True)
    assert found.sound, found
    assert found.filled or found.reason


@pytest.mark.heavy
@pytest.mark.parametrize("kind", model_types())
def test_every_type_in_every_call(kind: str) -> None:
    found = check_type(kind)
    assert found.built, found
    assert found.sound, found
    assert found.filled or found.reason
