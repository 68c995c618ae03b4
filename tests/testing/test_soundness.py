"""Soundness of fills, equality of graphs: what is right passes; what is planted is found, named and runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.fx import GraphModule

from ridgefill_compile.passes import narrow, route
from ridgefill_compile.passes.calls import Call, Need, arguments, aten, first_operand, rewrite
from ridgefill_compile.passes.demand import Demands
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.rows import Rows
from ridgefill_compile.passes.rules import RULES
from ridgefill_compile.testing import (
    Decoder,
    DecoderConfig,
    Mismatch,
    Routing,
    assert_rows_sound,
    assert_same_on_demanded_rows,
    decoders,
    first_difference,
    routings,
    traced,
    traced_call,
)
from tests.decoders import FILLED, token_ids
from tests.testing.planted import cumsum_is_pointwise, gelu_of_tail, last_row_of_scores, without_change

PARTS: list[dict[str, Any]] = [
    {},
    {"experts": 3},
    {"experts": 3, "grouped": True},
    {"recurrence": "delta"},
    {"recurrence": "linear"},
    {"streams": 2},
    {"per_layer": 4},
    {"shared": 1},
    {"latent": 6},
]
ROUTING = Routing(rows=7, tail=3, batch=2)


def fails_again(mismatch: Mismatch) -> None:
    """The printed code fails at the same node."""
    with pytest.raises(Mismatch) as again:
        exec(mismatch.source, {})
    assert again.value.difference == mismatch.difference
    assert str(again.value).splitlines()[0] == str(mismatch).splitlines()[0]


# ---------------------------------------------------------------- fills


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_every_part_is_filled(parts: dict[str, Any]) -> None:
    config = DecoderConfig(layers=3, **parts)
    assert assert_rows_sound(Decoder(config), ROUTING.inputs(config), 1, 3, must_fill=True) is None


@settings(max_examples=8)
@given(decoder=decoders(), routing=routings())
def test_any_fill_is_sound_or_refused(decoder: Decoder, routing: Routing) -> None:
    inputs = routing.inputs(decoder.config)
    kept: dict[str, Any] = {"rows": routing.selected, "first_rows": routing.first_rows}
    assert_rows_sound(decoder, inputs, routing.split, routing.tail, route=routing.route, **kept)


def test_a_model_of_transformers() -> None:
    model = FILLED["llama"].build(num_hidden_layers=2)
    assert assert_rows_sound(model, token_ids(9), 1, 3, must_fill=True) is None


def test_a_refusal_is_sound_and_says_why() -> None:
    decoder = Decoder(DecoderConfig(layers=2))
    reason = assert_rows_sound(decoder, {**ROUTING.inputs(decoder.config), "logits_to_keep": 4}, 1, 3)
    assert reason is not None
    assert "more rows than the tail" in reason
    with pytest.raises(Mismatch, match="not filled: split 2 leaves no late layer") as caught:
        assert_rows_sound(decoder, ROUTING.inputs(decoder.config), 2, 3, must_fill=True)
    fails_again(caught.value)


def scan_of_the_tail(node: Any, rows: Any) -> Call:
    """Keys and values narrowed, too: the tail forgets the prefix."""
    operands = {name: arguments(node)[name] for name in ("query", "key", "value", "g")}
    return rewrite(node, **{name: Need(operand, rows) for name, operand in operands.items()})


def smallest_first(node: Any, rows: Any) -> Call:
    """Other experts."""
    return rewrite(node, self=Need(arguments(node)["self"], rows), largest=False)


PLANTED: list[tuple[dict[str, Any], Any, Any]] = [
    ({"attention": "causal"}, aten.scaled_dot_product_attention.default, first_operand),
    ({"experts": 3}, aten.topk.default, smallest_first),
    ({"recurrence": "linear"}, torch.ops.ridgefill.linear_attention.default, scan_of_the_tail),
]


@pytest.mark.parametrize(("parts", "op", "rule"), PLANTED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_wrong_rule_is_found(parts: Any, op: Any, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecoderConfig(layers=3, **parts)
    assert_rows_sound(Decoder(config), ROUTING.inputs(config), 0, 3, must_fill=True)
    monkeypatch.setitem(RULES, op, rule)
    with pytest.raises(Mismatch) as caught:
        assert_rows_sound(Decoder(config), ROUTING.inputs(config), 0, 3, must_fill=True)
    difference = caught.value.difference
    assert difference is not None
    assert "!=" in str(caught.value)
    if op is not aten.topk.default:
        assert difference.op in (str(op), "<built-in function getitem>")
        assert difference.demanded.startswith("last 3 of dim")
        assert 3 in difference.shape
        assert 7 in difference.shape_before
    fails_again(caught.value)


class SumsRows(Decoder):
    """A decoder of one's own: the last layer adds up the rows so far."""

    def end(self, x: torch.Tensor, keep: int = 0) -> torch.Tensor:
        return super().end(x + x.cumsum(1), keep)


def test_a_wrong_rule_is_found_in_a_model_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SumsRows(DecoderConfig())
    monkeypatch.setitem(RULES, aten.cumsum.default, cumsum_is_pointwise)
    with pytest.raises(Mismatch, match=r"model = \.\.\.  # a tests.testing.test_soundness.SumsRows") as caught:
        assert_rows_sound(decoder, ROUTING.inputs(decoder.config), 1, 3)
    assert caught.value.difference is not None
    assert caught.value.difference.op == "aten.cumsum.default"
    assert caught.value.difference.demanded == "last 1 of dim 1"


