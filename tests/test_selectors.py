"""Selectors against scores written as loops, the rows chosen of them, and the text that names them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgefill_compile.errors import CannotFill, OptionError
from ridgefill_compile.prompt import LayerAttention, Prompt, real_rows
from ridgefill_compile.report import report
from ridgefill_compile.selectors import (
    SELECTORS,
    Attention,
    LongerTail,
    Pooled,
    QuestionBlind,
    Random,
    Selector,
    choose,
    count_of,
    parse_rows,
)
from tests.passes.graphs import fake, fake_mode
from tests.toys import IDENTITY, compiled, distance, plain, prompt

BATCH, HEADS, ROWS, OLD, SIZE = 2, 4, 12, 3, 5
PREFIX = 9
_generator = torch.Generator().manual_seed(0)


def real(*size: int) -> Tensor:
    return torch.randn(size, generator=_generator)


def layer(
    number: int = 3, *, kv_heads: int = HEADS, keys: int = ROWS, causal: bool = True, **settings: Any
) -> LayerAttention:
    """Random attention of one layer."""
    query, key = real(BATCH, HEADS, ROWS, SIZE), real(BATCH, kv_heads, keys, SIZE)
    return LayerAttention(number, query, key, **{"mask": None, "causal": causal, "scale": None, **settings})


def tail_mask(keys: int) -> Tensor:
    """Row i of the prompt sees the old keys and its own 0..i; the first two keys are padding of the first prompt."""
    mask = torch.arange(keys) <= torch.arange(ROWS).unsqueeze(1) + keys - ROWS
    mask = mask.expand(BATCH, 1, ROWS, keys).clone()
    mask[0, :, :, :2] = False
    return mask


def additive(mask: Tensor) -> Tensor:
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


POSITIONS = torch.randperm(ROWS + 4, generator=_generator)[:ROWS]
LAYERS = {
    "causal": layer(),
    "fewer key heads": layer(kv_heads=2),
    "one key head, scaled": layer(kv_heads=1, scale=0.3),
    "boolean mask": layer(causal=False, mask=tail_mask(ROWS)),
    "float mask": layer(causal=False, mask=additive(tail_mask(ROWS)), scale=2.0),
    "mask of keys": layer(causal=False, mask=tail_mask(ROWS)[:, :, -1:]),
    "mask of heads": layer(causal=False, mask=real(1, HEADS, ROWS, ROWS)),
    "a former turn": layer(keys=ROWS + OLD, causal=False, mask=tail_mask(ROWS + OLD), columns="last"),
    "a static cache": layer(keys=ROWS + 4, causal=False, mask=real(ROWS, ROWS + 4), columns=POSITIONS),
    "weights": LayerAttention(3, None, None, None, False, None, weights_of=real(BATCH, HEADS, ROWS, ROWS).softmax(-1)),
}


def seen(given: LayerAttention, sequence: int, head: int, row: int) -> list[float]:
    """Attention of one row to every key, by the textbook."""
    if given.weights_of is not None:
        return given.weights_of[sequence, head, row].tolist()
    assert given.query is not None
    assert given.key is not None
    groups = given.query.shape[1] // given.key.shape[1]
    query, scale = given.query[sequence, head, row].tolist(), given.scale or 1 / math.sqrt(given.query.shape[-1])
    scores = []
    for at in range(given.key.shape[2]):
        key = given.key[sequence, head // groups, at].tolist()
        score = scale * sum(a * b for a, b in zip(query, key, strict=True))
        if given.causal and at > row:
            score = -math.inf
        if given.mask is not None:
            shape = (BATCH, HEADS, given.query.shape[2], given.key.shape[2])
            entry = given.mask.expand(shape)[sequence, head, row, at].item()
            score = (score if entry else -math.inf) if given.mask.dtype == torch.bool else score + entry
        scores.append(score)
    highest = max(scores)
    if highest == -math.inf:
        return [0.0] * len(scores)
    exponents = [math.exp(score - highest) for score in scores]
    return [exponent / sum(exponents) for exponent in exponents]


def column(given: LayerAttention, row: int) -> int:
    """Which key is that of a row of the prompt."""
    if isinstance(given.columns, Tensor):
        return int(given.columns[row])
    if given.columns == "last":
        assert given.key is not None
        return given.key.shape[2] - ROWS + row
    return row


def looks(layers: list[LayerAttention], readers: range, sequence: int, row: int) -> list[float]:
    """What a row gets of every reader, head and layer."""
    return [
        seen(given, sequence, head, reader)[column(given, row)]
        for given in layers
        for head in range(HEADS)
        for reader in readers
    ]


def prompt_of(*layers: LayerAttention, **settings: Any) -> Prompt:
    return Prompt(**{"batch": BATCH, "rows": ROWS, "prefix": PREFIX, "device": torch.device("cpu"), **settings},
                  attention=layers)  # fmt: skip


def scored(score: Any) -> Tensor:
    return torch.tensor([[score(sequence, row) for row in range(PREFIX)] for sequence in range(BATCH)])


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("readers", [2, 64])
def test_attention_is_summed_over_heads_and_readers(name: str, readers: int) -> None:
    last = range(max(0, ROWS - readers), ROWS)
    expected = scored(lambda sequence, row: sum(looks([LAYERS[name]], last, sequence, row)))
    found = Attention(readers=readers).scores(prompt_of(LAYERS[name]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("readers", [3, 64])
def test_the_question_blind_read_before_the_tail(name: str, readers: int) -> None:
    before = range(max(0, PREFIX - readers), PREFIX)
    expected = scored(lambda sequence, row: sum(looks([LAYERS[name]], before, sequence, row)))
    found = QuestionBlind(readers=readers).scores(prompt_of(LAYERS[name]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("pool", [1, 3, 31])
def test_pooled_is_the_largest_of_the_neighbours(name: str, pool: int) -> None:
    def score(sequence: int, row: int) -> float:
        near = range(max(0, row - pool // 2), min(PREFIX, row + pool // 2 + 1))
        return max(max(looks([LAYERS[name]], range(ROWS - 4, ROWS), sequence, other)) for other in near)

    found = Pooled(readers=4, pool=pool).scores(prompt_of(LAYERS[name]))
    torch.testing.assert_close(found, scored(score), rtol=1e-4, atol=1e-5)


def test_readers_before_the_last_rows() -> None:
    readers = range(ROWS - 5, ROWS - 2)
    expected = scored(lambda sequence, row: sum(looks([LAYERS["causal"]], readers, sequence, row)))
    found = Attention(readers=3, before=2).scores(prompt_of(LAYERS["causal"]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layers", "taken"), [(None, [3, 7]), ((0, 7), [0, 7]), ((1,), [1]), ((20,), [0, 1, 3, 7])])
def test_layers_that_read(layers: tuple[int, ...] | None, taken: list[int]) -> None:
    """Those of the study, or those asked for; all where none of them is there."""
    given = [layer(number) for number in (0, 1, 3, 7)]
    used = [each for each in given if each.layer in taken]
    expected = scored(lambda sequence, row: sum(looks(used, range(ROWS - 2, ROWS), sequence, row)))
    found = Attention(readers=2, layers=layers).scores(prompt_of(*given))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("selector", [Attention(), Pooled(), QuestionBlind()], ids=str)
def test_no_attention_is_a_refusal(selector: Selector) -> None:
    with pytest.raises(CannotFill, match="no layer below the split has attention"):
        selector.scores(prompt_of())


def test_a_longer_tail_is_the_last_rows() -> None:
    assert choose(prompt_of(), [LongerTail(0.34)]).tolist() == [[6, 7, 8]] * BATCH


# ---------------------------------------------------------------- random rows


def test_random_rows_are_those_of_their_positions() -> None:
    whole = Random(seed=5).scores(prompt_of(rows=50, prefix=40))
    later = Random(seed=5).scores(prompt_of(rows=50, prefix=40, first=13))
    assert torch.equal(whole[:, 13:], later[:, :27])
    assert torch.equal(whole[0], whole[1])
    assert torch.equal(whole, Random(seed=5).scores(prompt_of(rows=50, prefix=40)))
    assert not torch.equal(whole, Random(seed=6).scores(prompt_of(rows=50, prefix=40)))


@pytest.mark.parametrize("seed", [0, 1, 2**40, -3])
def test_random_rows_are_spread_evenly(seed: int) -> None:
    rows = choose(prompt_of(batch=1, rows=10_001, prefix=10_000), [Random(0.1, seed)])[0]
    assert len(rows) == 1000
    assert all(60 <= part <= 140 for part in torch.bincount(rows // 1000, minlength=10).tolist())
    assert all(60 <= part <= 140 for part in torch.bincount(rows % 10, minlength=10).tolist())


# ---------------------------------------------------------------- choosing


@dataclass(frozen=True)
class Given:
    """Scores as they are."""

    values: Tensor
    share: float = 0.1

    def scores(self, prompt: Prompt) -> Tensor:
        return self.values.expand(prompt.batch, -1)


def chosen_by_loops(prompt: Prompt, selectors: list[Any]) -> list[list[int]]:
    """Of each sequence: the best of those that are left, the lower of equals, padding after all else."""
    found = []
    for sequence in range(prompt.batch):
        taken: list[int] = []
        for number, selector in enumerate(selectors):
            scores = selector.scores(prompt)[sequence].double().tolist()
            padded = [False] * prompt.prefix if prompt.valid is None else (~prompt.valid[sequence]).tolist()
            left = [row for row in range(prompt.prefix) if row not in taken]
            worst = [-1e299 if math.isnan(score) or score == -math.inf else score for score in scores]
            rank = [(padded[row], 0.0 if padded[row] else -worst[row]) for row in range(prompt.prefix)]
            left.sort(key=lambda row, rank=rank: (rank[row], row))  # type: ignore[misc]
            until = sum(each.share for each in selectors[: number + 1])
            taken += left[: math.floor(until * prompt.prefix + 0.5 + 1e-9) - len(taken)]
        found.append(sorted(taken))
    return found


@st.composite
def choices(draw: st.DrawFn) -> tuple[Prompt, list[Any]]:
    """Prompts with padding, and selectors whose scores tie, are none or infinite."""
    batch, rows = draw(st.integers(1, 3)), draw(st.integers(2, 20))
    prefix = draw(st.integers(1, rows - 1))
    valid = draw(st.none() | st.lists(st.integers(0, rows - 1), min_size=batch, max_size=batch))
    mask = None if valid is None else torch.arange(rows) >= torch.tensor(valid).unsqueeze(1)
    score = st.sampled_from([0.0, 1.0, 2.0, -5.0, math.nan, -math.inf, 1e30])
    selectors = [
        Given(torch.tensor(draw(st.lists(score, min_size=prefix, max_size=prefix))), share)
        for share in draw(st.sampled_from([(0.5,), (1.0,), (0.5, 0.5), (0.1, 0.3), (0.25, 0.25, 0.25, 0.25)]))
    ]
    return Prompt(batch, rows, prefix, torch.device("cpu"), valid=mask), selectors


@given(choices())
def test_the_best_rows_are_kept(case: tuple[Prompt, list[Any]]) -> None:
    """Ascending, each once, ties to the lower row, padding last."""
    prompt, selectors = case
    found = choose(prompt, selectors)
    assert found.dtype == torch.int64
    assert found.tolist() == chosen_by_loops(prompt, selectors)
    assert all(len(set(rows)) == len(rows) for rows in found.tolist())


def test_padding_is_kept_only_where_nothing_else_is_left() -> None:
    """Not even before rows that a selector gives no score at all."""
    valid = torch.arange(ROWS) >= torch.tensor([[4], [0]])
    given = prompt_of(valid=valid)
    nothing = Given(torch.full((PREFIX,), -math.inf), 0.5)
    assert choose(given, [nothing]).tolist() == [[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]]
    assert choose(given, [replace(nothing, share=1.0)]).tolist() == [list(range(PREFIX))] * BATCH


def test_each_selector_takes_its_own_of_what_is_left() -> None:
    given = prompt_of(batch=1, rows=101, prefix=100)
    first, second = Given(torch.arange(100.0), 0.1), Given(torch.arange(100.0) // 50, 0.05)
    assert choose(given, [first, second]).tolist() == [[*range(50, 55), *range(90, 100)]]
    assert choose(given, [second, first]).tolist() == [[*range(50, 55), *range(90, 100)]]
    assert choose(given, [first, first]).tolist() == [list(range(80, 100))]


def test_equal_scores_in_any_precision_are_a_tie() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        assert choose(prompt_of(), [Given(torch.ones(PREFIX, dtype=dtype), 0.34)]).tolist() == [[0, 1, 2]] * BATCH


@pytest.mark.parametrize(
    ("share", "prefix", "count"),
    [(0.1, 100, 10), (0.1, 104, 10), (0.1, 105, 11), (0.05, 10, 1), (0.05, 9, 0), (1, 7, 7), (1.0, 7, 7),
     (0.3, 5, 2), (1 / 3, 9, 3), (0.15, 10, 2), (0.1 + 0.2, 10, 3), (0.0001, 5000, 1)],
)  # fmt: skip
def test_counts_are_rounded_half_up(share: float, prefix: int, count: int) -> None:
    assert count_of(share, prefix) == count
    mode = fake_mode()
    rows = fake(mode, torch.empty(prefix + 3), "x", [0]).shape[0]
    symbolic: Any = count_of(share, rows - 3)
    assert isinstance(symbolic, torch.SymInt) or share == 1
    assert int(symbolic.node.hint) == count
    assert mode.shape_env is not None
    assert not mode.shape_env.guards


# ---------------------------------------------------------------- what is written


def test_text_names_selectors() -> None:
    assert parse_rows(None) == ()
    assert parse_rows("pooled") == (Pooled(0.1),)
    assert parse_rows(0.05) == (Pooled(0.05),)
    assert parse_rows("pooled:0.05+attention:0.2") == (Pooled(0.05), Attention(0.2))
    assert parse_rows(" mixed:0.1 + random:0.05:7 ") == (Pooled(0.05), Attention(0.05), Random(0.05, 7))
    assert parse_rows("question_blind:1e-2+tail:.5") == (QuestionBlind(0.01), LongerTail(0.5))
    assert parse_rows(Random(0.2)) == (Random(0.2),)
    assert parse_rows([Random(0.2), Pooled()]) == (Random(0.2), Pooled())
    assert parse_rows("random:0.5+tail:0.5") == (Random(0.5), LongerTail(0.5))
    for name in SELECTORS:
        assert sum(each.share for each in parse_rows(f"{name}:0.2")) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("poled:0.1", r"'poled:0.1' is no selector such as 'pooled:0.1'; known: attention, .*random"),
        ("", "'' is no selector"),
        ("pooled:0.1+", "'' is no selector"),
        ("pooled:0.1:2", "'pooled:0.1:2' is no selector"),
        ("random:0.1:2:3", "'random:0.1:2:3' is no selector"),
        ("pooled:few", "'pooled:few' needs a share such as 0.1 after the colon"),
        ("pooled:", "'pooled:' needs a share"),
        ("random:0.1:x", "'random:0.1:x' needs a share"),
        ("pooled:0", r"a share is above 0 and at most 1, not 0\.0"),
        ("pooled:2", r"a share is above 0 and at most 1, not 2\.0"),
        ("pooled:-0.1", r"a share is above 0 and at most 1, not -0\.1"),
        ("pooled:nan", "a share is above 0 and at most 1, not nan"),
        ("pooled:inf", "a share is above 0 and at most 1, not inf"),
        ("pooled:0.6+random:0.6", "the shares of 'pooled:0.6.random:0.6' add up to more than 1"),
        (Random("half"), "a share is above 0 and at most 1, not 'half'"),  # type: ignore[arg-type]
        (Random(True), "a share is above 0 and at most 1, not True"),
        (True, "must be text or selectors, not True"),
        (1.5, r"a share is above 0 and at most 1, not 1\.5"),
        (["pooled:0.1"], "must be text or selectors, not 'pooled:0.1'"),
        ([Random(), None], "must be text or selectors, not None"),
        ([Random(0.7), Pooled(0.7)], "add up to more than 1"),
    ],
)
def test_what_is_wrong_is_named(rows: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse_rows(rows)


# ---------------------------------------------------------------- one of one's own


@dataclass(frozen=True)
class EverySoOften:
    """The example of the module."""

    share: float = 0.25

    def scores(self, prompt: Prompt) -> Tensor:
        row = torch.arange(prompt.prefix, device=prompt.device)
        return (row % 4 == 0).float().expand(prompt.batch, -1)


def test_a_selector_of_ones_own() -> None:
    model = plain()
    with torch.no_grad():
        exact = model(prompt(), logits_to_keep=2)
    filled = {
        name: compiled(model, IDENTITY | {"strict": True, "rows": rows})(prompt(), logits_to_keep=2)
        for name, rows in {"own": EverySoOften(), "again": [EverySoOften()], "other": "random:0.25"}.items()
    }
    assert all(graph.filled for graph in report(model).graphs)
    assert distance(filled["own"], filled["again"]) == 0.0
    assert distance(filled["own"], filled["other"]) > 1e-3
    whole = compiled(model, IDENTITY | {"strict": True, "rows": EverySoOften(1.0)})(prompt(), logits_to_keep=2)
    assert distance(whole, exact) < 1e-5


class ReadsOnTheHost(EverySoOften):
    def scores(self, prompt: Prompt) -> Tensor:
        assert prompt.ids is not None
        return torch.zeros(prompt.batch, prompt.prefix) + int(prompt.ids[0, 0])


class MakesData(EverySoOften):
    def scores(self, prompt: Prompt) -> Tensor:
        return torch.tensor([float(row) for row in range(prompt.prefix)]).expand(prompt.batch, -1)


@pytest.mark.parametrize("selector", [ReadsOnTheHost(), MakesData()], ids=lambda selector: type(selector).__name__)
def test_a_selector_that_is_not_of_the_graph_is_refused(selector: Selector) -> None:
    with pytest.raises(CannotFill):
        compiled(plain(), IDENTITY | {"strict": True, "rows": selector})(prompt(), logits_to_keep=2)


# ---------------------------------------------------------------- where a sequence begins


def sees(begin: int, keys: int = ROWS, *, padding_sees: bool = False, window: int = ROWS) -> Tensor:
    """[1, 1, ROWS, keys]: a prompt's rows see each other, and padding in front of them is seen by none but padding."""
    row, key = torch.arange(ROWS).unsqueeze(1), torch.arange(keys)
    mask = (key <= row) & (key >= begin) & (key > row - window)
    if padding_sees:
        mask = mask | (row < begin)
    return mask[None, None]


