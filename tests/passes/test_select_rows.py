"""Rows selected inside the graph, for decoders of many anatomies: what is kept exact, what it equals, what it costs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend
from transformers import PreTrainedModel, StaticCache

from ridgefill_compile import RidgefillWarning
from ridgefill_compile.attention_at import attention_at
from ridgefill_compile.passes.attend import attend
from ridgefill_compile.passes.calls import CAUSAL_TAIL, arguments, aten, shape
from ridgefill_compile.passes.experts import expand
from ridgefill_compile.passes.rows import plain
from ridgefill_compile.passes.selected_rows import put_rows, take_rows
from ridgefill_compile.passes.verify import verify
from ridgefill_compile.prompt import LayerAttention, Prompt
from ridgefill_compile.report import report
from ridgefill_compile.selectors import Attention, Random, choose, count_of, count_of_rows, parse_rows
from ridgefill_compile.testing.difference import values_of
from ridgefill_compile.testing.variants import Variants
from ridgefill_compile.zoo.calling import worst
from tests.decoders import FILLED, RECURRENT, Architecture, cache_of, states_of, token_ids
from tests.toys import compiled

TAIL, SPLIT = 8, 1
CLOSE = 1e-4
OPTIONS: dict[str, Any] = {
    "route": "identity",
    "split": SPLIT,
    "tail": TAIL,
    "min_fill": 8,
    "inner": "eager",
    "strict": True,
}
ALL = {**FILLED, **RECURRENT}
EAGER = {
    "gemma2_eager": Architecture(
        "gemma2", {**FILLED["gemma2"].settings, "attn_implementation": "eager"}, "softcap, attention spelt out"
    ),
}
SELECTED = {
    "llama": "pooled:0.2",
    "qwen3_moe": "attention:0.1+random:0.1",
    "gemma2_eager": "pooled:0.2",
    "deepseek_v3": "mixed:0.2",
    "gpt_oss": "random:0.2",
    "qwen3_next": "random:0.2",
    "mamba2": "random:0.2",
    "falcon_h1": "question_blind:0.2",
}


def built(name: str) -> PreTrainedModel:
    return {**ALL, **EAGER}[name].build()


def call_of(ids: Tensor, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "use_cache": True, "logits_to_keep": 2, **more}


def variants_of(rows: Any, split: int = SPLIT, **settings: Any) -> Variants:
    return Variants(split=split, tail=TAIL, selectors=parse_rows(rows), **settings)


def check(variants: Variants, prompts: int = 1) -> None:
    assert not variants.refusals, variants.refusals
    assert len(variants.results) == prompts
    for results in variants.results:
        assert worst(results["exact"], results["oracle"]) < CLOSE
        assert worst(results["routed"], results["eliminated"]) < CLOSE
        assert worst(results["exact"], results["eliminated"]) > 100 * CLOSE, "the fill changed nothing"


# ---------------------------------------------------------------- equal to its definition


QUICK = ("llama", "qwen3_moe", "gemma2_eager", "mamba2")
QUICK_AND_HEAVY, TWO_AND_HEAVY = (
    [name if name in quick else pytest.param(name, marks=pytest.mark.heavy) for name in SELECTED]
    for quick in (QUICK, ("llama", "mamba2"))
)


@pytest.mark.parametrize("name", TWO_AND_HEAVY)
def test_static_and_dynamic_lengths(name: str) -> None:
    """One graph for one length, one for all others."""
    split = 2 if name == "qwen3_next" else SPLIT
    variants = variants_of(SELECTED[name], split)
    variants.run(built(name), *(call_of(token_ids(rows)) for rows in (41, 30, 52)))
    check(variants, 3)
    assert variants.compiled == 2


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2_eager", "mamba2"])
def test_batch_with_left_padding(name: str) -> None:
    ids = token_ids(40, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    variants = variants_of(SELECTED[name])
    variants.run(built(name), call_of(ids, attention_mask=mask))
    check(variants)


@pytest.mark.parametrize(
    ("name", "rows"), [("llama", "pooled:0.2"), ("gpt_oss", "attention:0.2"), ("mamba2", "random:0.2")]
)
def test_continued_cache(name: str, rows: str) -> None:
    model = built(name)
    with torch.no_grad():
        cache = cache_of(model(token_ids(11, seed=5), use_cache=True))
    variants = variants_of(rows)
    variants.run(model, call_of(token_ids(40), past_key_values=cache))
    check(variants)


def test_graphs_hold_for_any_length_that_readers_do_not_bound() -> None:
    """No selector makes a graph that is for one length."""
    for rows in ("pooled:0.1+attention:0.1", "question_blind:0.1", "random:0.1+tail:0.1"):
        variants = variants_of(rows, ways={"eliminated": ("identity", True)}, verified=False)
        model = FILLED["llama"].build(num_hidden_layers=2)
        variants.run(model, *(call_of(token_ids(length)) for length in (141, 130, 152, 300)))
        assert variants.compiled == 2, rows


def test_a_static_cache() -> None:
    model = built("llama")
    rows = 40
    answers = []
    for eliminated in (True, False):
        options = OPTIONS | {"rows": "pooled:0.2", "eliminate": eliminated}
        cache = StaticCache(model.config, max_cache_len=rows + 5)
        call = call_of(token_ids(rows), past_key_values=cache, position_ids=torch.arange(rows)[None])
        output = compiled(model, options)(**call)
        answers.append([output["logits"], *states_of(output).values()])
        assert [graph.filled for graph in report(model).graphs] == [True] * len(answers)
    dynamic = compiled(model, OPTIONS | {"rows": "pooled:0.2"})(**call_of(token_ids(rows)))
    assert worst(*answers) < CLOSE
    assert worst([answers[0][0]], [dynamic["logits"]]) < CLOSE
    assert worst([answers[0][1][:, :, :rows]], [states_of(dynamic)["0.keys"]]) < CLOSE


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize("name", TWO_AND_HEAVY)
def test_first_rows_equal_their_definition(name: str) -> None:
    """In a batch with left padding, where they are not the first of the batch; beside selected rows, and alone."""
    ids = token_ids(40, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    split = 2 if name == "qwen3_next" else SPLIT
    for rows in (None, SELECTED[name]):
        variants = variants_of(rows, split, first_rows=3)
        variants.run(built(name), call_of(ids, attention_mask=mask), call_of(ids))
        check(variants, 2)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        *itertools.product(["llama", "gemma2_eager", "gemma2"], ["by a padding mask", "by attention"]),
        ("llama", "by attention, static cache"),
        *itertools.product(["llama"], ["by a longer padding mask", "by a longer padding mask, static cache"]),
    ],
)
def test_first_rows_of_every_sequence_are_exact(name: str, told: str) -> None:
    """Those that are not padding, in every late layer, as many others as without them being filled; whether a mask
    [batch, rows] tells padding, or only what attention sees, by a mask [batch, 1, rows, keys] of the caller's own or
    one that is longer than the prompt.
    """
    model, ids = {**FILLED, **EAGER}[name].build(num_hidden_layers=4), token_ids(40, batch=2)
    real = torch.ones_like(ids)
    real[0, :7] = 0
    position_ids = (real.cumsum(1) - 1).clamp(min=0)
    is_static = told.endswith("static cache")

    def call() -> dict[str, Any]:
        cache = {"past_key_values": StaticCache(model.config, max_cache_len=45)} if is_static else {}
        return call_of(ids, attention_mask=mask, position_ids=position_ids, **cache)

    mask = torch.nn.functional.pad(real, (0, 5), value=1) if "longer" in told else real
    if "by attention" in told:
        sees = torch.ones(40, 40, dtype=torch.bool).tril() & real.bool()[:, None, None]
        sees = torch.nn.functional.pad(sees, (0, 5 if is_static else 0))
        mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        exact = states_of(model(**call()))
    kept = states_of(compiled(model, OPTIONS | {"first_rows": 3})(**call()))
    assert (report(model).graphs[-1].first_rows, report(model).graphs[-1].kept) == (3, 3)
    for state_name, state in kept.items():
        if state.shape[-2] < 40:
            continue  # of a sliding window, which has let go of the first rows
        for sequence, begins in ((0, 7), (1, 0)):
            right = (state - exact[state_name])[sequence].abs().amax((0, 2)) < CLOSE
            assert right[begins : begins + 3].all()
            if int(state_name[0]) > SPLIT + 1:
                assert not right[begins + 3 : 40 - TAIL].any()


class NamedMask(torch.nn.Module):
    """A decoder that calls its padding mask by a name of its own, and hides rows nowhere that can be seen."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, real: Tensor) -> Any:
        return self.model(input_ids, attention_mask=real, use_cache=True, logits_to_keep=2)