def test_a_wrong_route_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix rows of a late layer shifted by one: the oracle's results are not the model's."""
    right = route._Router.prediction

    def shifted(self: Any, cut: Any, value: Any) -> Any:
        predicted = right(self, cut, value)
        return self.emit(aten.roll.default, predicted, [1], [1], like=value)

    monkeypatch.setattr(route._Router, "prediction", shifted)
    decoder = Decoder(DecoderConfig(layers=3))
    with pytest.raises(Mismatch, match="oracle != exact") as caught:
        assert_rows_sound(decoder, ROUTING.inputs(decoder.config), 1, 3)
    assert caught.value.difference is not None
    assert caught.value.difference.layer.startswith("blocks.2")
    fails_again(caught.value)


def test_a_broken_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elimination that forgets a bias."""

    def forgetful(module: GraphModule, *demands: Demands) -> GraphModule:
        result = eliminate(module, *demands)
        linear = [n for n in result.graph.nodes if n.target is aten.linear.default and len(n.args) == 3][-1]
        linear.args = linear.args[:2]
        result.recompile()
        return result

    monkeypatch.setattr(narrow, "eliminate", forgetful)
    decoder = Decoder(DecoderConfig(layers=2, bias=True))
    with pytest.raises(Mismatch) as caught:
        assert_rows_sound(decoder, ROUTING.inputs(decoder.config), 1, 3)
    assert caught.value.difference is not None
    assert caught.value.difference.op in ("aten.linear.default", "aten.add.Tensor")
    fails_again(caught.value)


# ---------------------------------------------------------------- any rewrite


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(decoder=decoders(), routing=routings())
def test_elimination_keeps_what_is_returned(decoder: Decoder, routing: Routing) -> None:
    graph, inputs = traced_call(decoder, routing.inputs(decoder.config))
    assert_same_on_demanded_rows(graph, eliminate)
    assert_same_on_demanded_rows(graph, eliminate(graph), inputs)
    assert first_difference(graph, eliminate(graph), inputs) is None


def plain_graph(**settings: Any) -> tuple[GraphModule, list[Any]]:
    config = DecoderConfig(layers=2, **settings)
    return traced_call(Decoder(config), ROUTING.inputs(config))


def test_a_broken_rewrite_is_found_and_its_code_runs() -> None:
    graph, inputs = plain_graph(attention="eager")
    assert_same_on_demanded_rows(graph, without_change, inputs)
    with pytest.raises(Mismatch) as caught:
        assert_same_on_demanded_rows(graph, last_row_of_scores, inputs)
    difference = caught.value.difference
    assert difference is not None
    assert (difference.op, difference.layer) == ("aten.softmax.int", "blocks.1.attention")
    assert "from tests.testing.planted import last_row_of_scores as rewrite" in caught.value.source
    fails_again(caught.value)


def test_graphs_are_compared_on_the_rows_that_are_read() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (nn.functional.gelu(x) * 2,)

    graph = traced(f, torch.randn(2, 5, 3))
    assert_same_on_demanded_rows(graph, gelu_of_tail, demanded={0: Rows(1, 1)})
    with pytest.raises(Mismatch) as caught:
        assert_same_on_demanded_rows(graph, gelu_of_tail, demanded={0: Rows(1, 2)})
    assert caught.value.difference is not None
    assert caught.value.difference.op == "aten.mul.Tensor"
    assert "Rows(1, 2, 1)" in caught.value.source


def test_a_rewrite_may_return_the_rows_that_are_read_alone() -> None:
    def tail(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (nn.functional.gelu(x[:, -2:]) * 2,)

    graph = traced(lambda x: (nn.functional.gelu(x) * 2,), torch.randn(2, 5, 3))
    assert_same_on_demanded_rows(graph, traced(tail, torch.randn(2, 5, 3)), demanded={0: Rows(1, 2)})
    with pytest.raises(Mismatch):
        assert_same_on_demanded_rows(graph, traced(tail, torch.randn(2, 5, 3)))


def test_random_inputs_are_tokens_where_tokens_are_looked_up() -> None:
    graph, _ = plain_graph()
    assert_same_on_demanded_rows(graph, without_change)
    with pytest.raises(Mismatch, match="first difference: node"):
        assert_same_on_demanded_rows(graph, gelu_of_tail)


def test_the_first_difference_is_the_first() -> None:
    graph, inputs = plain_graph(gated=False)
    broken = eliminate(graph)
    products = [node for node in broken.graph.nodes if node.target is aten.linear.default]
    for node in products[3::2]:
        with broken.graph.inserting_after(node):
            double = broken.graph.call_function(aten.mul.Tensor, (node, 2.0))
        node.replace_all_uses_with(double, delete_user_cb=lambda user, own=double: user is not own)
    broken.recompile()
    found = first_difference(graph, broken, inputs)
    assert found is not None
    reader = next(iter(next(iter(products[3].users)).users))
    assert found.node == reader.name
    assert found.demanded
    assert f"node {found.node}" in str(found)
    assert found.gap > 1e-3
