"""Rows of a prompt in pieces that are selected by tokens or positions are those of the prompt at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from ridgefill_compile import CannotFill, OptionError, RidgefillWarning, RidgeMaps, prompt_length, report
from ridgefill_compile.prompt import Prompt
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from ridgefill_compile.rows_in_pieces import rows_to_keep
from ridgefill_compile.selectors import Attention, LongerTail, Numbers, Protected, Random, choose
from ridgefill_compile.zoo.calling import worst
from tests.decoders import FILLED, RECURRENT, cache_of, states_of, token_ids
from tests.test_pieces import ROWS, TAIL, at_once, compiled, in_pieces, llama
from tests.test_token_rows import table
from tests.toys import random_maps

PREFIX = ROWS - TAIL


@dataclass(frozen=True)
class These:
    """Rows that are said."""

    rows: tuple[int, ...]
    from_tokens: ClassVar[bool] = True

    @property
    def share(self) -> float:
        return len(self.rows) / PREFIX

    def scores(self, prompt: Prompt) -> Tensor:
        row = torch.arange(prompt.prefix)
        return torch.stack([row == each for each in self.rows]).any(0).long().expand(prompt.batch, -1)


def with_table(**settings: Any) -> RidgeMaps:
    """Maps that predict nonsense, with a table of tokens."""
    plain = random_maps(64, layers=4, splits=(2,), **settings)
    return RidgeMaps([plain._part(2)], layer_count=4, tokens=table())


def prompt_of(batch: int = 1) -> Tensor:
    """Ids of few kinds, so that many are numbers and names in the table."""
    return token_ids(rows=ROWS, batch=batch) % 12


def ends(cuts: Sequence[int], chosen: set[int]) -> set[int]:
    """Last rows of chunks before the tail that hold a row to keep: they are exact, too."""
    last, at = set(), 0
    for rows in cuts:
        if chosen & {*range(at, at + rows)}:
            last.add(at + rows - 1)
        at += rows
    return {row for row in last if row < PREFIX}


def pieces(fast: Any, ids: Tensor, cuts: Sequence[int], said: Any = None) -> Any:
    """Output of the last chunk of a prompt whose ids are said."""
    given: dict[str, Any] = {}
    at, output = 0, None
    with torch.no_grad(), prompt_length(ids if said is None else said):
        for rows in cuts:
            output = fast(ids[:, at : at + rows], use_cache=True, logits_to_keep=1, **given)
            given, at = {"past_key_values": cache_of(output)}, at + rows
    return output


def keep(rows: Iterable[int]) -> These:
    return These(tuple(sorted(rows)))


@pytest.mark.parametrize(
    ("spec", "cuts"),
    [
        pytest.param((Random(0.25, 3),), (50, 40, 30), marks=pytest.mark.heavy),
        ((Numbers(0.125), Random(0.125)), (48, 48, 24)),
        pytest.param((Protected(0.25),), (7, 60, 53), marks=pytest.mark.heavy),
        pytest.param((LongerTail(0.25),), (50, 40, 30), marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_rows_are_those_of_the_prompt_at_once(spec: Any, cuts: Sequence[int]) -> None:
    """Logits and every state, wherever the prompt is cut; of two sequences what either keeps."""
    model, ids = llama(), prompt_of(2)
    everything = Prompt(2, ROWS, PREFIX, torch.device("cpu"), ids=ids, tokens=table())
    chosen = set(choose(everything, spec).unique().tolist())
    assert len(chosen) >= PREFIX // 4
    options = {"maps": with_table(), "route": "identity"}
    last = pieces(compiled(model, rows=spec, **options), ids, cuts)
    whole = at_once(compiled(model, rows=keep(chosen | ends(cuts, chosen)), **options), ids)
    assert worst([whole.logits], [last.logits]) < 1e-5
    states, found = states_of(whole), states_of(last)
    assert max(worst([states[key]], [found[key]]) for key in states) < 1e-4


@pytest.mark.heavy
def test_one_sequence_keeps_what_it_keeps_at_once() -> None:
    """With the option's own text; the rest is filled."""
    model, ids, cuts = llama(), prompt_of(), (50, 40, 30)
    fast = compiled(model, rows="protected:0.25", maps=with_table(), route="identity")
    last = states_of(pieces(fast, ids, cuts))
    whole = states_of(at_once(fast, ids))
    exact = states_of(at_once(model, ids))
    same = ((exact["3.keys"] - last["3.keys"]).abs().amax((0, 1, 3)) < 1e-4)[:PREFIX]
    at_once_too = ((exact["3.keys"] - whole["3.keys"]).abs().amax((0, 1, 3)) < 1e-4)[:PREFIX]
    chosen = set(at_once_too.nonzero()[:, 0].tolist())
    assert set(same.nonzero()[:, 0].tolist()) == chosen | ends(cuts, chosen)
    filled = [graph.rows_filled for graph in report(model).graphs if graph.chunk and graph.filled]
    assert sum(filled) == PREFIX - len(set(same.nonzero()[:, 0].tolist()))