class TestRealRows:
    """Against where padding was put."""

    @pytest.mark.parametrize("begin", [0, 1, 4])
    @pytest.mark.parametrize("padding_sees", [False, True], ids=["padding sees nothing", "padding sees all"])
    @pytest.mark.parametrize("window", [2, ROWS])
    @pytest.mark.parametrize("kind", ["boolean", "float", "-1e9", "-1e4", "weights", "of heads", "rank 2"])
    def test_masks(self, begin: int, padding_sees: bool, window: int, kind: str) -> None:
        mask = sees(begin, padding_sees=padding_sees, window=window)
        given: dict[str, Any] = {"mask": mask}
        if kind == "float":
            given = {"mask": additive(mask)}
        elif kind.startswith("-"):
            given = {"mask": torch.where(mask, 0.0, float(kind))}
        elif kind == "weights":
            given = {"weights_of": additive(mask).softmax(-1)}
        elif kind == "of heads":
            given = {"mask": torch.cat([torch.zeros_like(mask), mask], 1)}
        elif kind == "rank 2":
            given = {"mask": mask[0, 0]}
        found = real_rows([layer(), layer(causal=False, **given)], ROWS)
        assert found is not None
        assert found.tolist() == [[row >= begin for row in range(ROWS)]]

    def test_each_sequence_by_itself(self) -> None:
        found = real_rows([layer(causal=False, mask=torch.cat([sees(5), sees(0)]))], ROWS)
        assert found is not None
        assert found.sum(1).tolist() == [ROWS - 5, ROWS]

    def test_a_mask_of_keys(self) -> None:
        found = real_rows([layer(mask=sees(3)[:, :, -1:])], ROWS)
        assert found is not None
        assert found.sum(1).tolist() == [ROWS - 3]

    def test_padding_behind_is_not_told(self) -> None:
        mask = sees(0)
        mask[..., ROWS - 4 :] = False
        found = real_rows([layer(causal=False, mask=mask)], ROWS)
        assert found is not None
        assert found.all()

    def test_keys_elsewhere(self) -> None:
        """Behind rows of a former turn, and scattered over a static cache."""
        behind = torch.nn.functional.pad(sees(4), (OLD, 0))
        scattered = torch.zeros(1, 1, ROWS, ROWS + 4, dtype=torch.bool)
        scattered[..., POSITIONS] = sees(4)
        for mask, columns in ((behind, "last"), (scattered, POSITIONS)):
            found = real_rows([layer(keys=mask.shape[-1], causal=False, mask=mask, columns=columns)], ROWS)
            assert found is not None
            assert found.sum(1).tolist() == [ROWS - 4]

    def test_chunks_of_one_layer_do_not_begin_a_sequence(self) -> None:
        row = torch.arange(ROWS)
        chunked = sees(2) & (row.unsqueeze(1) // 6 == row // 6)
        found = real_rows([layer(causal=False, mask=chunked), layer(causal=False, mask=sees(2))], ROWS)
        assert found is not None
        assert found.sum(1).tolist() == [ROWS - 2]

    def test_rows_that_an_index_lets_see_others_than_the_one_before(self) -> None:
        mask = sees(3)
        mask[..., 6, 5] = mask[..., 11, 8:] = False
        found = real_rows([layer(causal=False, mask=mask)], ROWS)
        assert found is not None
        assert found.sum(1).tolist() == [ROWS - 3]

    @pytest.mark.parametrize("kind", ["bool", "-1e9", "finfo"])
    def test_padding_behind_that_sees_itself_or_nothing(self, kind: str) -> None:
        """Rows that see but themselves, against NaN, or are hidden whole, do not begin a sequence."""
        mask = sees(2)
        mask[..., ROWS - 3, :] = mask[..., ROWS - 2 :, :] = False
        mask[..., ROWS - 1, ROWS - 1] = mask[..., ROWS - 2, ROWS - 2] = True
        if kind != "bool":
            mask = torch.where(mask, 0.0, -1e9 if kind == "-1e9" else torch.finfo(torch.float32).min)
        found = real_rows([layer(causal=False, mask=mask)], ROWS)
        assert found is not None
        assert found.sum(1).tolist() == [ROWS - 2]

    def test_a_mask_of_rows_alone(self) -> None:
        found = real_rows([layer(mask=torch.ones(1, 1, ROWS, 1, dtype=torch.bool))], ROWS)
        assert found is not None
        assert found.all()

    def test_nothing_is_hidden(self) -> None:
        assert real_rows([layer()], ROWS) is None
