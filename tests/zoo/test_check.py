"""What the checks say of a right fill, and that they notice a wrong one, a wasteful one and a crash."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes import rules
from ridgefill_compile.passes.route import route
from ridgefill_compile.testing import variants
from ridgefill_compile.zoo import check
from ridgefill_compile.zoo.calling import Caller, worst
from ridgefill_compile.zoo.check import KEPT, Verdict, check_model
from ridgefill_compile.zoo.pool import check_type
from ridgefill_compile.zoo.shrink import tiny_config, tiny_model, token_ids


def llama(layers: int = 3) -> nn.Module:
    return tiny_model(tiny_config("llama", num_hidden_layers=layers))


def test_a_decoder_that_is_filled() -> None:
    found = check_model(llama(), "mine")
    assert (found.type, found.built, found.graphs, found.sound, found.filled) == ("mine", True, 1, True, True)
    assert found.eliminated
    assert (found.layer_count, found.filled_layers) == (3, 2)
    assert found.gain is not None
    assert found.gain > 1.5
    assert found.calls == {"lengths": "ok", "left padding": "ok", "continued": "ok"}
    assert (found.blocked_by, found.reason, found.notes) == ([], "", [])
    assert found.seconds > 0
    assert Verdict(**found.to_dict()) == found


def test_quick_leaves_out_padding_and_caches() -> None:
    assert check_model(llama(2), quick=True).calls == {"lengths": "ok"}


def test_a_decoder_that_is_refused_is_sound() -> None:
    found = check_type("openai-gpt", quick=True)
    assert found.sound
    assert not found.filled
    assert "no layers were found" in found.reason
    assert found.filled_layers == 0
    assert found.notes == []


WAYS = {
    "oracle": ("oracle", True),
    "routed": ("ridge", False),
    "eliminated": ("ridge", True),
}


@pytest.mark.parametrize(
    ("ways", "says"),
    [
        ({"oracle": ("identity", True)}, "oracle != exact"),
        ({"routed": ("identity", False)}, "eliminated != routed"),
        ({"routed": ("oracle", False), "eliminated": ("oracle", True)}, "the fill changed nothing"),
    ],
)
def test_a_wrong_fill_is_noticed(monkeypatch: pytest.MonkeyPatch, ways: dict[str, Any], says: str) -> None:
    monkeypatch.setattr(check, "_Traced", functools.partial(check._Traced, ways={**WAYS, **ways}))
    monkeypatch.setattr(check, "MOST_IN_DOUBLE", 0)
    found = check_model(llama(), quick=True)
    assert not found.sound
    assert says in found.reason


def test_what_is_wrong_in_fp32_alone_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TOLERANCE", {torch.float32: 0.0, torch.float64: 1e-8})
    found = check_model(llama(), quick=True)
    assert found.sound
    assert "unstable in fp32, right in fp64" in found.notes[0]


def test_rows_that_nobody_reads_are_noticed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rules.RULES, torch.ops.aten.scaled_dot_product_attention.default)
    found = check_model(llama(), quick=True)
    assert found.sound
    assert found.eliminated is False
    assert any("scaled_dot_product_attention" in op for op in found.blocked_by)


def test_a_model_that_crashes_is_a_finding() -> None:
    class Broken(nn.Module):
        def forward(self, input_ids: Tensor, logits_to_keep: int) -> Any:
            raise KeyError("oh")

    found = check_model(Broken())
    assert (found.type, found.built, found.sound) == ("Broken", False, False)
    assert found.reason == "crashed: KeyError: 'oh'"


def test_a_type_that_cannot_be_built_is_a_finding() -> None:
    found = check_type("no-such-type")
    assert not found.built
    assert "not built: OptionError" in found.reason


@pytest.mark.heavy
def test_cost_of_sizes_that_depend_on_data() -> None:
    """Told by one prompt: X-MOD's adapters run on the rows of a language, and no rule narrows them."""
    found = check_type("xmod", quick=True)
    assert found.sound
    assert (found.filled, found.eliminated) == (False, False)
    assert "save nothing" in found.reason


# ---------------------------------------------------------------- calls


def test_a_model_that_makes_no_cache_is_given_one() -> None:
    caller = Caller(tiny_model(tiny_config("recurrent_gemma")), KEPT)
    first, second = (caller.prompt(caller.ids(20)) for _ in range(2))
    assert len({id(call["cache"]) for call in (first, second)}) == 2
    with torch.no_grad():
        caller.module(**first)
        continued = caller.continued(caller.ids(20), caller.ids(9))
    assert continued is not None
    assert continued["cache"].get_seq_length() == first["cache"].get_seq_length() > 0
    assert "cache" not in Caller(llama(), KEPT).prompt(caller.ids(20))


def test_calls_take_what_the_forward_takes() -> None:
    caller = Caller(tiny_model(tiny_config("bart")), KEPT)
    ids = token_ids(30, batch=2)
    output = caller.module(**caller.prompt(ids))
    assert output["logits"].shape[1] == KEPT
    padded = caller.padded(ids)
    assert padded is not None
    assert padded["attention_mask"].sum(1).tolist() == [24, 30]
    assert caller.continued(ids, ids) is not None
    assert Caller(tiny_model(tiny_config("openai-gpt")), KEPT).continued(ids, ids) is None


def test_last_rows_are_the_models_own() -> None:
    model = tiny_model(tiny_config("whisper"))
    caller, ids = Caller(model, KEPT), token_ids(30)
    assert caller.wrapped
    with torch.no_grad():
        assert torch.equal(caller.module(input_ids=ids)["logits"], model(input_ids=ids).logits[:, -KEPT:])


def test_worst_difference() -> None:
    a = torch.tensor([1.0, 20.0, torch.inf])
    assert worst([a], [a.clone()]) == 0
    assert worst([a], [torch.tensor([1.0, 19.0, torch.inf])]) == pytest.approx(1 / 20)
    infinite = [[a[:2]], [a.double()], [torch.tensor([torch.inf, 20.0, 1.0])], [a, a], []]
    assert [worst([a], other) for other in infinite] == [torch.inf] * len(infinite)
    assert worst([torch.tensor([1, 2])], [torch.tensor([1, 3])]) == torch.inf


def test_a_fill_that_fails_where_the_model_alone_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(variants, "route", broken)
    found = check_model(llama(2), quick=True)
    assert not found.sound
    assert found.calls == {"lengths": "failed: compiled, it raises ZeroDivisionError: oh"}


def test_lengths_that_are_refused_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def static_only(module: Any, located: Any, fill: Any) -> Any:
        if not isinstance(located.rows, int):
            raise CannotFill("not today")
        return route(module, located, fill)

    monkeypatch.setattr(variants, "route", static_only)
    found = check_model(llama(), quick=True)
    assert found.sound
    assert found.filled
    assert found.reason == found.calls["lengths"] == "ok, but 1 of 3 filled: not today"