def test_first_rows_are_refused_where_padding_cannot_be_told() -> None:
    """A recurrent model has no attention to look at. With no such input, nothing is padded."""
    ids = token_ids(40, batch=2)
    options = OPTIONS | {"first_rows": 3, "strict": False}
    named = NamedMask(built("mamba2"))
    with pytest.warns(RidgefillWarning, match="cannot be told whether input 'l_real_'"):
        compiled(named, options)(ids, torch.ones_like(ids))
    assert not report(named).graphs[-1].filled
    plain_model = built("mamba2")
    compiled(plain_model, options)(**call_of(ids))
    assert report(plain_model).graphs[-1].kept == 3
    attends = NamedMask(built("llama"))
    compiled(attends, options)(ids, torch.ones_like(ids))
    assert report(attends).graphs[-1].kept == 3


def test_first_rows_leave_selectors_their_share_of_the_rest() -> None:
    prompt = Prompt(2, 40, 32, torch.device("cpu"))
    chosen = choose(prompt, parse_rows("tail:0.25"), first_rows=4)
    assert chosen.tolist() == 2 * [[0, 1, 2, 3, *range(25, 32)]]
    assert choose(prompt, parse_rows("random:1.0"), first_rows=4).tolist() == 2 * [[*range(32)]]
    assert count_of_rows(0.25, 4, 32) == 11


