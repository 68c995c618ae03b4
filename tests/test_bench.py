"""The parts of the benches that are not timing."""

import pytest
import torch

from bench import maps_memory, needles, prefill, quality, selected_rows
from ridgefill_compile.errors import OptionError
from ridgefill_compile.evaluate.arms import score_window
from ridgefill_compile.evaluate.kept import Kept
from ridgefill_compile.evaluate.measures import TokenScores
from ridgefill_compile.evaluate.needles import needles as hidden
from ridgefill_compile.evaluate.shapes import made_up_maps
from ridgefill_compile.evaluate.texts import Window
from ridgefill_compile.maps import RidgeMaps
from tests.evaluate.tiny import LAYERS, WIDTH, tiny_maps, tiny_model, tiny_tokenizer


def test_made_up_maps_fit_the_model_and_are_near_the_identity():
    maps = made_up_maps(tiny_model(), 1)
    assert maps.layers == tuple(range(2, LAYERS))
    assert maps.matrix(2).shape == (WIDTH, WIDTH)
    assert float((maps.matrix(2).float() - torch.eye(WIDTH)).abs().max()) < 0.1


def test_the_other_length_is_filled_too():
    (other,) = prefill.other_lengths(4096, 512)
    assert 512 < other < 4096


def test_peak_memory_is_at_least_what_was_held_before():
    found = prefill.peak_memory(
        tiny_model(),
        torch.randint(0, 64, (1, 96)),
        {"maps": tiny_maps(), "tail": 16, "min_fill": 8, "inner": "eager"},
        (),
        "filled",
    )
    assert 0 < found["before"] <= found["peak"]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_maps_in_memory_are_the_same_maps(tmp_path, dtype):
    made_up_maps(tiny_model(), 1).to(dtype).save(tmp_path)
    mapped = RidgeMaps.load(tmp_path)
    copied = maps_memory.in_memory(mapped)
    for layer in mapped.layers:
        assert torch.equal(copied.matrix(layer), mapped.matrix(layer))
        assert torch.equal(copied.offset(layer), mapped.offset(layer))
    assert copied.dtype == mapped.dtype


def test_scores_are_kept_for_what_they_depend_on(monkeypatch, tmp_path):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path))
    windows = [Window("a", "prose", torch.arange(9)[None])]
    kept = quality.Kept(tiny_maps(), windows, 16, 8, "digest")
    assert kept.get(2, 0) is None
    scores = TokenScores(
        novel=torch.ones(3, dtype=torch.bool), delta_nll=torch.rand(3), kl=torch.rand(3), agree=torch.ones(3).bool()
    )
    kept.put(2, 0, {"ridge": scores})
    again = quality.Kept(tiny_maps(), windows, 16, 8, "digest").get(2, 0)
    assert again is not None
    assert torch.equal(again["ridge"].delta_nll, scores.delta_nll)
    others = [
        quality.Kept(tiny_maps(scale=0.1), windows, 16, 8, "digest"),
        quality.Kept(tiny_maps(), windows, 17, 8, "digest"),
        quality.Kept(tiny_maps(), [Window("a", "prose", torch.arange(8)[None])], 16, 8, "digest"),
    ]
    assert [other.get(2, 0) for other in others] == [None] * 3


@pytest.mark.heavy
def test_an_interrupted_run_goes_on_where_it_stopped(monkeypatch, tmp_path):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path))
    model, maps = tiny_model(), [tiny_maps(1), tiny_maps(2)]
    windows = [Window(str(n), "prose", torch.randint(0, 64, (1, 321))) for n in range(2)]
    scored = []

    def counted(model, arms, ids, count):
        scored.append({split for split, _ in arms})
        if len(scored) == 2:
            raise KeyboardInterrupt
        return score_window(model, arms, ids, count)

    monkeypatch.setattr(quality, "score_window", counted)
    kept = quality.Kept(maps[0], windows, 32, 16, "digest")
    with pytest.raises(KeyboardInterrupt):
        quality.score_splits(model, maps, windows, 32, 16, kept)
    scores = quality.score_splits(model, maps, windows, 32, 16, kept)
    assert scored == [{1, 2}] * 3
    assert scores.keys() == {(split, arm) for split in (1, 2) for arm in ("none", "identity", "ridge")}
    assert all(len(each) == 2 for each in scores.values())