def test_rows_of_a_padded_sequence_are_its_own() -> None:
    """No row of padding is chosen; first rows are, behind it; the number is that of the prompt at once."""
    padding = torch.tensor([10, 0])
    chosen = rows_to_keep([Random(0.25)], ROWS, TAIL, first_rows=4, padding=padding)
    for sequence, begins in enumerate(padding.tolist()):
        valid = torch.arange(ROWS) >= begins
        alone = Prompt(1, ROWS, PREFIX, torch.device("cpu"), valid=valid.expand(1, -1))
        mine = set(choose(alone, [Random(0.25)], 4)[0].tolist())
        assert mine <= chosen
        assert {begins, begins + 3} <= mine
        assert min(mine) == begins, sequence
    model, ids, done = llama(), prompt_of(2), 0
    given: dict[str, Any] = {}
    mask = (torch.arange(ROWS) >= padding.unsqueeze(1)).long()
    exact = at_once(model, ids, attention_mask=mask)
    fast = compiled(model, rows="random:1.0", first_rows=4)
    with torch.no_grad(), prompt_length(ROWS), torch._dynamo.config.patch(recompile_limit=64):
        for rows in (50, 40, 30):
            done += rows
            output = fast(
                ids[:, done - rows : done], attention_mask=mask[:, :done], use_cache=True, logits_to_keep=1, **given
            )
            given = {"past_key_values": cache_of(output)}
    assert worst([exact.logits], [output.logits]) < 1e-5


def test_all_rows_are_the_exact_model() -> None:
    """And none of a chunk is lost where a former turn comes before."""
    model, ids = llama(), prompt_of()
    fast = compiled(model, rows="tail:1.0")
    with torch.no_grad():
        caches = [cache_of(model(token_ids(rows=20, seed=5), use_cache=True)) for _ in range(2)]
    exact = at_once(model, ids, past_key_values=caches[0])
    assert worst([exact.logits], [in_pieces(fast, ids, (50, 40, 30), caches[1])[-1].logits]) < 1e-5


@pytest.mark.heavy
def test_lengths_and_states_are_corrected_beside_selected_rows() -> None:
    """Exact rows of earlier chunks keep their lengths, as at once."""
    model, ids, cuts = llama(), prompt_of(), (48, 48, 24)
    chosen = set(choose(Prompt(1, ROWS, PREFIX, torch.device("cpu")), [Random(0.25)])[0].tolist())
    last = pieces(compiled(model, rows=(Random(0.25),), value_rescale=8), ids, cuts)
    whole = at_once(compiled(model, rows=keep(chosen | ends(cuts, chosen)), value_rescale=8), ids)
    states, found = states_of(whole), states_of(last)
    assert max(worst([states[key]], [found[key]]) for key in states) < 1e-4


@pytest.mark.heavy
def test_recurrences_take_selected_rows_in_pieces() -> None:
    model, ids, cuts = RECURRENT["qwen3_next"].build(), token_ids(rows=ROWS), (50, 40, 30)
    substitute_recurrences(model)
    chosen = set(choose(Prompt(1, ROWS, PREFIX, torch.device("cpu")), [Random(0.25)])[0].tolist())
    last = pieces(compiled(model, rows=(Random(0.25),)), ids, cuts)
    whole = at_once(compiled(model, rows=keep(chosen | ends(cuts, chosen))), ids)
    assert worst([whole.logits], [last.logits]) < 1e-5


@pytest.mark.heavy
def test_inductor_takes_them() -> None:
    model, ids = llama(), prompt_of()
    options = {"rows": "numbers:0.25", "maps": with_table(), "route": "identity"}
    answers = [pieces(compiled(model, inner=inner, **options), ids, (50, 40, 30)) for inner in ("eager", "inductor")]
    assert worst([answers[0].logits], [answers[1].logits]) < 1e-4


