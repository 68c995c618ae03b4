"""States of late recurrences are corrected where the prefix ends: against loops, scans by hand, and the exact model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from ridgefill_compile import (
    CalibrationError,
    CannotFill,
    MapsError,
    OptionError,
    RidgefillWarning,
    calibrate,
    calibrate_states,
)
from ridgefill_compile.collect_states import TerminalStateCollector
from ridgefill_compile.maps import RidgeMaps, SplitMaps
from ridgefill_compile.passes.eliminate import eliminate
from ridgefill_compile.passes.emit import Emitter, fake_mode_of, inputs_of
from ridgefill_compile.passes.terminal_state import (
    correct_states,
    filled_of,
    filled_share,
    late_scans,
    rows_that_count,
)
from ridgefill_compile.pieces import prompt_length
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from ridgefill_compile.recurrences.tiles import TILE
from ridgefill_compile.report import report
from ridgefill_compile.testing.variants import Variants
from ridgefill_compile.zoo.calling import worst
from tests.decoders import RECURRENT, cache_of, token_ids
from tests.passes.graphs import named, traced
from tests.recurrences import test_delta_rule, test_linear_attention
from tests.recurrences.checks import Arguments, Case, close, doubled
from tests.toys import compiled, distance, random_maps

SPLIT, LATE, TAIL, STRENGTH = 1, 2, 16, 0.7
CALL: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
OPTIONS: dict[str, Any] = {"tail": TAIL, "min_fill": TILE, "inner": "eager", "strict": True, "verify": True}
CASES = {
    "gated delta rule": test_delta_rule.CASES["head-unit"],
    "decay a channel": test_delta_rule.CASES["channel-unit"],
    "linear attention": Case("linear_attention", test_linear_attention.drawer(2), test_linear_attention.loop),
}


def share_by_loop(g: Tensor, filled: Tensor, present: Tensor, former: tuple[Tensor, Tensor] | None) -> Tensor:
    """As the sums are defined, row by row."""
    total, held = torch.zeros_like(g[:, 0]), torch.zeros_like(g[:, 0])
    if former is not None:
        total, held = (each.reshape(-1, *[1] * (g.dim() - 2)).expand_as(total) for each in former)
    for t in range(g.shape[1]):
        of_row = [each[:, t].reshape(-1, *[1] * (g.dim() - 2)) for each in (present, filled)]
        total, held = g[:, t].exp() * total + of_row[0], g[:, t].exp() * held + of_row[1]
    return torch.where(total > 0, held / total, 0.0).clamp(0, 1)


class TestShare:
    @pytest.mark.parametrize("former", [None, ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]), ([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])])
    @pytest.mark.parametrize("channels", [(), (5,)])
    @pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 40.0])
    def test_is_what_a_loop_says(self, channels: tuple[int, ...], scale: float, former: Any) -> None:
        g = -scale * torch.rand(3, 90, 4, *channels, dtype=torch.float64)
        filled = (torch.rand(3, 90) < 0.6).double()
        present = torch.maximum(filled, (torch.rand(3, 90) < 0.6).double())
        filled[0], present[0] = 0.0, 0.0
        former = former and tuple(torch.tensor(each, dtype=torch.float64) for each in former)
        found = filled_share(g, filled, present, former)
        torch.testing.assert_close(found.double(), share_by_loop(g, filled, present, former), rtol=1e-5, atol=1e-6)

    def test_a_decay_to_nothing(self) -> None:
        g = torch.zeros(1, 6, 1)
        g[0, 3] = -torch.inf
        filled = torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0, 1.0]])
        found = filled_share(g, filled, torch.ones(1, 6), former=(torch.ones(1), torch.zeros(1)))
        torch.testing.assert_close(found, torch.tensor([[2 / 3]]))

    def test_of_filled_rows_alone_is_one(self) -> None:
        ones = torch.ones(2, 500)
        assert torch.equal(filled_share(-torch.rand(2, 500, 3), ones, ones, former=None), torch.ones(2, 3))

    @pytest.mark.parametrize("index", [torch.tensor([1, 3]), torch.tensor([[1, 3], [0, 2]])])
    def test_selected_rows_and_padding_are_not_filled(self, index: Tensor) -> None:
        mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 1, 1]])  # of two older keys and five rows
        filled, present = rows_that_count(torch.zeros(2, 5, 3), index, mask)
        assert present.tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
        second = [0, 0, 0, 0, 1] if index.dim() == 1 else [0, 0, 0, 1, 1]
        assert filled.tolist() == [[1, 0, 1, 0, 1], second]


    def test_of_rows_before_a_chunk_those_of_padding_do_not_count(self) -> None:
        """Behind a former turn of two keys: six rows of the prompt, before a chunk of three."""
        before, chunk = torch.tensor([1, 0, 1, 1, 1, 0]), torch.zeros(4, 3, 1)
        mask = torch.ones(4, 11, dtype=torch.int64)
        mask[1, :4], mask[2, :8] = 0, 0
        torch.testing.assert_close(filled_of(before, chunk, mask), torch.tensor([4 / 6, 3 / 4, 0.0, 4 / 6]))
        torch.testing.assert_close(filled_of(before, chunk, None), torch.tensor([4 / 6]))
        # Two are named where there is one; and a mask of the chunk alone.
        assert filled_of(torch.tensor([0, 1]), chunk, mask[3:, :4]).tolist() == [1.0]
        assert filled_of(before, chunk, mask[:, :3]).tolist() == pytest.approx([4 / 6])
        assert filled_of(None, chunk, mask) == 0.0


def drawn(case: Case, batch: int, rows: int, with_state: bool) -> Arguments:
    """Operands whose state lasts for some hundred rows."""
    given = case.draw(batch, rows, with_state, torch.float32)
    return given | {"g": 0.01 * given["g"]}


def of_rows(given: Arguments) -> dict[str, Tensor]:
    """The operands that have rows."""
    return {k: v for k, v in given.items() if isinstance(v, Tensor) and k != "initial_state"}


def values_of(given: Arguments, difference: Tensor) -> list[Tensor]:
    """What a graph of `in_two` is called with: operands with rows side by side (so their number is one symbol)."""
    packed = torch.cat([value.flatten(2) for value in of_rows(given).values()], -1)
    return [packed, *(v for k, v in given.items() if k == "initial_state" and v is not None), difference]


def in_two(case: Case, given: Arguments, tail: int, difference: Tensor, dynamic: bool = False) -> GraphModule:
    """Graph of the tail's outputs and the final state of a corrected scan; see `values_of`."""
    sizes = {name: value.shape[2:] for name, value in of_rows(given).items()}

    def run(packed: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        apart = packed.split([size.numel() for size in sizes.values()], -1)
        call = {name: part.unflatten(-1, size) for (name, size), part in zip(sizes.items(), apart, strict=True)}
        if given["initial_state"] is not None:
            call["initial_state"] = others[0]
        outputs, state = case.run(given | call)
        return outputs[:, -tail:], state

    module = traced(run, *values_of(given, difference), dynamic=[(0, 1)] if dynamic else [])
    (scan,) = named(module, case.recurrence.op)
    emit = Emitter(module.graph, fake_mode_of(module.graph))
    added = inputs_of(module.graph)[-1]
    correct_states(emit, {LATE: scan}, STRENGTH, tail, lambda layer, like: added)
    module.recompile()
    return module


def by_hand(case: Case, given: Arguments, tail: int, difference: Tensor) -> tuple[Tensor, Tensor]:
    """Two loops over rows, the second from the corrected state."""
    given = doubled(given)
    boundary = (given["key"].shape[1] - tail) // TILE * TILE
    parts: list[Arguments] = [
        {k: v[:, part] if isinstance(v, Tensor) and k != "initial_state" else v for k, v in given.items()}
        for part in (slice(boundary), slice(boundary, None))
    ]
    _, state = case.loop(parts[0])
    ones = torch.ones(parts[0]["g"].shape[:2])
    one_row = None if given["initial_state"] is None else (torch.ones(len(ones)), torch.zeros(len(ones)))
    share = share_by_loop(parts[0]["g"], ones, ones, one_row)
    while share.dim() < state.dim():
        share = share.unsqueeze(-1)
    outputs, state = case.loop(parts[1] | {"initial_state": state + STRENGTH * share * difference})
    return outputs[:, -tail:], state


@pytest.fixture(params=CASES, name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


class TestScan:
    @pytest.mark.parametrize("with_state", [False, True])
    @pytest.mark.parametrize(("rows", "tail"), [(144, 16), (150, 16), (207, 16), (200, 130)])
    def test_is_two_by_hand(self, case: Case, rows: int, tail: int, with_state: bool) -> None:
        given = drawn(case, 2, rows, with_state)
        difference = torch.randn(case.run(given)[1].shape[1:])
        module = in_two(case, given, tail, difference)
        expected = by_hand(case, given, tail, difference)
        for graph in (module, eliminate(module)):
            for found, wanted in zip(graph(*values_of(given, difference)), expected, strict=True):
                close(found, wanted)

    def test_one_graph_for_other_lengths(self, case: Case) -> None:
        given = drawn(case, 2, 150, True)
        difference = torch.randn(case.run(given)[1].shape[1:])
        narrowed = eliminate(in_two(case, given, TAIL, difference, dynamic=True))
        for rows in (144, 181, 300):
            given = drawn(case, 2, rows, True)
            expected = by_hand(case, given, TAIL, difference)
            for found, wanted in zip(narrowed(*values_of(given, difference)), expected, strict=True):
                close(found, wanted)

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_the_prefix_is_scanned_once_and_without_outputs(self, case: Case, dynamic: bool) -> None:
        given = drawn(case, 2, 150, False)
        difference = torch.randn(case.run(given)[1].shape[1:])
        narrowed = eliminate(in_two(case, given, TAIL, difference, dynamic))
        scans = named(narrowed, case.recurrence.op)
        assert [scan.args[0].meta["val"].shape[1] for scan in scans] == [0, TAIL]
        of_keys = [scan.args[1].meta["val"].shape[1] for scan in scans]
        assert all(isinstance(length, torch.SymInt) for length in of_keys) if dynamic else of_keys == [128, 22]

    def test_a_planted_difference_makes_the_tail_exact(self) -> None:
        """Other rows than the exact ones in the prefix, their mean difference being their own."""
        case, tail = CASES["gated delta rule"], 22
        exact, other = (drawn(case, 1, 150, False) for _ in range(2))
        filled = {
            k: torch.cat([other[k][:, :-tail], v[:, -tail:]], 1) if isinstance(v, Tensor) else v
            for k, v in exact.items()
        }
        prefixes = [
            case.run({k: v[:, :-tail] if isinstance(v, Tensor) else v for k, v in given.items()})[1]
            for given in (exact, filled)
        ]
        difference = (prefixes[0] - prefixes[1])[0] / STRENGTH
        found = eliminate(in_two(case, filled, tail, difference))(*values_of(filled, difference))
        outputs, state = case.run(exact)
        close(found[0], outputs[:, -tail:])
        close(found[1], state)
        assert (case.run(filled)[1] - state).abs().max() > 1e-2


def model() -> Any:
    """A model whose states last for some hundred rows."""
    built: Any = RECURRENT["qwen3_next"].build()
    for layer in built.model.layers:
        if hasattr(layer, "linear_attn"):
            torch.nn.init.constant_(layer.linear_attn.A_log, -5.0)
    return built


MAPS = random_maps(64, layers=4, splits=(SPLIT,))


def with_states(states: Tensor | None = None, maps: RidgeMaps = MAPS) -> RidgeMaps:
    return maps.with_state_differences({SPLIT: {LATE: torch.randn(4, 16, 16) if states is None else states}}, 13)


def fast(of: Any, maps: RidgeMaps, **options: Any) -> Any:
    torch._dynamo.reset()
    substitute_recurrences(of)
    return compiled(of, {**OPTIONS, "maps": maps, **options})


def late_state(output: Any) -> Tensor:
    cache: Any = cache_of(output)
    state: Tensor = cache.layers[LATE].recurrent_states[0]
    return state


class TestModels:
    def test_rows_are_eliminated(self) -> None:
        """Routed and eliminated graphs agree, with any rows; and multiply-adds are those without a correction."""
        of, maps = model(), with_states()
        for options, lengths in (({"rows": "random:0.25"}, (150,)), ({}, (171,))):
            for rows in lengths:
                runs = [
                    fast(of, maps, state_correction=1.0, eliminate=eliminated, **options)(
                        token_ids(rows, batch=2), **CALL
                    )
                    for eliminated in (False, True)
                ]
                assert distance(*runs) < 1e-5
                torch.testing.assert_close(*map(late_state, runs), rtol=1e-4, atol=1e-5)
        corrected = report(of).graphs[-1]
        fast(of, maps)(token_ids(171, batch=2), **CALL)
        plain = report(of).graphs[-1]
        assert corrected.multiply_adds_filled == plain.multiply_adds_filled
        assert corrected.corrected == ["states at the prefix's end: layers 2"]
        assert corrected.blocked == plain.blocked == []

    def test_off_the_graph_is_the_same(self, tmp_path: Any) -> None:
        of, ids = model(), token_ids(150)
        outputs = [
            fast(of, maps, dump=str(tmp_path / name), state_correction=0.0)(ids, **CALL)
            for name, maps in (("without", MAPS), ("off", with_states()))
        ]
        dumped = [next((tmp_path / name).glob("*/*eliminate.after.txt")).read_text() for name in ("without", "off")]
        graphs = [re.sub(r"id=\d+", "", text) for text in dumped]  # of regions, which are objects
        assert graphs[0] == graphs[1]
        assert distance(*outputs) == 0

    def test_no_difference_leaves_true_inputs_exact(self) -> None:
        of, ids = model(), token_ids(150, batch=2)
        maps = with_states(torch.zeros(4, 16, 16))
        found = fast(of, maps, route="oracle", state_correction=1.0)(ids, **CALL)
        with torch.no_grad():
            expected = of(ids, **CALL)
        assert distance(found, expected) < 1e-4
        torch.testing.assert_close(late_state(found), late_state(expected), rtol=1e-4, atol=1e-6)

    def test_a_padded_prompt_is_corrected_as_it_is_alone(self) -> None:
        """Left padding of a whole tile, of one sequence of two."""
        of, maps, alone = model(), with_states(), token_ids(144)
        both = torch.cat([torch.cat([torch.zeros(1, TILE, dtype=torch.int64), alone], 1), token_ids(144 + TILE)])
        mask = torch.ones_like(both)
        mask[0, :TILE] = 0
        expected = late_state(fast(of, maps, state_correction=1.0)(alone, **CALL))
        found = late_state(fast(of, maps, state_correction=1.0)(both, attention_mask=mask, **CALL))
        torch.testing.assert_close(found[:1], expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.heavy
    def test_a_second_turn_counts_the_first_as_one_row(self) -> None:
        """The state that a turn begins with has some weight, so a little less is added than in a first turn."""
        of, maps, ids = model(), with_states(torch.ones(4, 16, 16)), token_ids(170)
        added = []
        for first in (0, 20):
            states = []
            for strength in (0.0, 1.0):
                with torch.no_grad():
                    past = {"past_key_values": cache_of(of(ids[:, :first], **CALL))} if first else {}
                run = fast(of, maps, state_correction=strength)
                states.append(late_state(run(ids[:, 20:], **past, **CALL)))
            added.append((states[1] - states[0]).abs().sum().item())
        assert 0.5 < added[1] / added[0] < 1.0


class TestPieces:
    """A prompt in chunks: the state is corrected once, where the prefix ends."""

    ROWS = 2 * TILE + TAIL + 6
    MAPS = with_states(torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(3)))

    def in_pieces(self, of: Any, cuts: Sequence[int], **options: Any) -> Any:
        run, ids, at = fast(of, self.MAPS, **options), token_ids(self.ROWS), 0
        cache: dict[str, Any] = {}
        with prompt_length(self.ROWS):
            for rows in cuts:
                output = run(ids[:, at : at + rows], **CALL, **cache)
                cache, at = {"past_key_values": cache_of(output)}, at + rows
        return output

    @pytest.mark.parametrize(
        "cuts",
        [
            (TILE, TILE + TAIL + 6),
            pytest.param((100, TILE + TAIL - 30), marks=pytest.mark.heavy),
            pytest.param((2 * TILE, TAIL + 6), marks=pytest.mark.heavy),  # the last tile ends with the first chunk
            pytest.param((2 * TILE + 10, TAIL - 4), marks=pytest.mark.heavy),  # the tail begins in the first chunk
            pytest.param((TILE + 7, TILE - 7, TAIL + 6), marks=pytest.mark.heavy),
        ],
        ids=str,
    )
    def test_states_are_those_of_the_prompt_at_once(self, cuts: Sequence[int]) -> None:
        of = model()
        whole = fast(of, self.MAPS, state_correction=0.5)(token_ids(self.ROWS), **CALL)
        off = fast(of, self.MAPS)(token_ids(self.ROWS), **CALL)
        found = self.in_pieces(of, cuts, state_correction=0.5)
        close(late_state(found), late_state(whole))
        close(found.logits[:, -1], whole.logits[:, -1])
        assert worst([late_state(off)], [late_state(whole)]) > 1e-2

    @pytest.mark.heavy
    @pytest.mark.parametrize("cuts", [(100, TILE + TAIL - 30), (2 * TILE, TAIL + 6)], ids=str)
    def test_a_sequence_that_has_not_begun_has_no_state_to_correct(self, cuts: Sequence[int]) -> None:
        """Its prefix is padding alone."""
        of, ids = model(), token_ids(self.ROWS, batch=2)
        mask = torch.ones_like(ids)
        mask[0, : -TAIL + 4] = 0
        run, at = fast(of, self.MAPS, state_correction=0.5), 0
        cache: dict[str, Any] = {}
        with prompt_length(self.ROWS):
            for rows in cuts:
                at += rows
                output = run(ids[:, at - rows : at], attention_mask=mask[:, :at], **CALL, **cache)
                cache = {"past_key_values": cache_of(output)}
        whole = fast(of, self.MAPS, state_correction=0.5)(ids, attention_mask=mask, **CALL)
        close(late_state(output), late_state(whole))

    def test_a_state_that_no_filled_row_made_is_not_corrected(self) -> None:
        """A former turn's, which a turn begins with whose filled rows are too few for a tile."""
        of, ids = model(), token_ids(TAIL + 40)
        states = []
        for strength in (0.0, 0.5):
            with torch.no_grad():
                cache = cache_of(of(token_ids(50, seed=4), **CALL))
            run, at = fast(of, self.MAPS, state_correction=strength), 0
            with prompt_length(TAIL + 40):
                for rows in (50, TAIL - 10):
                    cache = cache_of(run(ids[:, at : at + rows], **CALL, past_key_values=cache))
                    at += rows
            states.append(late_state({"past_key_values": cache}))
        assert torch.equal(states[0], states[1])

    def test_a_padded_sequence_is_corrected_as_without_its_padding(self) -> None:
        """Where a chunk's first row is: by the share of its own earlier rows that is filled. Here half of them are."""
        of, states, padding = model(), [], TILE
        for strength, begins in ((0.0, padding), (0.5, padding), (0.5, 0)):
            ids = token_ids(2 * TILE + TAIL + 3)[:, padding - begins :]
            mask = torch.ones(2, ids.shape[1], dtype=torch.int64)
            mask[:, :begins] = 0
            run, at = fast(of, self.MAPS, state_correction=strength, first_rows=TILE // 2), 0
            cache: dict[str, Any] = {}
            with prompt_length(ids.shape[1]):
                for rows in (TILE + begins, TAIL + 3):
                    at += rows
                    call = {**CALL, **cache, "attention_mask": mask[:, :at]}
                    cache = {"past_key_values": cache_of(run(ids.expand(2, -1)[:, at - rows : at], **call))}
            states.append(late_state(cache))
        off, padded, alone = states
        close(padded, alone)
        assert worst([off], [padded]) > 1e-2

    @pytest.mark.heavy
    def test_filled_rows_behind_the_last_tile_may_come_before(self) -> None:
        """In a chunk of their own: their share is corrected, too."""
        of = model()
        whole = fast(of, self.MAPS, state_correction=0.5)(token_ids(self.ROWS), **CALL)
        off = fast(of, self.MAPS)(token_ids(self.ROWS), **CALL)
        found = self.in_pieces(of, (2 * TILE + 3, TAIL + 3), state_correction=0.5)
        left, missing = (worst([late_state(each)], [late_state(whole)]) for each in (found, off))
        assert left < missing / 4


class TestScans:
    @pytest.mark.parametrize(
        ("name", "found", "left"),
        [
            ("qwen3_next", [2], {}),
            ("mamba2", [2, 3], {}),
            ("jamba", [], {2: "the state of ridgefill.selective_scan is no matrix with logarithms of its decay"}),
        ],
    )
    def test_found_or_left_alone_by_name(self, name: str, found: list[int], left: dict[int, str]) -> None:
        variants = Variants(split=SPLIT, tail=TAIL, ways={}, verified=False)
        variants.run(RECURRENT[name].build(), {"input_ids": token_ids(80), **CALL})
        assert variants.located is not None
        scans = late_scans(variants.located, SPLIT)
        assert list(scans.found) == found
        assert scans.left_alone == left


class TestRefusals:
    def test_maps_without_states(self) -> None:
        with pytest.raises(MapsError, match=r"layer 2's state.*hold none: run ridgefill_compile.calibrate_states"):
            fast(model(), MAPS, state_correction=1.0)(token_ids(150), **CALL)

    def test_states_of_another_shape(self) -> None:
        maps = with_states(torch.zeros(4, 16, 8))
        with pytest.raises(CannotFill, match=r"layer 2 is \[4, 16, 8\], and the model's state \[4, 16, 16\]"):
            fast(model(), maps, state_correction=1.0)(token_ids(150), **CALL)

    @pytest.mark.parametrize(
        "state", [torch.zeros(4, 4), torch.zeros(4, 4, 4, dtype=torch.bfloat16), torch.zeros(1, 4, 4, 4)]
    )
    def test_tensors_of_another_kind(self, state: Tensor) -> None:
        with pytest.raises(MapsError, match="must be float32"):
            with_states(state)
        with pytest.raises(MapsError, match="must be float32"):
            MAPS.with_state_differences({SPLIT: {SPLIT: torch.zeros(1, 1, 1)}}, 13)

    def test_a_model_without_such_states(self) -> None:
        with pytest.raises(CalibrationError, match="no late layer has a recurrence"):
            calibrate_states(RECURRENT["mamba"].build(), random_maps(64, 4), texts(1, 0), window=128, progress=False)

    def test_no_text(self) -> None:
        with pytest.raises(CalibrationError, match="no text has a quarter of a window"):
            calibrate_states(model(), MAPS, [token_ids(15)[0]], window=64, progress=False)
        with pytest.raises(OptionError, match="tokenizer"):
            calibrate_states(model(), MAPS, ["a text"], progress=False)


def texts(count: int, seed: int) -> list[Tensor]:
    return [token_ids(128, seed=seed + each)[0] for each in range(count)]


class TestCalibration:
    @pytest.mark.heavy
    def test_the_mean_difference_brings_states_nearer(self) -> None:
        """On prompts that neither the maps nor the differences were calibrated on."""
        of = model()
        maps = calibrate(of, texts(12, 0), splits=[SPLIT], window=128, held_out=2, progress=False)
        calibrated = calibrate_states(of, maps, texts(16, 100), window=128, progress=False)
        difference = calibrated.state_difference(LATE)
        assert difference is not None
        assert calibrated.calibration["state_prompts"] == 16
        assert maps.state_difference(LATE) is None
        collector = TerminalStateCollector(of, maps)
        before, after = 0.0, 0.0
        for ids in texts(8, 200):
            found = collector.differences(ids[None])[SPLIT][LATE][0]
            before += found.square().sum().item()
            after += (found - difference).square().sum().item()
        assert after < before

    @pytest.mark.parametrize("first_rows", [pytest.param(0, marks=pytest.mark.heavy), 4])
    def test_differences_are_those_of_exact_and_filled_runs(self, first_rows: int) -> None:
        """The state that a fill leaves, plus the difference measured on its prefix, is the exact model's there."""
        of, ids = model(), token_ids(144)
        part = dataclasses.replace(MAPS._part(SPLIT), first_rows=first_rows)
        with pytest.warns(RidgefillWarning, match="means over 1 prompts"):
            maps = calibrate_states(
                of, RidgeMaps([part], layer_count=4), [ids[0, : 144 - TAIL]], window=128, progress=False
            )
        states = [late_state(fast(of, maps, state_correction=s)(ids, **CALL)) for s in (0.0, 1.0)]
        with torch.no_grad():
            exact = late_state(of(ids, **CALL))
        off, left = ((state - exact).norm() for state in states)
        assert left < off / 2  # what is left comes in by the convolution, which reads filled rows at the tail's start

    def test_saved_maps_hold_them(self, tmp_path: Any) -> None:
        maps = with_states().to("bfloat16")
        maps.save(tmp_path)
        loaded = RidgeMaps.load(tmp_path)
        expected = maps.state_difference(LATE)
        found = loaded.state_difference(LATE)
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)
        assert loaded.state_difference(3) is None
        assert loaded.nbytes == maps.nbytes == MAPS.to("bfloat16").nbytes + expected.nbytes
        record, parts = loaded._part(SPLIT).to_record(), loaded._part(SPLIT).to_tensors()
        with pytest.raises(MapsError, match="other layers, widths or dtype"):
            SplitMaps.from_record(record | {"states": {"2": [4, 16, 8]}}, parts)
