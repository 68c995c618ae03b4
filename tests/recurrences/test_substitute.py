from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from transformers import (
    AutoModelForCausalLM,
    Mamba2Config,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RwkvConfig,
    xLSTMConfig,
)
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.xlstm.modeling_xlstm import xLSTMCache

from ridgefill_compile.capture import capture
from ridgefill_compile.recurrences import RECURRENCES
from ridgefill_compile.recurrences.substitute import Substitution, substitute_recurrences
from tests.decoders import cache_of
from tests.recurrences.checks import close


class Captured:
    """A backend that keeps the graph of every compilation and runs it as captured."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []

    def __call__(self, module: GraphModule, inputs: object) -> GraphModule:
        self.graphs.append(capture(module))
        return self.graphs[-1]

    def operators(self) -> list[str]:
        """Names of the recurrences in the last graph."""
        return [node.target.__name__ for node in self.graphs[-1].graph.nodes if node.target in RECURRENCES]


def delta_net() -> PreTrainedConfig:
    return Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=4,
        layer_types=["linear_attention", "full_attention"],
    )


def mamba() -> PreTrainedConfig:
    return MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1, time_step_rank=4)


def mamba2() -> PreTrainedConfig:
    return Mamba2Config(
        vocab_size=64,
        hidden_size=16,
        state_size=8,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=8,
        n_groups=2,
        chunk_size=32,
    )


def rwkv() -> PreTrainedConfig:
    return RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, context_length=512)


def xlstm() -> PreTrainedConfig:
    return xLSTMConfig(  # its cache rounds query widths, half of this, up to 64
        vocab_size=64,
        hidden_size=128,
        embedding_dim=128,
        num_hidden_layers=2,
        num_heads=2,
        eps=1e-3,
    )


MODELS = {
    "delta_net": (delta_net, ["gated_delta_rule.default"]),
    "mamba": (mamba, ["selective_scan.default"]),
    "mamba2": (mamba2, ["linear_attention.default"]),
    "rwkv": (rwkv, ["wkv.default"] * 2),
    "xlstm": (xlstm, ["mlstm.default"] * 2),
}


@pytest.fixture(params=MODELS, name="model")
def _model(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, list[str]]:
    config, operators = MODELS[request.param]
    return AutoModelForCausalLM.from_config(config()).eval(), operators


def test_one_graph_for_every_length(model):
    """One node a scan; the third length and later ones, of fewer or more tiles, compile nothing."""
    model, operators = model
    substituted = substitute_recurrences(model)
    assert any(s.operator for s in substituted), substituted
    captured = Captured()
    compiled = torch.compile(model, backend=captured)
    with torch.no_grad():
        for rows in (70, 200, 333, 65):
            ids = torch.randint(0, 64, (2, rows))
            expected, actual = model(ids, use_cache=True), compiled(ids, use_cache=True)
            close(actual.logits, expected.logits)
            check_same_states(actual, expected)
            if rows <= 200:  # the first length is compiled for itself, the second for every one
                assert captured.operators() == operators
    assert len(captured.graphs) == 2
    sizes = [sum(node.op == "call_function" for node in graph.graph.nodes) for graph in captured.graphs]
    assert abs(sizes[0] - sizes[1]) < 20, "the graph does not grow with the rows"


def check_same_states(actual, expected) -> None:
    """Every tensor of the caches, or of the list of states that a model returns in place of one."""

    def states(result) -> list[torch.Tensor]:
        if "state" in result:
            return list(result.state)
        cache = result["cache_params"] if "cache_params" in result else cache_of(result)
        if isinstance(cache, xLSTMCache):
            return torch.utils._pytree.tree_leaves(cache.rnn_state)
        held = [value for layer in cache.layers for value in vars(layer).values()]
        return [x for x in torch.utils._pytree.tree_leaves(held) if isinstance(x, torch.Tensor)]

    mine, theirs = states(actual), states(expected)
    assert len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs, strict=True):
        close(a, b)
        assert a.dtype == b.dtype


def test_a_continued_prompt_starts_from_its_state():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(delta_net()).eval()
    substitute_recurrences(model)
    captured = Captured()
    compiled = torch.compile(model, backend=captured)
    ids = torch.randint(0, 64, (1, 150))
    with torch.no_grad():
        expected = model(ids).logits
        cache = cache_of(compiled(ids[:, :70], use_cache=True))
        actual = compiled(ids[:, 70:], past_key_values=cache, use_cache=True).logits
    assert captured.operators() == ["gated_delta_rule.default"]
    close(actual, expected[:, 70:])


def in_training(layer: Any) -> None:
    layer.mlstm_backend.config.mode = "train"


def with_states_of_half_precision(layer: Any) -> None:
    layer.mlstm_backend.config.inference_state_dtype = "bfloat16"


@pytest.mark.parametrize(
    ("rows", "changed", "operators"),
    [
        (70, lambda layer: None, ["mlstm.default"]),
        (1, lambda layer: None, []),
        (64, in_training, []),
        (70, with_states_of_half_precision, []),
    ],
)
def test_what_a_configuration_says(rows, changed, operators):
    """The operator stands for inference with states in fp32; one row is a decoding step."""
    layer = AutoModelForCausalLM.from_config(xlstm()).eval().backbone.blocks[0].mlstm_layer
    substitute_recurrences(layer)
    changed(layer)
    captured = Captured()
    x = torch.randn(2, rows, 128)
    with torch.no_grad():
        actual, expected = torch.compile(layer, backend=captured)(x), layer(x)
    assert captured.operators() == operators
    for a, b in zip(torch.utils._pytree.tree_leaves(actual), torch.utils._pytree.tree_leaves(expected), strict=True):
        close(a, b)


def test_gradients_are_the_models_own():
    """Operators have no backward: with gradients enabled the traced call is the function itself."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(delta_net()).eval()
    substitute_recurrences(model)
    captured: list[GraphModule] = []

    def backend(module: GraphModule, inputs: object) -> object:
        captured.append(module)
        return module.forward

    ids = torch.randint(0, 64, (1, 70))
    loss = torch.compile(model, backend=backend)(ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert not any("gated_delta_rule" in str(node.target) for node in captured[0].graph.nodes)
    assert all(p.grad is not None for p in model.parameters())


def planted(source: str) -> types.ModuleType:
    """A modelling file with its own copy of a function, changed."""
    module = types.ModuleType("planted_modeling_file")
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    return module


HALF_BETA = """
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as right

def chunk_gated_delta_rule(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, **kwargs):
    return right(query, key, value, g, beta / 2, chunk_size, initial_state, output_final_state,
                 use_qk_l2norm_in_kernel)
"""


METHOD = """
import torch

class Mixer(torch.nn.Module):
    def scan(self, hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype=torch.float32):
        state = hidden_states.new_zeros(hidden_states[:, 0].shape, dtype=acc_dtype)
        state = state if recurrent_states is None else recurrent_states
        rows = []
        for t in range(hidden_states.shape[1]):
            state = state * (recurrent_gate * ~reset)[:, t].to(acc_dtype) + hidden_states[:, t]
            rows.append(state.to(hidden_states.dtype))
        return torch.stack(rows, 1), state

    def forward(self, x):
        return self.scan(x, x.sigmoid(), x[..., :1] > 1.5, recurrent_states=None)
"""


def test_a_method_is_replaced_under_dynamo_alone():
    module = planted(METHOD)
    untouched = planted(METHOD).Mixer()
    (done,) = substitute_recurrences([module])
    assert (done.function, done.operator) == ("Mixer.scan", "linear_recurrence")
    assert substitute_recurrences([module]) == [done]
    captured = Captured()
    mixer = module.Mixer()
    compiled = torch.compile(mixer, backend=captured)
    with torch.no_grad():
        for rows in (20, 37, 50):
            x = torch.randn(2, rows, 4)
            for eager, actual, expected in zip(mixer(x), compiled(x), untouched(x), strict=True):
                assert torch.equal(eager, expected)
                close(actual, expected)
        assert captured.operators() == ["linear_recurrence.default"]
        assert len(captured.graphs) == 2
        compiled(torch.randn(2, 1, 4))
        assert captured.operators() == [], "one row is a decoding step, which stays as it is"


MEMORY = """
from transformers.models.xlstm.modeling_xlstm import xLSTMBackend

class Memory(xLSTMBackend):
    def forward(self, query, key, value, igate, fgate, c_initial=None, n_initial=None, m_initial=None,
                return_last_states=None, mode=None):
        return super().forward(query, key, value, igate, fgate, c_initial, n_initial, m_initial,
                               return_last_states, mode)
"""


def test_a_method_is_tried_on_its_own_class():
    """One that computes by a configuration; `self` is made from one."""
    (accepted,) = substitute_recurrences([planted(MEMORY)])
    assert accepted == Substitution("Memory.forward", "planted_modeling_file", "mlstm")
    halved = MEMORY.replace("igate, fgate, c_initial,", "igate, fgate / 2, c_initial,")
    (refused,) = substitute_recurrences([planted(halved)])
    assert "computes something else" in refused.reason
    fixed = MEMORY.replace(
        "        return super()", "        self._inference_fn.keywords['eps'] = 0\n        return super()"
    )
    (refused,) = substitute_recurrences([planted(fixed)])
    assert "computes something else" in refused.reason
    unlike = MEMORY + "\n    def __init__(self, config, width):\n        super().__init__(config)\n"
    (refused,) = substitute_recurrences([planted(unlike)])
    assert "fails on a sample: TypeError" in refused.reason


def test_a_function_that_wraps_no_function_is_passed_over():
    source = """
import functools

class Kernel:
    def __call__(self, *args): return args

@functools.wraps(Kernel())
def run(*args, **kwargs): return Kernel()(*args, **kwargs)
"""
    assert substitute_recurrences([planted(source)]) == []


def test_other_arithmetic_is_refused():
    (refused,) = substitute_recurrences([planted(HALF_BETA)])
    assert refused.operator is None
    assert "computes something else" in refused.reason
    (accepted,) = substitute_recurrences([planted(HALF_BETA.replace("beta / 2", "beta"))])
    assert accepted == Substitution("chunk_gated_delta_rule", "planted_modeling_file", "gated_delta_rule")


def test_what_fails_or_returns_other_things_is_refused():
    raising = HALF_BETA.replace("return right(", "raise KeyError('beta') or (")
    (refused,) = substitute_recurrences([planted(raising)])
    assert "fails on a sample: KeyError" in refused.reason
    (refused,) = substitute_recurrences([planted(HALF_BETA.replace("return right(", "return [0], right("))])
    assert refused.reason == "returns other things"


def test_unknown_parameters_are_not_tried():
    assert substitute_recurrences([planted(HALF_BETA.replace("use_qk_l2norm_in_kernel=False", "window=7"))]) == []


def test_each_function_once_from_any_thread():
    results: list[list[Substitution]] = []
    threads = [threading.Thread(target=lambda: results.append(substitute_recurrences([qwen3_5]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(result == results[0] for result in results)


def test_no_model_means_every_loaded_modelling_file():
    assert any(s.module == qwen3_5.__name__ for s in substitute_recurrences())
    assert substitute_recurrences(nn.Linear(2, 2)) == []
    assert "transformers.models.qwen3_5.modeling_qwen3_5" in sys.modules