def test_a_second_turn_has_no_first_rows() -> None:
    model = built("llama")
    with torch.no_grad():
        cache = cache_of(model(token_ids(11, seed=5), use_cache=True))
    compiled(model, OPTIONS | {"first_rows": 3})(**call_of(token_ids(40), past_key_values=cache))
    assert (report(model).graphs[-1].first_rows, report(model).graphs[-1].kept) == (0, 0)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_all_rows_selected_is_the_exact_model(name: str) -> None:
    model, call = built(name), call_of(token_ids(40))
    with torch.no_grad():
        exact = model(**call)
    whole = compiled(model, OPTIONS | {"rows": "random:1.0", "split": 2 if name == "qwen3_next" else SPLIT})(**call)
    assert worst(values(exact), values(whole)) < CLOSE


def values(output: Any) -> list[Tensor]:
    return [output["logits"], *states_of(output).values()]


def test_rows_that_are_not_selected_are_those_of_a_plain_fill() -> None:
    """Late states of other prefix rows are predicted; those of selected ones are as the layers below made them."""
    model, rows = FILLED["llama"].build(num_hidden_layers=4), 40
    call = call_of(token_ids(rows))
    selector = Random(0.2)
    prefix = rows - TAIL
    (chosen,) = choose(Prompt(1, rows, prefix, torch.device("cpu")), [selector])
    others = torch.tensor([row for row in range(prefix) if row not in chosen])
    with torch.no_grad():
        exact = states_of(model(**call))
    filled = states_of(compiled(model, OPTIONS)(**call))
    kept = states_of(compiled(model, OPTIONS | {"rows": selector})(**call))
    for name, state in kept.items():
        late = int(name[0]) > SPLIT
        left, mine, true = (part[name][:, :, others] for part in (filled, kept, exact))
        torch.testing.assert_close(mine, left if late else true)
        if late:
            assert worst([mine], [true]) > 0.01
            assert worst([state[:, :, chosen]], [filled[name][:, :, chosen]]) > 0.01
        if int(name[0]) == SPLIT + 1:  # the layer behind the split state, which is exact, reads true rows alone
            torch.testing.assert_close(state[:, :, chosen], exact[name][:, :, chosen])


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mamba2"])
def test_each_sequence_chooses_its_own_rows(name: str) -> None:
    """And is answered as if it were alone."""
    model, ids = built(name), token_ids(40, batch=2)
    fast = compiled(model, OPTIONS | {"rows": SELECTED[name]})
    both = values(fast(**call_of(ids)))
    for sequence in range(2):
        alone = values(fast(**call_of(ids[sequence : sequence + 1])))
        assert worst([value[sequence : sequence + 1] for value in both], alone) < CLOSE


