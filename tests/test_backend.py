"""The backend from outside: how it is found, what it refuses, and that a model not filled answers exactly."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgefill_compile import backend, fill
from ridgefill_compile.backend import ridgefill
from ridgefill_compile.errors import CannotFill, OptionError, RidgefillWarning
from ridgefill_compile.passes import narrow
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.report import GraphReport, report
from ridgefill_compile.testing import Decoder
from tests.decoders import token_ids
from tests.toys import IDENTITY, LONG, ORACLE, SHORT, TAIL, compiled, distance, plain, pretrained, prompt

KEEP = {"logits_to_keep": 2}
CLOSE = 1e-5

INSTALLED = bool(metadata.entry_points(group="torch_dynamo_backends", name="ridgefill"))
needs_install = pytest.mark.skipif(not INSTALLED, reason="the package is not installed, so it has no entry point")


def only_graph(model: nn.Module) -> GraphReport:
    (graph,) = report(model).graphs
    return graph


def answers_exactly(model: nn.Module, options: dict[str, Any], *args: Any, **settings: Any) -> GraphReport:
    """The compiled model's answer is the model's own, to the bit; the report of its only prompt."""
    with torch.no_grad():
        expected = model(*args, **settings)
    with pytest.warns(RidgefillWarning, match="runs exactly, not filled"):
        found = compiled(model, options)(*args, **settings)
    assert distance(found, expected) == 0.0
    graphs = report(model).graphs
    assert not any(graph.filled for graph in graphs)
    return graphs[0]


class TestFound:
    @needs_install
    def test_by_name_without_importing_the_package(self, tmp_path: Path) -> None:
        program = """