def test_generate_in_chunks() -> None:
    model: Any = llama()
    ids = prompt_of()
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    torch._dynamo.reset()
    options = {"route": "identity", "split": 2, "tail": TAIL, "min_fill": 8, "inner": "eager", "rows": "tail:1.0"}
    exact = model.generate(ids, **settings)
    model.compile(backend="ridgefill", options=options)
    with prompt_length(ids):
        assert model.generate(ids, prefill_chunk_size=48, **settings).tolist() == exact.tolist()


@dataclass(frozen=True)
class Unsaid:
    """A selector of one's own that does not say what it reads."""

    share: float = 0.25

    def scores(self, prompt: Prompt) -> Tensor:
        return torch.zeros(prompt.batch, prompt.prefix)


@pytest.mark.parametrize(
    ("spec", "said", "reason"),
    [
        ("numbers:0.25", ROWS, "by its tokens, and they are not known"),
        ("numbers:0.25", prompt_of(2)[1:], "are not those that prompt_length was given"),
        (Attention(0.25), None, "cannot be selected by Attention"),
    ],
    ids=["no ids", "other ids", "attention"],
)
def test_rows_that_cannot_be_chosen_yet(spec: Any, said: Any, reason: str) -> None:
    """Refused, and exact without `strict`, with the reason in the report."""
    model, ids = llama(), prompt_of()
    options = {"rows": spec, "maps": with_table(), "route": "identity"}
    with pytest.raises(CannotFill, match=reason):
        pieces(compiled(model, **options), ids, (50, 40, 30), said)
    with pytest.warns(RidgefillWarning, match=reason):
        last = pieces(compiled(model, strict=False, **options), ids, (50, 40, 30), said)
    assert worst([at_once(model, ids).logits], [last.logits]) < 1e-5
    assert any(graph.chunk and reason in graph.reason for graph in report(model).graphs)


@dataclass(frozen=True)
class Broken:
    """A selector of one's own that raises."""

    from_tokens: ClassVar[bool] = True
    share: float = 0.25

    def scores(self, prompt: Prompt) -> Tensor:
        raise KeyError("lost")


def test_another_reason_is_told_too() -> None:
    """Once a graph of Dynamo's: ids that are others in the first prompt, in the second ones that nobody said."""
    model, ids = llama(), prompt_of()
    fast = compiled(model, rows="numbers:0.25", maps=with_table(), route="identity", strict=False)
    with pytest.warns(RidgefillWarning, match="a chunk of a prompt runs exactly, not filled: the ids of a"):
        pieces(fast, ids, (40, 40, 40), prompt_of(2)[1:])
    with pytest.warns(RidgefillWarning, match="by its tokens, and they are not known"):
        pieces(fast, ids, (40, 40, 40), ROWS)
    told = [graph.reason for graph in report(model).graphs if graph.chunk and not graph.filled]
    for what in ("are not those that prompt", "and they are not known"):
        assert any(what in reason for reason in told)
    pieces(fast, ids, (40, 40, 40), ROWS)
    assert len(told) == sum(graph.chunk and not graph.filled for graph in report(model).graphs)


@pytest.mark.parametrize("cuts", [(50, 40, 30), (ROWS,)], ids=str)
def test_a_selector_that_fails_is_named(cuts: Sequence[int]) -> None:
    model, ids = llama(), prompt_of()
    with pytest.raises(CannotFill, match="could not be selected by Broken: KeyError: 'lost'"):
        pieces(compiled(model, rows=(Broken(),)), ids, cuts)
    with pytest.warns(RidgefillWarning, match="by Broken"):
        last = pieces(compiled(model, rows=(Broken(),), strict=False), ids, cuts)
    assert worst([at_once(model, ids).logits], [last.logits]) < 1e-5


def test_ids_that_are_looked_up_as_a_view_are_known() -> None:
    """Beside positions that are an input, too."""
    model, ids, done = FILLED["gpt2"].build(), prompt_of(), 0
    fast, given = compiled(model, rows="numbers:0.25", maps=with_table(), route="identity"), dict[str, Any]()
    with torch.no_grad(), prompt_length(ids), torch._dynamo.config.patch(recompile_limit=64):
        for rows in (50, 40, 30):
            done += rows
            place = torch.arange(done - rows, done).unsqueeze(0)
            output = fast(ids[:, done - rows : done], position_ids=place, use_cache=True, logits_to_keep=1, **given)
            given = {"past_key_values": cache_of(output)}
    chosen = set(
        choose(Prompt(1, ROWS, PREFIX, torch.device("cpu"), ids=ids, tokens=table()), [Numbers(0.25)])[0].tolist()
    )
    whole = at_once(compiled(model, rows=keep(chosen | {49, 89})), ids)
    assert worst([whole.logits], [output.logits]) < 1e-5
    assert any(graph.chunk and graph.filled for graph in report(model).graphs)


