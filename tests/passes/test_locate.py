"""The anatomy that graph theory finds is the model's own: layer inputs as forward hooks see them, and cached states."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from ridgefill_compile.errors import CannotFill
from ridgefill_compile.passes.calls import shape
from ridgefill_compile.passes.emit import copy_module
from ridgefill_compile.passes.functionalize import functionalize
from ridgefill_compile.passes.locate import Located, locate
from ridgefill_compile.passes.outputs import check_late_states, check_wanted_rows
from ridgefill_compile.passes.rows import same
from ridgefill_compile.passes.verify import results_of
from tests.decoders import FILLED, LAYERS, RECURRENT, states_of, token_ids
from tests.passes.graphs import aten, traced, traced_decoder

B, N, KEPT = 2, 40, 3


def decoder(name: str) -> nn.Module:
    return FILLED[name].build()


def keeps(model: nn.Module, rows: int = KEPT) -> dict[str, Any]:
    """The argument that asks for the last rows' logits, of models that have it."""
    known = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": rows} if known else {}


def computed(module: GraphModule, located: Located, inputs: list[Any]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Values of every layer's input and of every layer's states."""
    nodes = [layer.input for layer in located.layers] + [s for layer in located.layers for s in layer.states]
    probe = copy_module(module)
    copies = dict(zip(module.graph.nodes, probe.graph.nodes, strict=True))
    probe.graph.output_node().args = (tuple(copies[node] for node in nodes),)
    probe.recompile()
    values = iter(probe(*inputs))
    return [next(values) for _ in located.layers], [[next(values) for _ in layer.states] for layer in located.layers]


def truth(model: nn.Module, ids: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Every block's input by forward hooks, and the states that were cached."""
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS)
    found: list[Tensor] = []

    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    handles = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in blocks]
    with torch.no_grad():
        states = states_of(model(ids, use_cache=True))
    for handle in handles:
        handle.remove()
    return found, states


def is_cached(state: Tensor, cached: list[Tensor]) -> bool:
    """Whether a written state is one of these, or ends with it where a sliding layer keeps its last rows only."""
    return any(
        state.dim() == c.dim()
        and state.shape[:-2] == c.shape[:-2]
        and state.shape[-1] == c.shape[-1]
        and state.shape[-2] >= c.shape[-2]
        and torch.allclose(state[..., -c.shape[-2] :, :], c, atol=1e-5)
        for c in cached
    )


@pytest.mark.parametrize("name", FILLED)
def test_layers_are_the_models_own(name: str) -> None:
    model, ids = decoder(name), token_ids(N, batch=B)
    module, inputs = traced_decoder(model, ids, **keeps(model))
    located = locate(module.graph)
    assert [layer.index for layer in located.layers] == list(range(LAYERS))
    assert located.row_dim == 1
    assert located.rows == N
    assert not located.others
    found, written = computed(module, located, inputs)
    blocks, states = truth(model, ids)
    for index, (value, block) in enumerate(zip(found, blocks, strict=True)):
        torch.testing.assert_close(value, block, atol=1e-5, rtol=1e-5)
        assert located.layers[index].width == block.shape[-1]
        cached = [states[f"{index}.keys"], states[f"{index}.values"]]
        assert len(written[index]) == 2
        assert all(is_cached(state, cached) for state in written[index])
    for split in range(LAYERS):
        check_late_states(module.graph, located, split)
    if keeps(model):
        check_wanted_rows(module.graph, located, KEPT)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "opt_post"])
def test_layers_at_any_length_and_batch(name: str) -> None:
    model = decoder(name)
    module, inputs = traced_decoder(model, token_ids(43, batch=3), dynamic=True, **keeps(model))
    located = locate(module.graph)
    assert (len(located.layers), located.row_dim) == (LAYERS, 1)
    assert all(same(shape(layer.input)[1], located.rows) for layer in located.layers)
    assert not isinstance(located.rows, int)
    for split in range(LAYERS):
        check_late_states(module.graph, located, split)
    ids = token_ids(37, batch=B)
    found, _ = computed(module, located, [B, 37, ids, *inputs[3:]])
    for value, block in zip(found, truth(model, ids)[0], strict=True):
        torch.testing.assert_close(value, block, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("batch", "rows"), [(1, 64), (2, 32), (4, 16), (4, 4), (1, 96)])