import sys, torch
model = torch.nn.Linear(2, 2)
assert "ridgefill_compile" not in sys.modules
fast = torch.compile(model, backend="ridgefill", options={"route": "exact", "inner": "eager"})
x = torch.ones(2)
assert torch.equal(fast(x), model(x))
import ridgefill_compile
print(ridgefill_compile.report(model))
"""
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith("graph 0: exact, no prompt: no prompt enters this graph")

    @needs_install
    @pytest.mark.parametrize("how", ["function", "method"])
    def test_by_name_on_a_function_and_on_the_model(self, how: str) -> None:
        model = plain()
        if how == "function":
            call: Any = torch.compile(model, backend="ridgefill", options=ORACLE)
        else:
            model.compile(backend="ridgefill", options=ORACLE)
            call = model
        with torch.no_grad():
            call(prompt(), **KEEP)
        assert only_graph(model).filled


class TestWrongOptions:
    """Raised at the call, as they are: Dynamo would wrap what a backend raises in an error of its own."""

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (ORACLE | {"tali": 16}, "did you mean 'tail'"),
            (ORACLE | {"tail": "16"}, "whole number"),
            (ORACLE | {"route": "rigde"}, "must be one of"),
            (ORACLE | {"mode": "default"}, "Inductor's"),
            ({}, "route 'ridge' needs maps"),
        ],
    )
    def test_error_is_the_options_own(self, options: dict[str, Any], says: str) -> None:
        call = compiled(plain(), options)
        for _ in range(2):
            with pytest.raises(OptionError, match=says) as refused:
                call(prompt(), **KEEP)
            assert type(refused.value) is OptionError

    def test_through_generate(self) -> None:
        model = pretrained()
        model.compile(backend=ridgefill, options={"route": "identity"})
        with pytest.raises(OptionError, match="needs a split"):
            model.generate(token_ids(LONG), max_new_tokens=1)

    def test_split_beyond_the_last_layer(self) -> None:
        found = answers_exactly(plain(), IDENTITY | {"split": 3}, prompt(), **KEEP)
        assert found.reason == "split 3 leaves no late layer: 3 layers were found that write states"
        assert found.hint is not None
        assert found.hint.startswith("choose a split below 3")
        with pytest.raises(CannotFill, match="leaves no late layer"):
            compiled(plain(), IDENTITY | {"split": 3, "strict": True})(prompt(), **KEEP)

    def test_prompts_no_longer_than_the_tail(self) -> None:
        """They are no mistake: the stock graph, no warning, no error."""
        model = plain()
        fast = compiled(model, IDENTITY | {"strict": True})
        for rows in (TAIL - 1, TAIL, SHORT):
            with torch.no_grad():
                expected = model(prompt(rows), **KEEP)
            with warnings.catch_warnings():
                warnings.simplefilter("error", RidgefillWarning)
                assert distance(fast(prompt(rows), **KEEP), expected) == 0.0
        assert {graph.reason for graph in report(model).graphs} == {"shorter than tail + min_fill = 24 rows"}


class TestRefusals:
    """What is wanted cannot be had from filled rows: exact, with a reason, or an error if one was asked for."""

    def refused(self, model: nn.Module, says: str, *args: Any, **settings: Any) -> GraphReport:
        found = answers_exactly(model, IDENTITY, *args, **settings)
        assert says in found.reason
        with pytest.raises(CannotFill, match=says) as raised:
            compiled(model, IDENTITY | {"strict": True})(*args, **settings)
        assert raised.value.reason == found.reason
        assert raised.value.hint == found.hint
        return found

    def test_all_logits(self) -> None:
        found = self.refused(plain(), "logits, a loss or hidden states of more rows than the tail", prompt())
        assert found.hint is not None
        assert "logits_to_keep=k" in found.hint
        assert found.node is not None
        assert ".head (logits: Tensor = self.head(self.norm(" in found.node

    def test_more_logits_than_the_tail(self) -> None:
        answers_exactly(plain(), IDENTITY, prompt(), logits_to_keep=TAIL + 1)

    def test_a_loss(self) -> None:
        ids = token_ids(LONG)
        found = answers_exactly(pretrained(), IDENTITY, ids, labels=ids, use_cache=True)
        assert "a loss" in found.reason
        assert found.node is not None
        assert "cross_entropy_loss" in found.node

    def test_hidden_states(self) -> None:
        wanted = {"output_hidden_states": True, "use_cache": True, **KEEP}
        found = answers_exactly(pretrained(), IDENTITY, token_ids(LONG), **wanted)
        assert "hidden states of more rows than the tail" in found.reason

    def test_attention_weights(self) -> None:
        model = pretrained(attn_implementation="eager")
        wanted = {"output_attentions": True, "use_cache": True, **KEEP}
        answers_exactly(model, IDENTITY, token_ids(LONG), **wanted)

    def test_attention_weights_of_a_plain_module(self) -> None:
        self.refused(Watched(plain().config, "weights"), "neither written row by row", prompt(), **KEEP)

    @pytest.mark.parametrize("split", [0, 2])
    def test_router_scores(self, split: int) -> None:
        """They leave the residual stream inside a layer, row by row as keys do, and are no state all the same."""
        model = Watched(plain().config, "scores")
        found = answers_exactly(model, IDENTITY | {"split": split}, prompt(), **KEEP)
        assert "more rows than the tail" in found.reason
        assert found.layers == 3

    def test_no_cache(self) -> None:
        self.refused(pretrained(), "no layers were found", token_ids(LONG), use_cache=False, **KEEP)

    def test_gradients(self) -> None:
        model = plain()
        fast = torch.compile(model, backend=ridgefill, options=IDENTITY)
        with pytest.warns(RidgefillWarning, match="gradients are wanted"):
            logits = fast(prompt(), **KEEP)[0]
        logits.sum().backward()
        assert only_graph(model).hint == "call the model under torch.no_grad() or inference_mode()"
        assert model.embedding.weight.grad is not None
        with pytest.raises(CannotFill, match="gradients are wanted"):
            torch.compile(model, backend=ridgefill, options=IDENTITY | {"strict": True})(prompt(), **KEEP)

    def test_weights_that_want_no_gradients_are_filled(self) -> None:
        model = plain().requires_grad_(False)
        torch.compile(model, backend=ridgefill, options=IDENTITY)(prompt(), **KEEP)
        assert only_graph(model).filled

    def test_route_none_through_a_mask(self) -> None:
        model = plain(attention="sdpa")
        found = answers_exactly(model, IDENTITY | {"route": "none"}, prompt(), **KEEP)
        assert "route 'none'" in found.reason


class Watched(Decoder):
    """Returns something of each layer beside its states."""

    def __init__(self, config: Any, what: str) -> None:
        super().__init__(config)
        self.what = what

    def forward(self, ids: Tensor, *args: Any, logits_to_keep: int = 0, **settings: Any) -> Any:
        sight = self.sight(ids, None, 0)
        x = self.embedding(ids)
        keys, values, watched = [], [], []
        block: Any
        for block in self.blocks:
            mixed, (key, value) = block.attention(block.norms[0](x), sight)
            if self.what == "weights":
                scores = key @ key.transpose(-1, -2)
                watched.append(torch.softmax(scores + torch.full_like(scores, -1e9).triu(1), -1))
            x = x + mixed
            y = block.norms[1](x)
            share = torch.softmax(block.mlp.up(y)[..., :3], dim=-1)
            if self.what == "scores":
                watched.append(share)
            x = x + share[..., :1] * block.mlp(y)
            keys.append(key)
            values.append(value)
        return self.head(self.norm(x[:, -logits_to_keep:])), keys, values, watched


class TestInference:
    def test_inference_mode(self) -> None:
        model = plain()
        with torch.inference_mode():
            expected = model(prompt(), **KEEP)
            fast = torch.compile(model, backend=ridgefill, options=ORACLE)
            assert distance(fast(prompt(), **KEEP), expected) < CLOSE
        assert only_graph(model).filled

    def test_bfloat16(self) -> None:
        model = plain(positions="learned").to(torch.bfloat16)
        with torch.no_grad():
            expected = model(prompt(), **KEEP)
        assert distance(compiled(model, ORACLE)(prompt(), **KEEP), expected) < 0.1
        assert only_graph(model).filled

    def test_every_pass_verified(self) -> None:
        for route in ("oracle", "none"):
            model = plain()
            compiled(model, ORACLE | {"route": route, "verify": True, "strict": True})(prompt(), **KEEP)
            assert only_graph(model).filled

    def test_routed_without_elimination(self) -> None:
        model = plain()
        options = IDENTITY | {"eliminate": False}
        found = compiled(model, options)(prompt(), **KEEP)
        assert distance(found, compiled(model, IDENTITY)(prompt(), **KEEP)) < CLOSE
        routed, eliminated = report(model).graphs
        assert "eliminate" not in routed.pass_seconds
        assert "eliminate" in eliminated.pass_seconds

    def test_through_autograd_graphs_without_code_generation(self) -> None:
        model = plain()
        with torch.no_grad():
            expected = model(prompt(), **KEEP)
        assert distance(compiled(model, ORACLE | {"inner": "aot_eager"})(prompt(), **KEEP), expected) < CLOSE


class TestNothingToGain:
    def test_a_split_that_saves_nothing(self) -> None:
        """Only the last layer is late, and its attention alone is not worth it at hardly more rows than the tail."""
        model = plain(layers=2)
        found = answers_exactly(model, IDENTITY | {"min_fill": 1}, prompt(TAIL + 1), logits_to_keep=TAIL)
        assert "filling would save nothing" in found.reason


class TestGraphBreaks:
    @pytest.mark.parametrize("split", [0, 2])
    def test_inside_a_layer(self, split: int) -> None:
        model = Broken(plain().config, "layer")
        answers_exactly(model, IDENTITY | {"split": split}, prompt(), **KEEP)
        told = [graph.graph_break for graph in report(model).graphs if graph.graph_break]
        assert all(f"{Path(__file__).name}:" in text for text in told)
        # A break below several frames leaves no reason with the graphs; the hint says how to see it.
        assert told or any("TORCH_LOGS=graph_breaks" in str(graph.hint) for graph in report(model).graphs)

    @pytest.mark.parametrize("split", [0, 1])
    def test_between_layers(self, split: int) -> None:
        model = Broken(plain().config, "between")
        answers_exactly(model, IDENTITY | {"split": split}, prompt(), **KEEP)
        first, *_, last = report(model).graphs
        assert first.graph_break is not None
        assert "more rows than the tail" in first.reason
        assert "begins in the middle of the model" in last.reason
        assert last.hint is not None
        assert "TORCH_LOGS=graph_breaks" in last.hint

    def test_in_a_loop_over_layers(self) -> None:
        """Dynamo then gives up the loop and compiles each layer alone: none of them may be taken for a model."""
        model = Broken(plain().config, "loop")
        for split in (0, 1):
            answers_exactly(model, IDENTITY | {"split": split}, prompt(), **KEEP)
        assert all("begins in the middle" in graph.reason for graph in report(model).graphs if graph.rows)

    def test_after_the_layers_is_filled(self) -> None:
        model = Broken(plain().config, "head")
        with torch.no_grad():
            expected = model(prompt(), **KEEP)
        assert distance(compiled(model, ORACLE)(prompt(), **KEEP), expected) < CLOSE
        assert [graph.filled for graph in report(model).graphs] == [True, False]


class Broken(Decoder):
    """Breaks Dynamo's graph somewhere."""

    def __init__(self, config: Any, where: str) -> None:
        super().__init__(config)
        self.where = where
        if where == "layer":
            block: Any = self.blocks[1]
            block.norms[1] = Stop(block.norms[1])

    def forward(self, ids: Tensor, *args: Any, logits_to_keep: int = 0, **settings: Any) -> Any:
        sight = self.sight(ids, None, 0)
        x = self.embedding(ids)
        states: list[tuple[Tensor, Tensor]] = []
        for block in self.blocks[:2]:
            x, state = block(x, sight)
            states.append((state[0], state[1]))
            if self.where == "loop":
                torch._dynamo.graph_break()
        if self.where == "between":
            torch._dynamo.graph_break()
        for block in self.blocks[2:]:
            x, state = block(x, sight)
            states.append((state[0], state[1]))
        x = x[:, -logits_to_keep:]
        if self.where == "head":
            torch._dynamo.graph_break()
        return self.head(self.norm(x)), [key for key, _ in states], [value for _, value in states]


