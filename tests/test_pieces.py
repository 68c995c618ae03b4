"""Prefill in pieces fills what prefill at once fills, wherever the boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StaticCache

import ridgefill_compile
from ridgefill_compile import CannotFill, OptionError, RidgefillWarning, prompt_length, report
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from ridgefill_compile.zoo.calling import worst
from tests.decoders import FILLED, RECURRENT, cache_of, states_of, token_ids
from tests.toys import random_maps

ROWS, TAIL = 120, 24
OPTIONS: dict[str, Any] = {
    "route": "identity", "split": 2, "tail": TAIL, "min_fill": 8, "inner": "eager", "strict": True, "verify": True,
}  # fmt: skip


def compiled(model: PreTrainedModel, **options: Any) -> Any:
    """The model, compiled afresh."""
    torch._dynamo.reset()
    substitute_recurrences(model)  # asked for by name, they are for the models that are imported by then
    return torch.compile(model, backend="ridgefill", options={**OPTIONS, **options})


def llama() -> PreTrainedModel:
    """Two late layers: the first one's input is exact."""
    return FILLED["llama"].build(num_hidden_layers=4)


def in_pieces(fast: Any, ids: torch.Tensor, cuts: Sequence[int], cache: Any = None) -> list[Any]:
    """Outputs of every chunk of a prompt."""
    outputs, at = [], 0
    with torch.no_grad(), prompt_length(ids.shape[1]):
        for rows in cuts:
            given = {} if cache is None else {"past_key_values": cache}
            outputs.append(fast(ids[:, at : at + rows], use_cache=True, logits_to_keep=1, **given))
            cache, at = cache_of(outputs[-1]), at + rows
    return outputs


def at_once(fast: Any, ids: torch.Tensor, **given: Any) -> Any:
    """Output of the whole prompt."""
    with torch.no_grad():
        return fast(ids, use_cache=True, logits_to_keep=1, **given)


CUTS = {
    "the tail within a chunk": (50, 40, 30),
    "a chunk ends where the tail begins": (48, 48, 24),
    "the tail in several chunks": (60, 40, 20),
    "the last row alone is exact in a chunk": (50, 47, 23),
    "chunks of one length": (40, 40, 40),
}


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("qwen3_next", "qwen3_moe"))]
)
def test_pieces_fill_what_the_whole_prompt_fills(name: str) -> None:
    """Logits and every state are those of one prefill, to rounding, for every way to cut the prompt."""
    model = {**FILLED, **RECURRENT}[name].build()
    ids = token_ids(rows=ROWS, batch=2)
    whole = at_once(compiled(model), ids)
    fast = compiled(model)
    with torch._dynamo.config.patch(recompile_limit=64):
        for cuts in CUTS.values() if name == "llama" else [CUTS["the tail within a chunk"]]:
            last = in_pieces(fast, ids, cuts)[-1]
            assert worst([whole.logits], [last.logits]) < 1e-5, cuts
            states, found = states_of(whole), states_of(last)
            assert states.keys() == found.keys()
            assert max(worst([states[key]], [found[key]]) for key in states) < 1e-4, cuts


def test_chunks_differ_from_an_exact_prefill() -> None:
    """Late keys of the prefix are predicted; early ones, and all of the first late layer's, are exact. A chunk that is
    filled whole has no true logits: they are NaN.
    """
    model = llama()
    ids = token_ids(rows=ROWS)
    outputs = in_pieces(compiled(model), ids, (50, 40, 30))
    exact, filled = states_of(at_once(model, ids)), states_of(outputs[-1])
    for layer in range(3):
        assert worst([exact[f"{layer}.keys"]], [filled[f"{layer}.keys"]]) < 1e-5
    assert worst([exact["3.keys"]], [filled["3.keys"]]) > 1e-2
    assert [bool(output.logits.isnan().all()) for output in outputs] == [True, True, False]
    assert not outputs[-1].logits.isnan().any()