def test_rows_that_collide_with_sizes(batch: int, rows: int) -> None:
    """As many rows as the width (64), heads (4), their size (16), the MLP (96); batch times rows likewise."""
    model = decoder("gpt2")
    module, _ = traced_decoder(model, token_ids(rows, batch=batch), **keeps(model, 1))
    located = locate(module.graph)
    assert (len(located.layers), located.row_dim) == (LAYERS, 1)
    for split in range(1, LAYERS):
        check_late_states(module.graph, located, split)


# ---------------------------------------------------------------- what is wanted of the results


@functools.cache
def wanting(**call: Any) -> tuple[GraphModule, Located]:
    name = "llama_eager" if "output_attentions" in call else "llama"
    module, _ = traced_decoder(decoder(name), token_ids(N), **call)
    return module, locate(module.graph)


def test_logits_of_at_most_the_tail() -> None:
    module, located = wanting(logits_to_keep=KEPT)
    assert located.result is results_of(module)[0]
    check_wanted_rows(module.graph, located, KEPT)
    check_wanted_rows(module.graph, located, 16)
    with pytest.raises(CannotFill, match="more rows than the tail") as refusal:
        check_wanted_rows(module.graph, located, KEPT - 1)
    assert "logits_to_keep" in str(refusal.value.hint)


@pytest.mark.parametrize("call", [{}, {"logits_to_keep": N}, {"logits_to_keep": KEPT, "output_hidden_states": True}])
def test_logits_or_hidden_states_of_every_row_are_refused(call: dict[str, Any]) -> None:
    module, located = wanting(**call)
    assert len(located.layers) == LAYERS
    with pytest.raises(CannotFill, match="more rows than the tail"):
        check_wanted_rows(module.graph, located, 16)


def test_a_loss_is_refused() -> None:
    module, _ = traced_decoder(decoder("llama"), token_ids(N), labels=token_ids(N))
    located = locate(module.graph)
    with pytest.raises(CannotFill, match="a loss"):
        check_wanted_rows(module.graph, located, 16)


def test_attention_weights_are_refused() -> None:
    module, located = wanting(logits_to_keep=KEPT, output_attentions=True)
    with pytest.raises(CannotFill, match="attention weights"):
        check_late_states(module.graph, located, 1)


def test_without_a_cache_there_are_no_layers() -> None:
    module, _ = traced_decoder(decoder("llama"), token_ids(N), use_cache=False, logits_to_keep=KEPT)
    with pytest.raises(CannotFill, match="no layers were found") as refusal:
        locate(module.graph)
    assert "use_cache" in str(refusal.value.hint)


@pytest.mark.parametrize("name", ["mamba2", "bamba", "falcon_h1", "jamba"])
def test_recurrent_states_are_states(name: str) -> None:
    """They sum rows up, and have none themselves."""
    model = RECURRENT[name].build()
    module, _ = traced_decoder(model, token_ids(N), **keeps(model))
    located = locate(module.graph)
    assert len(located.layers) == LAYERS
    check_late_states(module.graph, located, 0)


# ---------------------------------------------------------------- anatomies by hand

W = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
X = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(1))


def attend(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (functional.linear(x, part) for part in w)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True), k, v


