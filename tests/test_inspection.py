"""What `inspect_model` says of toy models, against what is known of them, and that it runs and allocates nothing."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ridgefill_compile.errors import OptionError, RidgefillError
from ridgefill_compile.inspection import Inspection, ValueFacts, inspect_model
from ridgefill_compile.layer_picture import check_picture, draw_late_layer
from ridgefill_compile.report import report
from ridgefill_compile.zoo.shrink import tiny_config, tiny_model
from tests.decoders import FILLED, RECURRENT, REFUSED, token_ids
from tests.toys import compiled, pretrained, random_maps

ROWS, TAIL, SPLIT = 60, 16, 1
HIDDEN, STATE, INNER = 64, 32, 96  # of the toy: width, 2 key heads of 16, MLP


@pytest.fixture(scope="module")
def llama() -> Inspection:
    """Of four layers, layer 2 is shown: late, mapped, and not the last."""
    return inspect_model(pretrained(layers=4), rows=ROWS, tail=TAIL, split=SPLIT)


def of_module(found: Inspection, name: str) -> ValueFacts:
    """The value of a layer's linear module."""
    (value,) = (v for v in found.values if v.module.endswith(name) and v.op == "aten.linear")
    return value


def test_layers(llama: Inspection) -> None:
    assert llama.reason == ""
    assert [layer.index for layer in llama.layers] == [0, 1, 2, 3]
    assert [layer.late for layer in llama.layers] == [False, True, True, True]
    assert {layer.kind for layer in llama.layers} == {"attention"}
    assert {layer.width for layer in llama.layers} == {HIDDEN}
    assert [layer.module for layer in llama.layers] == [f"model.layers.{i}.self_attn" for i in range(4)]
    for layer in llama.layers:
        assert layer.input.endswith(f"[1, {ROWS}, {HIDDEN}]")
        assert [state.split(" ", 1)[1] for state in layer.states] == [f"[1, 2, {ROWS}, 16]"] * 2


def test_rows_of_a_late_layer(llama: Inspection) -> None:
    assert llama.late_layer == 2
    keys, values = of_module(llama, "k_proj"), of_module(llama, "v_proj")
    assert (keys.rows, values.rows) == ("all", "all")
    assert keys.shape == ["1", str(ROWS), str(STATE)]
    for name in ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert of_module(llama, name).rows == f"last {TAIL}", name
    (attention,) = (v for v in llama.values if "scaled_dot_product_attention" in v.op)
    assert attention.rows == f"last {TAIL}"
    assert len(attention.reads) == 3
    assert {v.module.split(".self_attn")[0].split(".mlp")[0].split(".input")[0] for v in llama.values[3:-2]} <= {
        "model.layers.2",
        "model.layers.2.post_attention_layernorm",
    }


def test_reads_are_values_shown_before(llama: Inspection) -> None:
    seen: set[str] = set()
    for value in llama.values:
        assert seen.issuperset(value.reads)
        seen.add(value.name)
    assert not llama.values[0].reads


def test_multiply_adds_are_the_reports(llama: Inspection) -> None:
    model = pretrained(layers=4)
    options = {"maps": random_maps(HIDDEN, layers=4), "tail": TAIL, "min_fill": 1, "inner": "eager"}
    compiled(model, options)(token_ids(ROWS), use_cache=True, logits_to_keep=1)
    (graph,) = report(model).graphs
    assert graph.filled
    assert llama.multiply_adds_exact == graph.multiply_adds_exact
    assert llama.multiply_adds_filled == graph.multiply_adds_filled
    assert llama.ceiling_multiply_adds == graph.ceiling_multiply_adds
    assert llama.ceiling_layer_passes == graph.ceiling_layer_passes


def test_plain_values_for_json(llama: Inspection) -> None:
    told = llama.to_dict()
    assert json.loads(json.dumps(told)) == told


