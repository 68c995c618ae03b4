"""Projections are found by dominators, in every anatomy; what has none is refused by the layer's name."""

from __future__ import annotations

from typing import Any

import pytest
from torch.fx import GraphModule

from ridgefill_compile.cost import multiply_adds
from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import shape
from ridgefill_compile.passes.cuts import Cut, cuts_of
from ridgefill_compile.passes.locate import locate
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from ridgefill_compile.selectors import parse_rows
from ridgefill_compile.splitmaps import CUTS, INPUT, PROJECTIONS
from ridgefill_compile.testing.difference import CLOSE
from ridgefill_compile.testing.variants import Variants
from ridgefill_compile.zoo.calling import worst
from tests.decoders import FILLED, RECURRENT, token_ids
from tests.passes.graphs import traced_decoder

ROWS, BATCH = 40, 2


def trace(name: str) -> tuple[GraphModule, list[Any]]:
    model = {**FILLED, **RECURRENT}[name].build()
    substitute_recurrences(model)
    return traced_decoder(model, token_ids(ROWS, batch=BATCH), logits_to_keep=1)


def cuts_in(name: str, where: str = PROJECTIONS) -> tuple[Cut, ...]:
    """Cuts of the layers behind the first one."""
    return cuts_of(locate(trace(name)[0].graph), 0, where)


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("llama", (32, 32)),
        ("qwen3", (48, 48)),  # before the norm of every key
        ("gemma2", (48, 48)),
        ("olmo2", (32, 32)),
        ("phi3", (128,)),  # queries, keys and values
        ("gpt2", (192,)),
        ("gpt_neox", (192,)),
        ("xglm", (64, 64)),
        ("deepseek_v3", (24,)),  # what keys and values are made of, and the part that is rotated
        ("mixtral", (32, 32)),
    ],
)
def test_projections(name: str, widths: tuple[int, ...]) -> None:
    cuts = cuts_in(name)
    assert [cut.layer for cut in cuts] == [layer for layer in (1, 2, 3) for _ in widths]
    assert tuple(cut.width for cut in cuts) == widths * 3
    for cut in cuts:
        assert list(shape(cut.value)) == [BATCH, ROWS, cut.width]
    first = [cut for cut in cuts if cut.layer == 1]
    assert [cut.start for cut in first] == [0, *(sum(widths[: i + 1]) for i in range(len(widths) - 1))]


def test_inputs() -> None:
    cuts = cuts_in("qwen3_next", INPUT)
    assert [(cut.layer, cut.width, cut.start) for cut in cuts] == [(1, 64, 0), (2, 64, 0), (3, 64, 0)]


@pytest.mark.parametrize(("name", "layer"), [("qwen3_next", 2), ("mamba2", 1), ("falcon_h1", 1)])
def test_recurrences_have_none(name: str, layer: int) -> None:
    with pytest.raises(CannotFill, match=f"layer {layer} writes a state that no projection"):
        cuts_in(name)


@pytest.mark.parametrize(
    ("rows", "names"), [(None, ("llama", "qwen3", "gpt2", "deepseek_v3")), ("pooled:0.25", ("llama",))]
)
def test_fill_is_sound(rows: str | None, names: tuple[str, ...]) -> None:
    """With true projections it is the exact model; on fewer rows it is the routed graph."""
    for name in names:
        module, inputs = trace(name)
        variants = Variants(cut=PROJECTIONS, selectors=parse_rows(rows))
        found = variants.answer(variants.rewritten(module), inputs)
        assert worst(found["oracle"], found["exact"]) < CLOSE
        assert worst(found["eliminated"], found["routed"]) < CLOSE
        assert worst(found["routed"], found["exact"]) > 0.05


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_no_late_layer_runs_on_filled_rows(name: str) -> None:
    """What is left of a late layer there are the maps of what it writes."""
    module, _ = trace(name)
    counts = {}
    for cut in CUTS:
        variants = Variants(cut=cut, ways={"filled": ("ridge", True)})
        variants.rewritten(module)
        counts[cut] = int(multiply_adds(variants.narrowed["filled"].graph))
    filled, late, width = BATCH * (ROWS - variants.tail), 2, 64
    assert counts[INPUT] - counts[PROJECTIONS] == filled * late * width * width  # the maps to inputs