@pytest.mark.parametrize(
    ("cache", "former"),
    [
        ("growing", 0),
        ("allocated", 0),
        pytest.param("static", 0, marks=pytest.mark.heavy),
        ("growing", 20),
        pytest.param("allocated", 20, marks=pytest.mark.heavy),
    ],
)
def test_every_chunk_may_be_given_the_mask_of_the_whole_prompt(cache: str, former: int) -> None:
    """Or of all rows of a static cache. What is still to come is no former turn: first rows are kept behind the padding
    (in a second turn none), and the same are selected.
    """
    model, ids = llama(), prompt_of(2)
    mask = torch.cat([torch.ones(2, former), torch.arange(ROWS) >= torch.tensor([10, 0]).unsqueeze(1)], 1).long()
    states = []
    for name in ("until now", "whole", "all") if cache == "allocated" else ("until now", "whole"):
        fast, done, given = compiled(model, rows="random:0.25", first_rows=4), 0, dict[str, Any]()
        if cache != "growing":
            given = {"past_key_values": StaticCache(config=model.config, max_cache_len=former + ROWS + 8)}
        if cache == "allocated":
            given["past_key_values"].early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
            if former:
                given = {
                    "past_key_values": cache_of(model(token_ids(former, batch=2, seed=5), use_cache=True, **given))
                }
            with prompt_length(ROWS):
                for rows in (50, 40, 30):
                    done += rows
                    said = {
                        "until now": mask[:, : former + done],
                        "whole": mask,
                        "all": torch.nn.functional.pad(mask, (0, 8)),
                    }
                    call = {**given, "attention_mask": said[name]}
                    output = fast(ids[:, done - rows : done], use_cache=True, logits_to_keep=1, **call)
                    given = {"past_key_values": cache_of(output)}
        states.append(states_of(output))
    for found in states[1:]:
        assert max(worst([states[0][key]], [found[key]]) for key in found) < 1e-5
    assert any(graph.chunk and graph.filled for graph in report(model).graphs)


def test_beams_of_a_padded_batch_keep_what_their_prompt_keeps() -> None:
    ids, padding = prompt_of(2), torch.tensor([10, 0])
    alone = rows_to_keep([Numbers(0.25)], ROWS, TAIL, padding=padding, ids=ids, tokens=table())
    beams = padding.repeat_interleave(2)
    assert rows_to_keep([Numbers(0.25)], ROWS, TAIL, padding=beams, ids=ids, tokens=table()) == alone


def test_a_last_row_alone_is_kept() -> None:
    model, ids = llama(), prompt_of()
    found = states_of(pieces(compiled(model, rows=keep([49]), min_fill=PREFIX), ids, (50, 40, 30)))
    exact = states_of(at_once(model, ids))
    assert worst([exact["2.keys"]], [found["2.keys"]]) < 1e-5
    assert sum(graph.rows_filled for graph in report(model).graphs) == PREFIX - 1


def test_a_selector_says_what_it_reads() -> None:
    with pytest.raises(CannotFill, match="cannot be selected by Unsaid: it may read attention"):
        rows_to_keep([Random(0.1), Unsaid()], ROWS, TAIL)


def test_numbers_without_a_table() -> None:
    with pytest.raises(CannotFill, match="the maps hold no table"):
        pieces(compiled(llama(), rows="numbers:0.25"), prompt_of(), (50, 40, 30))


def test_a_prompt_too_short_to_fill_runs_exactly() -> None:
    """As it would at once."""
    model, ids = llama(), prompt_of()
    last = pieces(compiled(model, min_fill=PREFIX + 1), ids, (50, 40, 30))
    assert worst([at_once(model, ids).logits], [last.logits]) < 1e-5
    assert not any(graph.rows_filled for graph in report(model).graphs)


@pytest.mark.parametrize("ids", [torch.zeros(4, dtype=torch.int64), torch.zeros(2, 4)], ids=["one dimension", "floats"])
def test_ids_are_checked(ids: Tensor) -> None:
    with pytest.raises(OptionError, match=r"ids \[batch, rows\]"), prompt_length(ids):
        pass