@pytest.mark.parametrize("bench", [prefill.show, quality.show])
def test_results_are_shown(bench, capsys):
    arm = {name: [0.1, 0.0, 0.2] for name in ("delta_nll", "top1_agreement", "kl_mean", "kl_median")}
    figures = {
        "machine": "a machine",
        "dtype": "float32",
        "dynamic": False,
        "select": "pooled:0.1",
        "first_rows": 4,
        "maps_dtype": "int8",
        "rows": 4096,
        "tail": 512,
        "split": 15,
        "runs": 5,
        "ttft_exact_s": 10.0,
        "ttft_filled_s": 6.0,
        "speedup": 1.667,
        "ceiling_multiply_adds": 1.7,
        "ceiling_layer_passes": 1.8,
        "share_of_ceiling": 0.98,
        "compile_exact_s": 45.0,
        "compile_filled_s": 50.0,
        "peak_memory_bytes": {"exact": {"peak": 2**30}, "filled": {"peak": 2**30}},
        "model": "tiny",
        "windows": ["a"],
        "splits": {"15": {"ridge": {**arm, "novel": 3, "scored": 4}}},
    }
    bench(figures)
    shown = capsys.readouterr().out
    assert "1.667x" in shown or "0.100 [0.000, 0.200]" in shown


def test_answers_are_asked_for_once(monkeypatch, tmp_path, capsys):
    tokenizer, steps = tiny_tokenizer(digits=True), []
    windows = [Window(str(n), "prose", torch.randint(2, 40, (1, 330))) for n in range(2)]
    asking = needles.Asking(
        tiny_model(), tokenizer, hidden(tokenizer, windows, 48), 48, Kept(tmp_path), lambda: steps.append(1)
    )
    arms = needles.chosen(["ridge", "tail:0.1", "attention:0.2"])
    exact = asking.exact()
    figures = asking.at_split(tiny_maps(), arms, exact)
    assert len(steps) == 2 * (1 + 1 + 3)
    assert figures.keys() == arms.keys()
    assert "needle_rows" not in figures["ridge"]
    for arm in ("tail:0.1", "attention:0.2"):
        assert 0 <= figures[arm]["needle_digit_rows"][0] <= 1
    monkeypatch.setattr(needles, "say", None)
    assert asking.at_split(tiny_maps(), arms, asking.exact()) == figures
    with pytest.raises(TypeError):
        asking.at_split(tiny_maps(scale=0.1), arms, exact)
    shown = {"model": "tiny", "rows": 330, "tail": 48, "exact": {**figures["ridge"]}, "splits": {"2": figures}}
    needles.show(shown)
    assert "attention:0.2" in capsys.readouterr().out


def test_an_arm_of_needles_is_a_name_or_rows():
    assert needles.chosen(None) == needles.ARMS
    assert needles.chosen(["ridge", "pooled:0.2"]) == {"ridge": {}, "pooled:0.2": {"rows": "pooled:0.2"}}
    with pytest.raises(OptionError, match="no selector"):
        needles.chosen(["rigde"])


def test_selected_rows_are_scored_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(selected_rows, "SCORED", 24)
    windows = [Window(str(n), "prose", torch.randint(0, 64, (1, 321))) for n in range(3)]
    arms = {name: selected_rows.ARMS[name] for name in ("ridge", "pooled", "random", "int8", "none_longer_tail")}
    maps = {2: (tiny_maps(2), tiny_maps(2))}
    arguments = (tiny_model(), maps, arms, windows, 32, 40, Kept(tmp_path))
    scores = selected_rows.score_arms(*arguments)
    assert scores.keys() == {(0, "cut"), *((2, arm) for arm in arms)}
    assert all(len(each) == 3 for each in scores.values())
    monkeypatch.setattr(selected_rows, "score_window", None)
    again = selected_rows.score_arms(*arguments)
    for key, each in scores.items():
        assert all(torch.equal(a.delta_nll, b.delta_nll) for a, b in zip(each, again[key], strict=True))
    found = {"2": selected_rows.figures(scores, 2, tuple(arms))}
    pooled = found["2"]["pooled"]["novel"]
    difference = found["2"]["random"]["novel"]["delta_nll"][0] - pooled["delta_nll"][0]
    assert pooled["minus_random"][0] == pytest.approx(-difference)
    assert "removed" not in found["2"]["ridge"]["novel"]
    shown = {"model": "tiny", "rows": 320, "tail": 32, "windows": ["a"], "scored": 24, "tokens": {"novel": 3}}
    selected_rows.show({**shown, "splits": found})
    assert "pooled" in capsys.readouterr().out


def test_the_context_is_cut_for_the_exact_model_alone():
    model, ids = tiny_model(), torch.randint(0, 64, (1, 100))
    cut = selected_rows.without_the_rest(model, 40)
    with torch.no_grad():
        logits = cut(input_ids=ids, logits_to_keep=3).logits
        torch.testing.assert_close(logits, model(ids[:, -40:], logits_to_keep=3).logits)
        assert not torch.allclose(logits, model(ids, logits_to_keep=3).logits, atol=1e-3)


def test_an_arm_of_selected_rows_goes_with_ridge():
    assert tuple(selected_rows.chosen(["tail"])) == ("ridge", "tail")
    assert selected_rows.chosen(None) == selected_rows.ARMS
    with pytest.raises(OptionError, match="no arm 'poled'"):
        selected_rows.chosen(["poled"])