@pytest.mark.parametrize(
    ("cuts", "is_own_mask"),
    [
        pytest.param((50, 40, 30), False, marks=pytest.mark.heavy),
        pytest.param((5, 3, 82, 30), False, marks=pytest.mark.heavy),
        pytest.param((100, 20), False, marks=pytest.mark.heavy),
        ((5, 3, 82, 30), True),
    ],
    ids=str,
)
def test_first_rows_of_a_sequence_are_exact(cuts: Sequence[int], is_own_mask: bool) -> None:
    """Wherever the first chunk ends, and in the padded sequence, whose first rows are others."""
    model, ids, begins = llama(), token_ids(rows=ROWS, batch=2), 6
    mask = torch.ones_like(ids)
    mask[0, :begins] = 0
    exact = states_of(at_once(model, ids, attention_mask=mask))
    whole = states_of(at_once(compiled(model, first_rows=3), ids, attention_mask=mask))
    fast, cache, done = compiled(model, first_rows=3), None, 0
    with torch.no_grad(), prompt_length(ROWS), torch._dynamo.config.patch(recompile_limit=64):
        for rows in cuts:
            end = done + rows
            call = {"attention_mask": mask[:, :end], "use_cache": True, "logits_to_keep": 1}
            if is_own_mask:
                sees = torch.ones(end, end, dtype=torch.bool).tril() & mask[:, None, None, :end].bool()
                call["attention_mask"] = torch.where(sees[:, :, done:], 0.0, torch.finfo(torch.float32).min)
            if done:
                call["past_key_values"] = cache
            cache, done = cache_of(fast(ids[:, done:end], **call)), end
    found = states_of({"cache": cache})
    for name, state in found.items():
        for sequence, start in ((0, begins), (1, 0)):
            first = state[sequence, :, start : start + 3]
            assert worst([exact[name][sequence, :, start : start + 3]], [first]) < 1e-5
            assert worst([whole[name][sequence, :, start : start + 3]], [first]) < 1e-5
        if int(name[0]) > 2:
            assert worst([exact[name][:, :, 20:60]], [state[:, :, 20:60]]) > 1e-2


BOTH = {"value_rescale": 8, "key_rescale": 5}


