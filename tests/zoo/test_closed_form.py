"""The form that elimination is held to, against a closed form written from what a layer is."""

from __future__ import annotations

import pytest

from ridgefill_compile.cost import multiply_adds
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.locate import locate
from ridgefill_compile.passes.route import Fill, route
from ridgefill_compile.testing.variants import RandomMaps
from ridgefill_compile.zoo.closed_form import EARLY, LateLayers, closed_form
from tests.decoders import FILLED, token_ids
from tests.passes.graphs import traced_decoder
from tests.test_cost import FORMS, KEPT

ROWS, TAIL = 41, 8  # a prime, so that sizes that count rows are known by it


@pytest.mark.parametrize(("name", "split"), [("llama", 1), ("qwen3", 2), ("olmo2", 0), ("llama_eager", 1)])
def test_form_of_a_decoder(name: str, split: int) -> None:
    module, _ = traced_decoder(FILLED[name].build(), token_ids(ROWS), logits_to_keep=KEPT)
    located = locate(module.graph)
    routed = route(module, located, Fill("ridge", split, TAIL, RandomMaps(located, split)))
    form = closed_form(routed, located, split, TAIL, KEPT)
    assert form is not None
    assert sum(cost.allowed for cost in form.values()) == FORMS[name].filled(1, ROWS, TAIL, split)
    assert sum(cost.whole for cost in form.values()) == multiply_adds(routed.graph)
    assert multiply_adds(eliminate(routed).graph) == FORMS[name].filled(1, ROWS, TAIL, split)


def test_layers_begin_at_what_they_read_and_maps_belong_to_none() -> None:
    module, _ = traced_decoder(FILLED["llama"].build(), token_ids(ROWS), logits_to_keep=KEPT)
    located = locate(module.graph)
    routed = route(module, located, Fill("ridge", 1, TAIL, RandomMaps(located, 1)))
    layers = LateLayers(routed, located, 1)
    assert sorted(layers.inputs.values()) == [1, 2, 3]
    assert {layers.of[node] for node in layers.maps} == {EARLY}
    assert len(layers.maps) == 2
    needed = [node for node in layers.needed if "linear" in str(node.target)]
    assert len(needed) == 6  # keys and values of three layers
