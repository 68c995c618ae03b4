"""What a fill must equal at its ends, for every anatomy: the true inputs give the exact model, and elimination gives
what routing defines. Compared on the results *and every state write*, in fp32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ridgefill_compile.backend import ridgefill
from ridgefill_compile.errors import RidgefillWarning
from ridgefill_compile.report import report
from ridgefill_compile.testing.variants import Variants
from ridgefill_compile.zoo.calling import worst
from tests.decoders import CORE, EITHER, FILLED, RECURRENT, REFUSED, cache_of, token_ids

TOLERANCE = 1e-4  # fp32 rounding of these models is up to 2e-5
CORE_FIRST = [pytest.param(name, marks=() if name in CORE else pytest.mark.heavy) for name in FILLED]


def quick(names: Iterable[str], *each_time: str) -> list[Any]:
    """Some anatomies, of which a few are tried each time; tests/zoo tries one length of each."""
    return [pytest.param(name, marks=() if name in each_time else pytest.mark.heavy) for name in names]


def padded(rows: int) -> dict[str, Any]:
    """Two prompts, the first one shorter."""
    ids = token_ids(rows, batch=2)
    mask = torch.ones_like(ids)
    mask[0, : rows // 5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def check(variants: Variants, prompts: int) -> None:
    """Every prompt was filled, and each way agrees with the one it must equal."""
    assert variants.located is not None
    predicted = len(variants.located.layers) > variants.split + 1  # layers that share states are none of their own
    assert not variants.refusals, variants.refusals
    assert len(variants.results) == prompts
    for results in variants.results:
        assert worst(results["exact"], results["oracle"]) < TOLERANCE
        assert worst(results["routed"], results["eliminated"]) < TOLERANCE
        if predicted:
            assert worst(results["exact"], results["eliminated"]) > 100 * TOLERANCE, "the fill changed nothing"


@pytest.mark.parametrize("name", quick({**FILLED, **RECURRENT}, "llama", "gemma2", "gpt2", "mamba2"))
def test_static_and_dynamic_lengths(name: str) -> None:
    variants = Variants()
    calls = [{"input_ids": token_ids(rows), "use_cache": True, "logits_to_keep": 2} for rows in (60, 45, 71)]
    variants.run({**FILLED, **RECURRENT}[name].build(), *calls)
    check(variants, 3)
    assert variants.compiled == 2  # one static, one for every other length


@pytest.mark.parametrize("name", quick(FILLED, "llama", "gemma2", "falcon", "bloom", "gpt_neo"))
def test_batch_with_left_padding(name: str) -> None:
    variants = Variants()
    variants.run(FILLED[name].build(), {**padded(50), "use_cache": True, "logits_to_keep": 2})
    check(variants, 1)


@pytest.mark.parametrize("name", CORE_FIRST)
def test_continued_cache(name: str) -> None:
    model = FILLED[name].build()
    with torch.no_grad():
        cache = cache_of(model(token_ids(20, seed=5), use_cache=True))
    variants = Variants()
    variants.run(model, {"input_ids": token_ids(40), "past_key_values": cache, "use_cache": True, "logits_to_keep": 2})
    check(variants, 1)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    model = REFUSED[name].build()
    options: dict[str, Any] = {"route": "identity", "split": 1, "tail": 16, "min_fill": 8, "inner": "eager"}
    call = {"input_ids": token_ids(60), "use_cache": True, "logits_to_keep": 2}
    call = {key: value for key, value in call.items() if name != "openai-gpt" or key == "input_ids"}
    with torch.no_grad():
        expected = model(**call)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RidgefillWarning)
            found = torch.compile(model, backend=ridgefill, options=options)(**call)
    graphs = report(model).graphs
    assert graphs
    assert not any(graph.filled for graph in graphs)
    assert all(graph.reason for graph in graphs)
    torch.testing.assert_close(found["logits"], expected["logits"])


@pytest.mark.parametrize("name", quick(EITHER, "diffllama", "gemma4_text_shared", "minicpm3"))
def test_filled_or_refused_but_never_wrong(name: str) -> None:
    variants = Variants()
    variants.run(EITHER[name].build(), {"input_ids": token_ids(60), "use_cache": True, "logits_to_keep": 2})
    if variants.results:
        check(variants, 1)
    else:
        assert variants.compiled == 0 or variants.refusals
