"""Filled values and keys are brought to the length of exact ones: against a fill by hand, and in every kind of call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from ridgefill_compile.passes import route as routing
from ridgefill_compile.passes.calls import shape
from ridgefill_compile.passes.correct import Correction
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.locate import locate
from ridgefill_compile.passes.rescale import length_ratio, times
from ridgefill_compile.passes.route import Fill, route
from ridgefill_compile.passes.verify import verify
from ridgefill_compile.report import report
from ridgefill_compile.testing.variants import RandomMaps
from tests.decoders import CORE, FILLED, states_of, token_ids
from tests.passes.graphs import aten, named, traced_decoder
from tests.reference import fill_by_hand
from tests.toys import LONG, MIN_FILL, TAIL, compiled, distance, pretrained, random_maps

LAYERS, COUNT = 3, 5
MAPS = random_maps(64, layers=LAYERS, splits=(0,))
RIDGE: dict[str, Any] = {"tail": TAIL, "min_fill": MIN_FILL, "inner": "eager", "strict": True, "maps": MAPS}
CALL: dict[str, Any] = {"use_cache": True, "logits_to_keep": TAIL}


def by_hand(model: Any, ids: Tensor, names: tuple[str, ...], count: int = COUNT, **given: Any) -> dict[str, Tensor]:
    """A fill whose states of some names are rescaled."""

    def correct(layer: int, name: str, states: Tensor, predicted: Tensor, exact: Tensor) -> Tensor:
        if name not in names:
            return states
        ratio = (exact.norm(dim=-1) / predicted.norm(dim=-1)).mean(-1)[..., None, None]
        return torch.cat([ratio * states[:, :, :-TAIL], states[:, :, -TAIL:]], 2)

    with torch.no_grad():
        return fill_by_hand(model, ids, MAPS, TAIL, count, correct, **given)


def agrees(output: Any, expected: dict[str, Tensor]) -> None:
    found = {"logits": output.logits, **states_of(output)}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


class TestAgainstAFillByHand:
    @pytest.mark.parametrize(
        ("options", "names"),
        [
            ({}, ()),
            ({"value_rescale": COUNT}, ("values",)),
            ({"key_rescale": COUNT}, ("keys",)),
            ({"value_rescale": COUNT, "key_rescale": COUNT}, ("keys", "values")),
        ],
    )
    def test_a_batch(self, options: dict[str, int], names: tuple[str, ...]) -> None:
        model, ids = pretrained(layers=LAYERS), token_ids(LONG, batch=2)
        agrees(compiled(model, RIDGE | options)(ids, **CALL), by_hand(model, ids, names))

    @pytest.mark.parametrize("count", [1, TAIL - 1, TAIL])
    def test_of_one_row_and_of_the_whole_tail(self, count: int) -> None:
        model, ids = pretrained(layers=LAYERS), token_ids(LONG)
        output = compiled(model, RIDGE | {"value_rescale": count})(ids, **CALL)
        agrees(output, by_hand(model, ids, ("values",), count))

    def test_every_length(self) -> None:
        model = pretrained(layers=LAYERS)
        fast = compiled(model, RIDGE | {"value_rescale": COUNT})
        for rows in (LONG, 61, 83):
            ids = token_ids(rows)
            agrees(fast(ids, **CALL), by_hand(model, ids, ("values",)))
        assert len(report(model).graphs) == 2

    def test_padding_on_the_left(self) -> None:
        model, ids = pretrained(layers=LAYERS), token_ids(LONG, batch=2)
        mask = torch.ones_like(ids)
        mask[0, :9] = 0
        places = torch.arange(LONG).expand(2, -1)  # rotary positions of both count from the first row, pads included
        output = compiled(model, RIDGE | {"value_rescale": COUNT})(
            ids, attention_mask=mask, position_ids=places, **CALL
        )
        expected = by_hand(model, ids, ("values",), mask=mask)
        agrees(output, {"logits": expected["logits"]})
        for name, value in expected.items():
            if name != "logits":  # rows of padding see nothing: what they are is nobody's
                torch.testing.assert_close(states_of(output)[name][0, :, 9:], value[0, :, 9:], rtol=1e-4, atol=1e-4)

    def test_a_continued_cache(self) -> None:
        model, ids = pretrained(layers=LAYERS), token_ids(12 + LONG, batch=2)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :12], use_cache=True, past_key_values=cache)
        past = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        output = compiled(model, RIDGE | {"value_rescale": COUNT})(ids[:, 12:], past_key_values=cache, **CALL)
        agrees(output, by_hand(model, ids[:, 12:], ("values",), past=past))

    def test_a_static_cache(self) -> None:
        model, ids = pretrained(layers=LAYERS), token_ids(LONG)
        cache = StaticCache(config=model.config, max_cache_len=LONG + 8)
        output = compiled(model, RIDGE | {"value_rescale": COUNT})(ids, past_key_values=cache, **CALL)
        expected = by_hand(model, ids, ("values",))
        agrees(output, {"logits": expected["logits"]})
        for index, layer in enumerate(cache.layers):
            values = layer.values
            assert values is not None
            torch.testing.assert_close(values[:, :, :LONG], expected[f"{index}.values"], rtol=1e-4, atol=1e-4)

    def test_selected_rows_keep_their_values(self) -> None:
        model, ids = pretrained(layers=LAYERS), token_ids(LONG, batch=2)
        maps = random_maps(64, layers=LAYERS, splits=(1,))
        options = RIDGE | {"rows": "pooled:0.25", "maps": maps}
        plain, scaled = (
            states_of(compiled(model, options | {"value_rescale": count})(ids, **CALL)) for count in (0, COUNT)
        )
        same = (plain["2.values"] == scaled["2.values"]).all(-1).all(1)
        assert same[:, -TAIL:].all()
        assert same[:, :-TAIL].sum(1).tolist() == [(LONG - TAIL) // 4] * 2


def test_true_predictions_are_as_long_as_they_should_be() -> None:
    model, ids = pretrained(layers=LAYERS), token_ids(LONG, batch=2)
    options = {"route": "oracle", "split": 0, "tail": TAIL, "min_fill": MIN_FILL, "inner": "eager", "strict": True}
    with torch.no_grad():
        expected = model(ids, **CALL)
    found = compiled(model, options | {"value_rescale": COUNT, "key_rescale": COUNT})(ids, **CALL)
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "cohere_qk_norm"])
def test_keys_that_are_normed_stay_as_they_are(name: str) -> None:
    model, ids = pretrained(name, layers=LAYERS), token_ids(LONG)
    for layer in model.model.layers:
        torch.nn.init.ones_(layer.self_attn.k_norm.weight)  # with weights of any size, lengths differ a little
    plain = compiled(model, RIDGE)(ids, **CALL)
    scaled = compiled(model, RIDGE | {"key_rescale": COUNT})(ids, **CALL)
    assert distance(scaled, plain) < 1e-4


def test_nothing_predicted_stays_nothing() -> None:
    zero, ones = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    assert torch.equal(times(ones, length_ratio(ones, zero, 2, 3)), ones)
    assert times(ones.half(), length_ratio(ones.half(), 3 * ones.half(), 2, 3)).dtype == torch.float16


class TestGraphs:
    def routed(self, name: str, correction: Correction, **call: Any) -> Any:
        model = FILLED[name].build(num_hidden_layers=4)
        graph, inputs = traced_decoder(model, token_ids(LONG, batch=2), logits_to_keep=1, **call)
        located = locate(graph.graph)
        fill = Fill("ridge", 1, TAIL, RandomMaps(located, 1), correction=correction)
        return route(graph, located, fill), inputs, graph

    def test_off_nothing_is_looked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(routing, "attention_states", None)
        self.routed("llama", Correction())
        with pytest.raises(TypeError):
            self.routed("llama", Correction(value_rescale=1))

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_few_rows_are_computed_twice(self, dynamic: bool) -> None:
        """Map and value projection of a late layer run once more on the measured rows and the last one."""
        plain, scaled = (
            eliminate(self.routed("llama", Correction(value_rescale=count), dynamic=dynamic)[0]) for count in (0, COUNT)
        )
        more = [shape(node)[1:] for node in named(scaled, aten.linear.default)]
        for node in named(plain, aten.linear.default):
            more = remove(more, shape(node)[1:])
        assert more == [(COUNT + 1, 64), (COUNT + 1, 32)] * 2

    @pytest.mark.parametrize("name", CORE)
    def test_eliminated_is_routed(self, name: str) -> None:
        routed, inputs, before = self.routed(name, Correction(value_rescale=COUNT, key_rescale=COUNT - 1))
        verify(routed, before, "route")
        after = eliminate(routed)
        verify(after, routed, "eliminate")
        left, right = ([x.clone() if isinstance(x, Tensor) else x for x in inputs] for _ in range(2))
        with torch.no_grad():
            torch.testing.assert_close(after(*left), routed(*right), rtol=1e-4, atol=1e-4, equal_nan=True)


def remove(items: list[Any], item: Any) -> list[Any]:
    """The list without the first entry like this one."""
    texts = [str(each) for each in items]
    place = texts.index(str(item))
    return items[:place] + items[place + 1 :]