@pytest.mark.parametrize(
    ("name", "options", "cuts"),
    [
        *(("llama", BOTH, cuts) for cuts in [(48, 48, 24), (100, 20)]),
        *(pytest.param("llama", BOTH, cuts, marks=pytest.mark.heavy) for cuts in [(50, 40, 30), (60, 48, 12)]),
        pytest.param("qwen3", {"key_rescale": 8}, (96, 24), marks=pytest.mark.heavy),
        pytest.param("gemma2", {"value_rescale": 8}, (40, 72, 8), marks=pytest.mark.heavy),
        pytest.param("gemma2", BOTH, (100, 20), marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_lengths_are_corrected_as_at_once(name: str, options: dict[str, int], cuts: Sequence[int]) -> None:
    """On as many rows of the tail as the chunk holds that it begins in; earlier chunks are rescaled, too."""
    model, ids = FILLED[name].build(), token_ids(rows=ROWS, batch=2)
    measured = {name: min(rows, 4) if cuts == (100, 20) else rows for name, rows in options.items()}
    whole = at_once(compiled(model, **measured), ids)
    with torch._dynamo.config.patch(recompile_limit=64):
        last = in_pieces(compiled(model, **options), ids, cuts)[-1]
    assert worst([whole.logits], [last.logits]) < 1e-5
    states, found = states_of(whole), states_of(last)
    assert max(worst([states[key]], [found[key]]) for key in states) < 1e-4


@pytest.mark.parametrize("cuts", [(60, 60), pytest.param((50, 40, 30), marks=pytest.mark.heavy)], ids=str)
def test_inductor_takes_chunks(cuts: Sequence[int]) -> None:
    """Corrected, and with first rows; of three, one is filled whole."""
    model, ids = llama(), token_ids(rows=ROWS)
    options = {"value_rescale": 8, "first_rows": 3}
    answers = [
        in_pieces(compiled(model, inner=inner, **options), ids, cuts)[-1] for inner in ("eager", "inductor")
    ]
    assert worst([answers[0].logits], [answers[1].logits]) < 1e-4


@pytest.mark.heavy
def test_a_chunk_of_one_row_counts() -> None:
    """It runs exactly wherever it lies, and the tail begins where it should; a correction that is due is warned of."""
    model, ids, cuts = llama(), token_ids(rows=ROWS), (50, 45, 1, 1, 23)
    whole = states_of(at_once(compiled(model), ids))
    found = states_of(in_pieces(compiled(model), ids, cuts)[-1])
    rows = [row for row in range(ROWS) if row != 95]  # alone in its chunk, and so exact
    assert max(worst([whole[key][:, :, rows[:96]]], [found[key][:, :, rows[:96]]]) for key in whole) < 1e-4
    exact = states_of(at_once(model, ids))
    assert worst([exact["2.keys"]], [found["2.keys"]]) < 1e-5
    with pytest.warns(RidgefillWarning, match="stays uncorrected"):
        in_pieces(compiled(model, value_rescale=8), ids, cuts)


@pytest.mark.heavy
def test_another_model_of_the_same_code_runs_chunks_exactly() -> None:
    """Its weights are not those that the maps were made for, and none of its rows is rescaled."""
    ids, cuts = token_ids(rows=ROWS), (50, 40, 30)
    models = [llama() for _ in range(2)]
    with torch.no_grad():
        models[1].model.layers[0].mlp.up_proj.weight.mul_(1.5)
    maps = random_maps(64, layers=4, splits=(2,), of=models[0])
    options = {**OPTIONS, "route": "ridge", "maps": maps, "strict": False, "value_rescale": 8}
    torch._dynamo.reset()
    fast = [torch.compile(model, backend="ridgefill", options=options) for model in models]
    in_pieces(fast[0], ids, cuts)
    with pytest.warns(RidgefillWarning, match="other weights"):
        found = in_pieces(fast[1], ids, cuts)[-1]
    assert worst([at_once(models[1], ids).logits], [found.logits]) < 1e-5


def test_exact_rows_of_earlier_chunks_keep_their_length() -> None:
    """First rows, and the last one of their chunk; all others are as long as at once."""
    model, ids, cuts = llama(), token_ids(rows=ROWS), (50, 40, 30)
    plain = states_of(in_pieces(compiled(model, first_rows=3), ids, cuts)[-1])
    found = states_of(in_pieces(compiled(model, first_rows=3, value_rescale=8), ids, cuts)[-1])
    ratio = (found["3.values"] / plain["3.values"]).mean((0, 1, 3))
    exact = [0, 1, 2, 49, *range(ROWS - TAIL, ROWS)]
    assert worst([ratio[exact]], [torch.ones(len(exact))]) < 1e-5
    filled = [row for row in range(ROWS) if row not in exact]
    assert worst([ratio[filled]], [ratio[10].expand(len(filled))]) < 1e-4
    assert abs(ratio[10] - 1) > 1e-3


@pytest.mark.heavy
def test_lengths_are_corrected_in_a_static_cache_and_behind_a_former_turn() -> None:
    """Rows of the former turn are left as they are."""
    model, ids, former = llama(), token_ids(rows=ROWS), token_ids(rows=30, seed=3)
    outputs = []
    for cuts in ((ROWS,), (50, 40, 30)):
        for is_static in (False, True):
            fast = compiled(model, value_rescale=8)
            static = StaticCache(config=model.config, max_cache_len=ROWS + 40)
            with torch.no_grad():
                cache = cache_of(model(former, use_cache=True, **({"past_key_values": static} if is_static else {})))
            outputs.append(in_pieces(fast, ids, cuts, cache)[-1])
    for output in outputs[1:]:
        assert worst([outputs[0].logits], [output.logits]) < 1e-5


def test_static_cache() -> None:
    """Chunks write into a cache of fixed size."""
    model = llama()
    ids = token_ids(rows=ROWS)
    caches = [StaticCache(config=model.config, max_cache_len=ROWS + 8) for _ in range(2)]
    whole = at_once(compiled(model), ids, past_key_values=caches[0])
    last = in_pieces(compiled(model), ids, (50, 40, 30), caches[1])[-1]
    assert worst([whole.logits], [last.logits]) < 1e-5


@pytest.mark.filterwarnings("ignore::ridgefill_compile.RidgefillWarning")
def test_generate_in_chunks() -> None:
    """`generate(prefill_chunk_size=)` in `prompt_length` gives the tokens of one filled prefill."""
    model: Any = llama()
    ids = token_ids(rows=ROWS)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    torch._dynamo.reset()
    model.compile(backend="ridgefill", options={**OPTIONS, "strict": False})
    whole = model.generate(ids, **settings)
    with prompt_length(ROWS):
        chunks = model.generate(ids, prefill_chunk_size=48, **settings)
    assert whole.tolist() == chunks.tolist()
    said = [graph.reason for graph in report(model).graphs]
    assert any("a chunk before the prompt's tail" in reason for reason in said)


def test_without_the_length_chunks_are_prompts() -> None:
    """Each chunk then keeps a tail of its own, as any prompt does."""
    model = llama()
    fast = compiled(model)
    with torch.no_grad():
        first = fast(token_ids(rows=50), use_cache=True, logits_to_keep=1)
    assert not first.logits.isnan().any()


def test_true_layer_inputs_need_the_whole_prompt() -> None:
    model = llama()
    with pytest.raises(CannotFill, match="cannot be filled with true layer inputs"):
        in_pieces(compiled(model, route="oracle"), token_ids(rows=ROWS), (50, 40, 30))


@pytest.mark.parametrize("rows", [0, -3, 1.5, "all", None])
def test_a_length_is_a_whole_number(rows: Any) -> None:
    """A wrong length is refused before anything runs."""
    with pytest.raises(OptionError, match="prompt_length needs a whole number"), prompt_length(rows):
        pass


def test_a_length_that_nobody_heard_is_told() -> None:
    """An uncompiled model takes no notice: a warning says so."""
    model = llama()
    with pytest.warns(RidgefillWarning, match="ran in it"), prompt_length(ROWS):
        model(token_ids(rows=ROWS))
    assert ridgefill_compile.prompt_length is prompt_length


def test_a_length_that_is_too_long_is_told() -> None:
    """As where rows of a former turn are counted, too; and ids that are said are looked at."""
    model, ids = llama(), token_ids(rows=ROWS)
    with pytest.warns(RidgefillWarning, match="200 rows were said and 120 came"), prompt_length(200):
        at_once(compiled(model), ids)
    both = torch.cat([token_ids(rows=30, seed=3), ids], 1)
    with pytest.raises(CannotFill, match="are not those that prompt_length was given"), prompt_length(both):
        at_once(compiled(model), ids)