def plain(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h, k0, v0 = attend(functional.rms_norm(x, [4]), w)
    x = x + h
    h, k1, v1 = attend(functional.rms_norm(x, [4]), w)
    return (x + h)[:, -1:], k0, v0, k1, v1


def test_embeddings_as_input() -> None:
    module = traced(plain, X, W)
    located = locate(module.graph)
    assert located.tokens is next(iter(module.graph.nodes))
    assert [len(layer.states) for layer in located.layers] == [2, 2]
    assert located.layers[0].input is located.tokens
    assert located.layers[1].input.target is aten.add.Tensor
    check_late_states(module.graph, located, 0)
    check_wanted_rows(module.graph, located, 1)


def test_sum_over_rows_is_no_state() -> None:
    def sums(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h, k, v = attend(x.sin(), w)
        v = v.cumsum(1)
        return (x + h)[:, -1:], k, v

    module = traced(sums, X, W)
    located = locate(module.graph)
    with pytest.raises(CannotFill, match="neither written row by row"):
        check_late_states(module.graph, located, 0)


def test_the_op_that_mixes_rows_is_named() -> None:
    """Keys less their mean over the rows: the mean reads every row, whatever else is done to keys."""

    def centred(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h, k, v = attend(x.sin(), w)
        k = (k - k.mean(1, keepdim=True)).transpose(1, 2).contiguous()
        return (x + h)[:, -1:], k, v

    module = traced(centred, X, W)
    with pytest.raises(CannotFill, match="neither written row by row") as refusal:
        check_late_states(module.graph, locate(module.graph), 0)
    assert "aten.mean.dim" in str(refusal.value.node)
    assert refusal.value.hint == "aten.mean.dim reads every row"


def test_state_shifted_by_a_row_is_a_state() -> None:
    """Row i of it is row i - 1 of the input, as a convolution's is made of a few: merged rows, in order."""

    def shifted(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (functional.linear(x.sin(), part) for part in w)
        v = torch.cat([torch.zeros(1, 1, 4), v[:, :-1]], 1)
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + h)[:, -1:], k, v

    module = traced(shifted, X, W)
    check_late_states(module.graph, locate(module.graph), 0)


def convolved(x: Tensor, w: Tensor, kept: int | None = None) -> tuple[Tensor, ...]:
    """Results of attention are mixed over rows, and the last two are kept, as short convolutions keep them."""
    y = x.sin()
    q, k, v = (functional.linear(y, part) for part in w)
    h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    mixed = h + torch.cat([torch.zeros(1, 1, 4), h[:, :-1]], 1)
    return (x + mixed)[:, -1:], k, v, h[:, -2:], *((q, y)[kept : kept + 1] if kept is not None else ())


def written_out(x: Tensor, w: Tensor, reads: bool = True, learned: bool = False) -> tuple[Tensor, ...]:
    """Linear attention, from an old state to a new one: the rows read the old one, if said, and each other's parts."""
    q, k, v = (functional.linear(x.sin(), part) for part in w)
    old = w[0] if learned else torch.zeros(1, 4, 4)
    new = old * 0.9 + k.transpose(1, 2) @ v
    h = (q @ k.transpose(1, 2)).tril() @ v
    x = x + (h + q @ old if reads else h)
    h, k1, v1 = attend(x.sin(), w)
    return (x + h)[:, -1:], new, k1, v1


@pytest.mark.parametrize(
    "function",
    [convolved, written_out, partial(written_out, learned=True)],
    ids=["convolved", "written out", "learned"],
)
def test_states_that_are_read_by_way_of_others(function: Callable[..., tuple[Tensor, ...]]) -> None:
    module = traced(of_two(function), X, W)
    located = locate(module.graph)
    check_late_states(module.graph, located, 0, tail=2)


@pytest.mark.parametrize(
    "function",
    [partial(convolved, kept=0), partial(convolved, kept=1), partial(written_out, reads=False)],
    ids=["query", "normed", "unread"],
)
def test_beside_such_states_others_are_refused_as_ever(function: Callable[..., tuple[Tensor, ...]]) -> None:
    module = traced(of_two(function), X, W)
    with pytest.raises(CannotFill, match="no later row reads"):
        check_late_states(module.graph, locate(module.graph), 0, tail=2)


def hidden_of_the_tail(x: Tensor, w: Tensor, rows: int) -> tuple[Tensor, ...]:
    h, k, v = attend(x.sin(), w)
    last = (x + h)[:, -rows:]
    return functional.linear(last, w[0]), last, k, v


def test_hidden_states_of_the_tail_may_be_asked_for() -> None:
    """Behind the last layer, of rows that are exact."""
    module = traced(lambda x, w: hidden_of_the_tail(x, w, 2), X, W)
    located = locate(module.graph)
    assert located.others
    check_wanted_rows(module.graph, located, 2)
    with pytest.raises(CannotFill, match="more rows than the tail"):
        check_wanted_rows(module.graph, located, 1)


def of_two(function: Callable[..., tuple[Tensor, ...]]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """FX counts a function's arguments, those with defaults among them."""
    return lambda x, w: function(x, w)


def test_hidden_states_before_the_last_norm_may_be_asked_for() -> None:
    """Of rows of the tail. What joins them with earlier ones is not looked into."""

    def before(x: Tensor, w: Tensor, joined: bool, rows: int = 2) -> tuple[Tensor, ...]:
        h, k, v = attend(x.sin(), w)
        y = x + h
        kept = (y + x if joined else y)[:, -rows:]
        return functional.rms_norm(y, [4])[:, -1:], kept, k, v

    for joined, rows, fine in ((False, 2, True), (False, 3, False), (True, 2, False)):
        module = traced(of_two(partial(before, joined=joined, rows=rows)), X, W)
        located = locate(module.graph)
        assert len(located.others) == 1
        with contextlib.nullcontext() if fine else pytest.raises(CannotFill, match="more rows than the tail"):
            check_wanted_rows(module.graph, located, 2)


def test_a_constant_of_a_values_size_is_no_way_round_the_layers() -> None:
    def masked(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        mask = torch.zeros_like(x)[..., :1] + torch.ones_like(x)[..., :1]
        h, k0, v0 = attend(functional.rms_norm(x, [4]), w)
        x = x + h * mask
        h, k1, v1 = attend(functional.rms_norm(x, [4]), w)
        return (x + h * mask)[:, -1:], k0, v0, k1, v1

    for dynamic in ([], [(0, 1)]):
        module = functionalize(traced(masked, X, W, dynamic=dynamic, functional=False))
        assert len(locate(module.graph).layers) == 2
        torch.testing.assert_close(module(X, W), masked(X, W))


def query(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (functional.linear(x.sin(), part) for part in w)
    return (x + functional.scaled_dot_product_attention(q, k, v, is_causal=True))[:, -1:], q, k, v


def normed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    q, k, v = (functional.linear(y, part) for part in w)
    return (x + functional.scaled_dot_product_attention(q, k, v, is_causal=True))[:, -1:], y, k, v


def early_exit(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    early = functional.linear(x.cos(), w[0])
    h, k, v = attend(x.sin(), w)
    return (x + h)[:, -1:], early, k, v


def attended(x: Tensor, y: Tensor, w: Tensor, kept: Tensor, last: int = 0) -> tuple[Tensor, ...]:
    """A layer on y whose keys and values are states (the last few rows of them, if said), and `kept` another output."""
    q, k, v = (functional.linear(y, part) for part in w)
    states = k[:, -last:], v[:, -last:]
    h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (x + h)[:, -1:], kept, *states


def copied(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return attended(x, y, w, y.clone())


def cast(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return attended(x, y, w, y.transpose(1, 2).double())


def squared(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return attended(x, y, w, y.square())


def pooled(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return attended(x, y, w, y.mean(1))


def sliding(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return attended(x, y, w, y.clone(), last=3)


def selected(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A query that is chosen out of one fused projection."""
    fused = functional.linear(x.sin(), w.reshape(12, 4)).unflatten(-1, (3, 4))
    q, k, v = (fused.select(2, i) for i in range(3))
    return (x + functional.scaled_dot_product_attention(q, k, v, is_causal=True))[:, -1:], q, k, v


@pytest.mark.parametrize(
    "function",
    [query, normed, early_exit, copied, cast, squared, pooled, sliding, selected],
    ids=lambda f: f.__name__,
)
def test_what_no_other_row_reads_is_no_state(function: Callable[..., tuple[Tensor, ...]]) -> None:
    module = traced(function, X, W)
    with pytest.raises(CannotFill, match="no later row reads"):
        check_late_states(module.graph, locate(module.graph), 0)


@pytest.mark.parametrize("part", [lambda x: x[..., -2:], lambda x: x.reshape(2, 3, 4)[-1:]], ids=["features", "blocks"])
def test_few_entries_of_all_rows_are_not_few_rows(part: Callable[[Tensor], Tensor]) -> None:
    def features(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h, k, v = attend(x.sin(), w)
        return part(x + h), k, v

    module = traced(features, X, W)
    with pytest.raises(CannotFill, match="more rows than the tail"):
        check_wanted_rows(module.graph, locate(module.graph), 2)


def test_two_streams_meet_late() -> None:
    """No value between the layers holds all that passes, but what leads round the second is each row's own."""

    def streams(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        left, right = x.sin(), x.cos()
        h, k0, v0 = attend(left, w)
        right = right + h
        h, k1, v1 = attend(right, w)
        left = left + h
        return (left * right)[:, -1:], k0, v0, k1, v1

    module = traced(streams, X, W)
    located = locate(module.graph)
    first, second = located.layers
    assert first.input is located.tokens
    assert second.input.target is aten.add.Tensor
    assert [len(layer.states) for layer in located.layers] == [2, 2]
    check_late_states(module.graph, located, 0)


def test_embeddings_of_every_layer_lead_round_the_stream() -> None:
    """Each row's own, so they need no prediction."""

    def per_layer(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        own = functional.linear(x, w[0]).relu()
        states = []
        for _ in range(3):
            h, k, v = attend(functional.rms_norm(x, [4]), w)
            x = x + h
            x = x + functional.linear(x, w[1]).sigmoid() * own
            states += [k, v]
        return (x[:, -1:], *states)

    module = traced(per_layer, X, W)
    located = locate(module.graph)
    assert [len(layer.states) for layer in located.layers] == [2, 2, 2]
    assert all(layer.input.target is aten.add.Tensor for layer in located.layers[1:])
    check_late_states(module.graph, located, 0)
    check_wanted_rows(module.graph, located, 1)


def test_the_stream_is_read_as_one_of_several() -> None:
    """Of two residual streams, a layer's states read one mixture: that is what is predicted."""

    def hyper(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        streams = torch.stack([x.sin(), x.cos()], 2)
        states = []
        for _ in range(3):
            mixed = (streams * w[0, 0, :2, None]).sum(2)
            h, k, v = attend(functional.rms_norm(mixed, [4]), w)
            streams = streams + h[:, :, None] * w[1, 0, :2, None]
            states += [k, v]
        return (streams.sum(2)[:, -1:], *states)

    module = traced(hyper, X, W)
    located = locate(module.graph)
    assert [layer.input.target for layer in located.layers] == [aten.sum.dim_IntList] * 3
    assert [layer.width for layer in located.layers] == [4] * 3
    check_late_states(module.graph, located, 0)
    check_wanted_rows(module.graph, located, 1)


def test_an_output_of_several_layers_is_no_state() -> None:
    """It belongs to the first of them by its place, and would change with what is filled."""

    def loss(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        states, scores = [], []
        for _ in range(4):
            h, k, v = attend(functional.rms_norm(x, [4]), w)
            x = x + h
            scores.append(functional.linear(x, w[0]))
            states += [k, v]
        loss = torch.stack(scores).sum(2).mean(0)
        return (x.exp()[:, -1:], loss, *states)

    module = traced(loss, X, W)
    located = locate(module.graph)
    with pytest.raises(CannotFill, match="several late layers"):
        check_late_states(module.graph, located, 2)


def test_static_cache_writes_are_states() -> None:
    """What is written, rather than the buffer it goes into."""

    def static(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        q, k, _ = (functional.linear(x.sin(), part) for part in w)
        cache.index_copy_(1, at, k)
        return ((x + functional.scaled_dot_product_attention(q, cache, cache))[:, -1:],)

    module = traced(static, X, W, torch.zeros(1, 9, 4), torch.arange(6))
    located = locate(module.graph)
    (layer,) = located.layers
    assert [state.target for state in layer.states] == [aten.linear.default]
    check_late_states(module.graph, located, 0)


def test_nothing_changes() -> None:
    module = traced(plain, X, W)
    text = module.print_readable(print_output=False)
    located = locate(module.graph)
    check_late_states(module.graph, located, 0)
    check_wanted_rows(module.graph, located, 1)
    assert module.print_readable(print_output=False) == text