class Stop(nn.Module):
    """A module with a graph break in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.inner(x)


class TestBugs:
    """A pass that fails in a way nobody thought of costs the fill, never the answer."""

    @pytest.fixture(params=["capture", "route", "eliminate"])
    def broken_pass(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        def fail(*args: Any, **settings: Any) -> None:
            raise ZeroDivisionError("the moon is in the wrong house")

        monkeypatch.setattr(narrow if request.param == "eliminate" else fill, request.param, fail)
        return request.param

    def test_the_model_answers_exactly(self, broken_pass: str) -> None:
        found = answers_exactly(plain(), IDENTITY, prompt(), **KEEP)
        assert found.reason == "a pass failed: ZeroDivisionError: the moon is in the wrong house"
        assert found.hint is not None
        assert "please report it" in found.hint

    @pytest.mark.parametrize("broken_pass", ["route"], indirect=True)
    def test_strict_raises(self, broken_pass: str) -> None:
        with pytest.raises(Exception, match="the moon is in the wrong house"):
            compiled(plain(), IDENTITY | {"strict": True})(prompt(), **KEEP)

    def test_a_pass_that_the_verifier_catches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(module: Any, *args: Any) -> Any:
            result = eliminate(module, *args)
            output: Any = result.graph.output_node()
            _, *others = output.args[0]
            output.args = ((others[0], *others),)
            return result

        monkeypatch.setattr(narrow, "eliminate", wrong)
        found = answers_exactly(plain(), IDENTITY | {"verify": True}, prompt(), **KEEP)
        assert "BrokenPass: eliminate" in found.reason


class TestInductor:
    @pytest.fixture
    def patches(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What Inductor is given as configuration, without running it."""
        from torch._inductor import compile_fx

        seen: list[Any] = []

        def record(module: Any, inputs: Any, config_patches: Any = None) -> Any:
            seen.append(config_patches)
            return module.forward

        monkeypatch.setattr(compile_fx, "compile_fx", record)
        return seen

    @pytest.mark.parametrize("rows", [SHORT, LONG])
    def test_mode_is_forwarded(self, patches: list[Any], rows: int) -> None:
        from torch._inductor import list_mode_options

        options = IDENTITY | {"inner": "inductor", "mode": "max-autotune-no-cudagraphs"}
        compiled(plain(), options)(prompt(rows), **KEEP)
        assert patches == [list_mode_options("max-autotune-no-cudagraphs")]

    def test_mode_beside_the_options(self, patches: list[Any]) -> None:
        fast = torch.compile(plain(), backend=backend.ridgefill, mode="max-autotune-no-cudagraphs")
        with torch.no_grad(), pytest.raises(OptionError, match="needs maps"):
            fast(prompt(), **KEEP)

    def test_no_mode(self, patches: list[Any]) -> None:
        compiled(plain(), IDENTITY | {"inner": "inductor"})(prompt(), **KEEP)
        compiled(plain(), IDENTITY | {"inner": "inductor", "mode": "default"})(prompt(), **KEEP)
        assert patches == [None, None]