def test_half_of_the_layers_by_default() -> None:
    found = inspect_model(pretrained(layers=3), rows=ROWS, tail=TAIL)
    assert found.split == 1
    assert found.late_layer == 2
    assert of_module(found, "q_proj").rows == "last 1"  # the last layer: one row of logits is wanted


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama_eager", "attention (spelt out)"), ("phi3", "attention"), ("gpt2", "attention")],
)
def test_other_anatomies(name: str, kind: str) -> None:
    found = inspect_model(FILLED[name].build(num_hidden_layers=2), rows=ROWS, tail=TAIL, split=0)
    assert found.reason == ""
    assert [layer.kind for layer in found.layers] == [kind] * 2
    assert found.ceiling_multiply_adds is not None
    assert found.ceiling_multiply_adds > 1.5
    assert {value.rows for value in found.values} == {"all", f"last {TAIL}", "last 1"}


def test_kinds_of_recurrent_layers() -> None:
    kinds = {
        "mamba": ["recurrence"] * 4,
        "falcon_h1": ["attention and recurrence"] * 4,
        "qwen3_5_text": ["recurrence", "attention"] * 2,
    }
    for name, expected in kinds.items():
        found = inspect_model(RECURRENT[name].build(), rows=ROWS, tail=TAIL, split=1)
        assert [layer.kind for layer in found.layers] == expected
        assert found.reason == ""


def test_a_model_that_would_not_be_filled_says_why() -> None:
    found = inspect_model(REFUSED["openai-gpt"].build(num_hidden_layers=1), rows=20, tail=8)
    assert "no layers were found" in found.reason
    assert found.values == []
    assert found.multiply_adds_filled is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tail": ROWS}, f"shorter than the prompt: tail {ROWS}, rows {ROWS}"),
        ({"tail": 0}, "at least 1 row"),
        ({"split": 2}, r"the split must lie in 0\.\.1: 2 layers write states"),
        ({"split": -1}, r"the split must lie in 0\.\.1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, int], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        inspect_model(pretrained(), **{"rows": ROWS, "tail": TAIL, **settings})


def test_as_many_rows_as_there_are_positions() -> None:
    positions = 200
    model = FILLED["gpt2"].build(num_hidden_layers=2, max_position_embeddings=positions)
    found = inspect_model(model)
    assert (found.rows, found.tail, found.reason) == (positions, positions // 2, "")


def test_more_rows_than_a_model_takes() -> None:
    model = tiny_model(tiny_config("bert"))
    rows = model.config.max_position_embeddings + 1
    with pytest.raises(RidgefillError, match=f"a prompt of {rows} rows cannot be traced: .*dimension"):
        inspect_model(model, rows=rows)


@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
def test_a_picture_of_a_late_layer(tmp_path: Path, name: str) -> None:
    """Experts and recurrences hold functions that are no operators of torch's own."""
    found = inspect_model({**FILLED, **RECURRENT}[name].build(), rows=ROWS, tail=TAIL, split=SPLIT)
    assert draw_late_layer(found, tmp_path / "layer.png").stat().st_size > 10_000


@pytest.mark.parametrize(("name", "says"), [("a.foo", "must end in one of .*.png"), ("none/a.png", "no folder none")])
def test_pictures_that_cannot_be_written(name: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        check_picture(Path(name))


def test_a_model_that_is_not_traced() -> None:
    off = torch._dynamo.config.patch(disable=True)
    with off, pytest.raises(RidgefillError, match="the model was not traced"):
        inspect_model(pretrained(), rows=ROWS, tail=TAIL)


def largest() -> int:
    """The most memory this process has held, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_no_weights_are_allocated() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 3,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**sizes))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    before = largest()
    found = inspect_model(model, rows=4096, tail=512)
    assert largest() - before < weights / 50
    assert found.reason == ""
    assert [layer.width for layer in found.layers] == [8192] * 3
    assert found.ceiling_multiply_adds is not None
    assert 2.0 < found.ceiling_multiply_adds < 3.0
    assert {(parameter.device.type, type(parameter)) for parameter in model.parameters()} == {
        ("meta", torch.nn.Parameter)
    }
    assert inspect_model(model, rows=4096, tail=512) == found