def test_sequences_of_other_content_have_other_rows() -> None:
    variants = variants_of(Attention(0.2, readers=2), 2, ways={"eliminated": ("identity", True)})
    variants.run(built("llama"), call_of(token_ids(40, batch=2)))
    index = index_of(variants)
    assert index.shape == (2, count_of(0.2, 32))
    assert not torch.equal(index[0], index[1])
    assert all(row.tolist() == sorted(set(row.tolist())) for row in index)


@dataclass(frozen=True)
class HighestToken:
    """A selector that looks at the ids alone."""

    share: float = 0.2

    def scores(self, prompt: Prompt) -> Tensor:
        """[batch, prefix]"""
        assert prompt.ids is not None
        return prompt.ids[:, : prompt.prefix].float()


def test_sequences_choose_apart_where_no_layer_has_attention() -> None:
    ids = token_ids(40, batch=2)
    variants = variants_of([HighestToken()], 2, ways={"eliminated": ("identity", True)})
    variants.run(built("mamba2"), call_of(ids))
    index = index_of(variants)
    for sequence in range(2):
        order = ids[sequence, :32].sort(descending=True, stable=True).indices
        assert index[sequence].tolist() == sorted(order[: count_of(0.2, 32)].tolist())


def test_padding_is_not_selected() -> None:
    ids = token_ids(40, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :12] = 0
    for rows in ("pooled:0.6", "random:0.6", "attention:0.3+random:0.3"):
        variants = variants_of(rows, ways={"eliminated": ("identity", True)})
        variants.run(built("llama"), call_of(ids, attention_mask=mask))
        index = index_of(variants)
        assert index[0].min() >= 12
        assert index[1].min() < 12


@pytest.mark.parametrize("cache", ["growing", "static", pytest.param("growing, longer mask", marks=pytest.mark.heavy)])
def test_hidden_rows_of_a_second_turn_are_not_selected(cache: str) -> None:
    """Wherever they lie among its rows, where lengths are symbolic: by the mask's columns for this turn's keys."""
    model, calls = built("llama"), []
    variants = variants_of("tail:0.25", ways={"eliminated": ("identity", True)})
    for old, rows in ((11, 40), (19, 52), (26, 44)):
        given = {"past_key_values": StaticCache(model.config, max_cache_len=100)} if cache == "static" else {}
        with torch.no_grad():
            past = cache_of(model(token_ids(old, batch=2, seed=5), use_cache=True, **given))
        mask = torch.ones(2, old + rows, dtype=torch.int64)
        mask[0, -TAIL - 6 : -TAIL] = 0
        mask = torch.nn.functional.pad(mask, (0, 7 if "longer" in cache else 0), value=1)
        calls.append(call_of(token_ids(rows, batch=2), attention_mask=mask, past_key_values=past))
    variants.run(model, *calls)
    assert variants.compiled == 2
    index = index_of(variants)
    assert index[0].tolist() == [*range(44 - TAIL - 6 - 9, 44 - TAIL - 6)]
    assert index[1].tolist() == [*range(44 - TAIL - 9, 44 - TAIL)]


def fails(operands: list[Tensor], scale: float | None) -> int:
    """As torch does that was built without the device's kernels."""
    raise NotImplementedError("aten::_fused_sdp_choice")


def test_grouped_heads_without_a_kernel_get_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs whose kernels take grouped heads without a mask alone."""
    monkeypatch.setattr("ridgefill_compile.passes.attend.device_type", lambda node: "cuda")
    variants = variants_of("pooled:0.3", ways={"eliminated": ("identity", True)})
    variants.run(built("llama"), *(call_of(token_ids(rows)) for rows in (40, 230)))
    before = variants.narrowed["eliminated"]
    grouped = [node for node in before.graph.nodes if CAUSAL_TAIL in node.meta and arguments(node)["enable_gqa"]]
    assert grouped
    asked: list[list[Tensor]] = []

    def spelled_out(operands: list[Tensor], scale: float | None) -> int:
        asked.append(operands)
        return int(SDPBackend.MATH.value)

    monkeypatch.setattr("ridgefill_compile.passes.attend.kernel_of", spelled_out)
    after = attend(before)
    verify(after, before, "attend")
    assert asked[0][0].shape[1] > asked[0][1].shape[1]
    masked = [node for node in after.graph.nodes if CAUSAL_TAIL in node.meta]
    assert all(shape(arguments(node)["key"])[1] == shape(arguments(node)["query"])[1] for node in masked)
    assert worst(expand(before)(*variants.inputs), expand(after)(*variants.inputs)) < CLOSE
    monkeypatch.setattr("ridgefill_compile.passes.attend.kernel_of", lambda *_: SDPBackend.EFFICIENT_ATTENTION.value)
    assert attend(before) is before
    monkeypatch.undo()
    monkeypatch.setattr("ridgefill_compile.passes.attend.device_type", lambda node: "cuda")
    monkeypatch.setattr("ridgefill_compile.passes.attend.kernel_of", fails)
    assert attend(before) is before


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_of_scattered_rows_needs_no_keys_behind_them(batch: int) -> None:
    """On CPU an operator is given their positions; it computes what the mask says, at any length."""
    variants = variants_of("pooled:0.3", ways={"eliminated": ("identity", True)})
    variants.run(built("llama"), *(call_of(token_ids(rows, batch=batch)) for rows in (40, 230, 301)))
    before = variants.narrowed["eliminated"]
    after = attend(before)
    verify(after, before, "attend")
    calls = [node for node in after.graph.nodes if node.target is torch.ops.ridgefill.attention_at.default]
    assert variants.located is not None
    assert len(calls) == len(variants.located.layers) - SPLIT - 1  # the last layer runs the rows of the logits alone
    masked = [node for node in before.graph.nodes if CAUSAL_TAIL in node.meta]
    assert len(masked) == len(calls) + 1
    inputs = variants.inputs
    assert worst(expand(before)(*inputs), expand(after)(*inputs)) < CLOSE
    assert attend(after) is after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [True, False], ids=["each sequence's own", "one for all"])
@pytest.mark.parametrize("strided", [False, True], ids=["", "entries apart in memory"])
def test_the_operator_against_one_row_at_a_time(own: bool, dtype: torch.dtype, strided: bool) -> None:
    numbers = torch.Generator().manual_seed(0)
    batch, rows, keys = 2, 400, 500
    query = torch.randn(batch, 4, rows, 8, generator=numbers).to(dtype)
    key, value = (torch.randn(batch, 2, keys, size, generator=numbers).to(dtype) for size in (8, 6))
    order = [torch.randperm(keys, generator=numbers)[:rows].sort().values for _ in range(batch if own else 1)]
    positions = torch.stack(order) if own else order[0]
    hidden = torch.arange(keys) > positions.unsqueeze(-1)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)
    if strided:
        query, key, value = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (query, key, value))
    found = attention_at(query, key, value, mask.unsqueeze(1) if own else mask, positions, 0.3, True)
    assert found.transpose(1, 2).is_contiguous()
    for sequence in range(batch):
        for row, at in enumerate(order[sequence % len(order)].tolist()):
            k, v = (x[sequence, :, : at + 1].float().repeat_interleave(2, 0) for x in (key, value))
            weights = (k @ query[sequence, :, row].float().unsqueeze(-1) * 0.3).softmax(1)
            expected = (weights * v).sum(1)
            torch.testing.assert_close(
                found[sequence, :, row].float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=2e-2
            )


def index_of(variants: Variants) -> Tensor:
    """The positions that the last prompt's graph chose."""
    module = variants.routed["eliminated"]
    (index,) = {node.args[1] for node in module.graph.nodes if node.target is take_rows}
    assert isinstance(index, Node)
    found = values_of(module, variants.inputs)[index]
    assert isinstance(found, Tensor)
    return found


def test_random_rows_of_a_second_turn_are_those_of_their_positions() -> None:
    """Whatever the turn begins with."""
    model, old = built("llama"), 11
    with torch.no_grad():
        cache = cache_of(model(token_ids(old, seed=5), use_cache=True))
    variants = variants_of("random:0.25", ways={"eliminated": ("identity", True)})
    variants.run(model, call_of(token_ids(40), past_key_values=cache))
    given = Prompt(1, 40, 32, torch.device("cpu"), first=old)
    assert index_of(variants).tolist() == choose(given, [Random(0.25)])[0].tolist()


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2_eager"])
def test_attention_of_a_second_turn_is_that_to_the_prompt(name: str) -> None:
    """Not to the rows before it, nor to sinks: told by the weights that the model itself returns."""
    model, old, rows = built(name), 11, 40
    with torch.no_grad():
        caches = [cache_of(model(token_ids(old, seed=5), use_cache=True)) for _ in range(2)]
        said = model(token_ids(rows), past_key_values=caches[0], output_attentions=True)
    variants = variants_of("attention:0.2", ways={"eliminated": ("identity", True)})
    variants.run(model, call_of(token_ids(rows), past_key_values=caches[1]))
    weights = said.attentions[0][..., :rows, -rows:]
    attention = LayerAttention(0, None, None, None, False, None, weights_of=weights)
    given = Prompt(1, rows, rows - TAIL, torch.device("cpu"), attention=(attention,))
    assert index_of(variants).tolist() == choose(given, parse_rows("attention:0.2"))[0].tolist()


def test_in_bfloat16() -> None:
    model = built("llama").bfloat16()
    call = call_of(token_ids(48))
    options = OPTIONS | {"rows": "pooled:0.25"}
    answers = [values(compiled(model, options | {"eliminate": way})(**call)) for way in (True, False)]
    assert all(graph.filled for graph in report(model).graphs)
    assert worst(*answers) < 0.05
    whole = values(compiled(model, OPTIONS | {"rows": "random:1.0"})(**call))
    with torch.no_grad():
        assert worst(whole, values(model(**call))) < 0.05


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize("name", QUICK_AND_HEAVY)
def test_late_values_are_computed_on_selected_and_last_rows(name: str) -> None:
    """Products and choices of experts of the layers behind the split: but for keys and values, and what the tail alone
    reads.
    """
    rows = 53
    split = 2 if name == "qwen3_next" else SPLIT
    variants = variants_of(SELECTED[name], split, ways={"eliminated": ("identity", True)})
    variants.run(built(name), call_of(token_ids(rows)))
    assert not variants.refusals
    assert variants.located is not None
    exact = count_of(0.2, rows - TAIL) + TAIL
    late = behind(variants.narrowed["eliminated"], split)
    found = [rows_of(node, rows, exact) for node in late if node.target in (aten.linear.default, aten.topk.default)]
    assert exact in found
    choices = [rows_of(node, rows, exact) for node in late if node.target is aten.topk.default]
    assert rows not in choices
    assert (exact in choices) == (name in ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"))
    wide = [node for node in late if node.target is aten.linear.default and rows_of(node, rows, exact) == rows]
    parents = {str(list(node.meta["nn_module_stack"].values())[-1][0]).rsplit(".", 1)[-1] for node in wide}
    assert not parents & {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate", "router", "out_proj"}


def behind(module: GraphModule, split: int) -> list[Node]:
    """Calls of the layers behind the split layer, and its own behind its attention."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    (index,) = {node.args[1] for node in nodes if node.target is put_rows}
    return [node for node in nodes if node > index]


def rows_of(node: Node, *known: int) -> int | None:
    """Which of these numbers of rows a value has."""
    sizes = [plain(size) for size in shape(node.all_input_nodes[0])]
    return next((number for number in known if number in sizes), None)
