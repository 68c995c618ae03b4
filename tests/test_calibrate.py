from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ridgefill_compile import checkpoint as checkpoints
from ridgefill_compile.calibrate import HELD_OUT_ROWS, calibrate
from ridgefill_compile.errors import CalibrationError, OptionError, RidgefillError
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.ridge import DEFAULT_PENALTIES, RidgeSolver, RidgeStatistics
from tests import decoders
from tests.test_fingerprint import Characters

LAYERS, WIDTH, TOKENS, WINDOW, STRIDE = 5, 12, 128, 32, 4


class Block(nn.Module):
    """A residual block that sees earlier rows; affine from layer 2 on where the world is linear."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Identity() if linear else nn.Tanh()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        seen = x if self.linear else x + x.cumsum(1) / count
        return x + self.act(self.mix(seen))


class Decoder(nn.Module):
    def __init__(self, linear_from: int = LAYERS, seed: int = 0, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Block(linear=index >= linear_from) for index in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return x


class HookCollector:
    """Collects by hooks what the compiled graph would; can spoil a layer's input from a given row on."""

    spoil: tuple[int, int, float] | None = None  # (token, layer, value): where that token stands
    calls: list[tuple[str, int]]

    def __init__(self, model: Decoder, splits: Any, stride: int, inner: str) -> None:
        self.model, self.splits, self.stride, self.inner = model, splits, stride, inner
        self.located = 0
        self.calls = []

    @property
    def layers(self) -> int:
        assert self.located, "asked before the first pass"
        return self.located

    def _inputs(self, ids: Tensor) -> dict[int, Tensor]:
        assert ids.ndim == 2
        assert ids.shape[0] == 1
        self.located = len(self.model.blocks)
        assert not self.model.training
        assert not torch.is_grad_enabled()
        inputs: dict[int, Tensor] = {}
        hooks = [
            block.register_forward_pre_hook(lambda _, args, layer=layer: inputs.update({layer: args[0][0]}))
            for layer, block in enumerate(self.model.blocks)
        ]
        self.model(ids)
        for hook in hooks:
            hook.remove()
        if self.spoil is not None:
            token, layer, value = self.spoil
            for late in range(layer, len(self.model.blocks)):
                inputs[late] = inputs[late].clone()
                inputs[late][ids[0] == token] = value
        return {layer: rows[:: self.stride] for layer, rows in inputs.items()}

    def sums(self, input_ids: Tensor) -> dict[int, RidgeStatistics]:
        self.calls.append(("sums", input_ids.shape[1]))
        rows = self._inputs(input_ids)
        return {
            split: RidgeStatistics.from_rows(split, rows[split], late_of(rows, split))
            for split in self.splits
            if split in rows
        }

    def rows(self, input_ids: Tensor) -> dict[int, Tensor]:
        self.calls.append(("rows", input_ids.shape[1]))
        return {layer: rows for layer, rows in self._inputs(input_ids).items() if layer >= min(self.splits)}


def late_of(rows: dict[int, Tensor], split: int) -> dict[int, Tensor]:
    return {layer: value for layer, value in rows.items() if layer > split}


def documents(count: int = 24, seed: int = 0, start: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(WINDOW // 4, 3 * WINDOW, (count,), generator=generator).tolist()
    return [torch.randint(0, TOKENS - 1, (length,), generator=generator) for length in lengths][start:]


def run(texts: Any = None, model: nn.Module | None = None, **options: Any) -> RidgeMaps:
    given: dict[str, Any] = {
        "splits": [1],
        "window": WINDOW,
        "stride": STRIDE,
        "progress": False,
        "_collector": HookCollector,
    }
    given |= options
    return calibrate(model or Decoder(), documents() if texts is None else texts, **given)


def sums_of(texts: list[Tensor], split: int, model: Decoder) -> RidgeStatistics:
    """All windows of all texts at once."""
    collector = HookCollector(model.eval(), [split], STRIDE, "eager")
    total: list[dict[int, Tensor]] = []
    with torch.no_grad():
        for ids in texts:
            for start in range(0, len(ids), WINDOW):
                window = ids[start : start + WINDOW]
                if len(window) >= WINDOW // 4:
                    total.append(collector.rows(window[None]))
    rows = {layer: torch.cat([part[layer] for part in total]) for layer in total[0]}
    return RidgeStatistics.from_rows(split, rows[split], late_of(rows, split))


def assert_same_maps(got: RidgeMaps, expected: RidgeMaps) -> None:
    assert got.splits == expected.splits
    for split in got.splits:
        one, other = got.at(split), expected.at(split)
        assert (one.penalty, one.rows, one.held_out) == (other.penalty, other.rows, other.held_out)
        for layer in one.layers:
            assert torch.equal(one.matrix(layer), other.matrix(layer))
            assert torch.equal(one.offset(layer), other.offset(layer))


class TestFit:
    def test_equals_the_solution_from_all_rows_at_once(self):
        maps = run(splits=[1, 3], dtype="float32")
        assert (maps.split, maps.splits, maps.layers, maps.at(3).layers) == (1, (1, 3), (2, 3, 4), (4,))
        for split in (1, 3):
            sums = sums_of(documents(start=5), split, Decoder())
            part = maps.at(split)
            assert part.rows == sums.rows
            for layer in part.layers:
                matrix, offset = RidgeSolver(sums).solve(layer, part.penalty)
                torch.testing.assert_close(part.matrix(layer), matrix.float(), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(part.offset(layer), offset.float(), rtol=1e-5, atol=1e-6)

    def test_first_split_given_is_the_default(self):
        assert run(splits=[3, 1]).split == 3
        assert run(splits=2).splits == (2,)

    def test_linear_world_is_predicted_exactly(self):
        """Where late layers are affine in the split state, the map is the model."""
        maps = run(model=Decoder(linear_from=2), splits=[2], dtype="float32", penalties=[0, 1e-9])
        for figures in maps.held_out.values():
            assert figures["cosine"] == pytest.approx(1, abs=1e-6)
            assert figures["relative_error"] < 1e-5
            assert figures["identity_cosine"] < 0.99
        bent = run(model=Decoder(), splits=[2], dtype="float32", penalties=[0, 1e-9])
        assert min(figures["relative_error"] for figures in bent.held_out.values()) > 1e-3

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_penalty_is_the_best_on_the_held_out_rows_as_stored(self, dtype):
        maps = run(dtype=dtype, held_out=3)
        sums = sums_of(documents(start=3), 1, Decoder())
        model = Decoder().eval()
        collector = HookCollector(model, [1], STRIDE, "eager")
        with torch.no_grad():
            windows = [w for ids in documents()[:3] for w in ids.split(WINDOW) if len(w) >= WINDOW // 4]
            parts = [collector.rows(window[None]) for window in windows]
        rows = {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}
        solver = RidgeSolver(sums)
        expected = {}
        for penalty in DEFAULT_PENALTIES:
            cosines = []
            for layer in (2, 3, 4):
                matrix, offset = (t.to(getattr(torch, dtype)).float() for t in solver.solve(layer, penalty))
                predicted = rows[1] @ matrix.T + offset
                cosines.append(torch.cosine_similarity(predicted, rows[layer], dim=1).mean().item())
            expected[penalty] = sum(cosines) / 3
        assert maps.penalty_cosines == pytest.approx(expected, abs=2e-6)
        assert maps.penalty == max(expected, key=lambda penalty: expected[penalty])
        mean = sum(figures["cosine"] for figures in maps.held_out.values()) / 3
        assert mean == pytest.approx(expected[maps.penalty], abs=2e-6)
        identity = torch.cosine_similarity(rows[1], rows[4], dim=1).mean().item()
        assert maps.held_out[4]["identity_cosine"] == pytest.approx(identity, abs=1e-6)

    def test_held_out_figures_are_of_the_stored_tensors(self):
        """In a linear world bfloat16 rounding is the whole error; scored before rounding, there were none."""
        stored = run(model=Decoder(linear_from=2), splits=[2], penalties=[1e-9])
        assert all(1e-4 < figures["relative_error"] < 2e-2 for figures in stored.held_out.values())

    def test_maps_know_where_they_come_from(self, tmp_path):
        maps = run(texts=[chr(60 + i) * 50 for i in range(8)], tokenizer=Characters())
        assert maps.layer_count == LAYERS
        assert maps.matches(Decoder().parameters()) == "same"
        assert maps.matches(Decoder(seed=1).parameters()) == "other weights"
        assert maps.calibration == {
            "window": WINDOW,
            "stride": STRIDE,
            "documents": 6,
            "held_out_documents": 2,
            "model": "Decoder",
        }
        maps.save(tmp_path)
        assert_same_maps(RidgeMaps.load(tmp_path, Decoder(), Characters()), maps)

    def test_training_mode_is_put_back(self):
        model = Decoder().train()
        model.blocks[2].eval()
        run(model=model)
        assert [module.training for module in (model, model.drop, model.blocks[1])] == [True] * 3
        assert not model.blocks[2].training
        with pytest.raises(CalibrationError):
            run([], model=model)
        assert model.drop.training

    def test_options_reach_the_collector(self):
        seen: dict[str, Any] = {}

        def factory(model: Decoder, splits: Any, **options: Any) -> HookCollector:
            seen.update(options, splits=splits)
            return HookCollector(model, splits, **options)

        run(splits=[1, 2], inner="aot_eager", _collector=factory)
        assert seen == {"splits": (1, 2), "stride": STRIDE, "inner": "aot_eager"}

    @pytest.mark.parametrize(("held_out", "stride"), [(1, 1), (3, 1), (3, 4)])
    def test_long_held_out_documents_cost_few_passes(self, held_out, stride):
        made = []

        def factory(*args: Any, **options: Any) -> HookCollector:
            made.append(HookCollector(*args, **options))
            return made[-1]

        long = [torch.randint(0, TOKENS - 1, (1500 * 16,)) for _ in range(held_out)]
        run([*long, *documents()], window=16, stride=stride, held_out=held_out, _collector=factory)
        taken = sum(length // stride for kind, length in made[0].calls if kind == "rows")
        assert HELD_OUT_ROWS // 2 <= taken <= HELD_OUT_ROWS


class TestCompiled:
    """The real collector, on a real decoder; the reference reads the hidden states that transformers returns."""

    def test_fits_what_the_model_computes(self):
        model = decoders.FILLED["llama"].build()
        lengths = (40, 64, 150, 96, 30, 64, 71)
        texts = [decoders.token_ids(rows, seed=rows)[0] for rows in lengths]
        maps = run(texts, model=model, splits=[1, 0], window=64, dtype="float32", _collector=None)
        total: list[tuple[Tensor, ...]] = []
        for ids in texts[1:]:
            for window in (piece for piece in ids.split(64) if len(piece) >= 16):
                with torch.no_grad():
                    states = model(window[None], output_hidden_states=True).hidden_states
                total.append(tuple(state[0, ::STRIDE] for state in states))
        rows = dict(enumerate(torch.cat(parts) for parts in zip(*total, strict=True)))
        del rows[decoders.LAYERS]  # what leaves the last layer
        assert (maps.split, maps.layers, maps.at(0).layers) == (1, (2, 3), (1, 2, 3))
        for split in (0, 1):
            solver = RidgeSolver(RidgeStatistics.from_rows(split, rows[split], late_of(rows, split)))
            part = maps.at(split)
            assert part.rows == len(rows[split])
            for layer in part.layers:
                matrix, offset = solver.solve(layer, part.penalty)
                torch.testing.assert_close(part.matrix(layer), matrix.float(), rtol=1e-3, atol=1e-4)
                torch.testing.assert_close(part.offset(layer), offset.float(), rtol=1e-3, atol=1e-4)

    def test_split_that_the_model_does_not_have(self):
        for split in (3, 4):
            with pytest.raises(RidgefillError, match=f"split.*{split}"):
                run(model=decoders.FILLED["llama"].build(), splits=[split], _collector=None)


class TestForms:
    def test_texts_batches_and_iterators_give_the_same_maps(self):
        texts = ["".join(chr(int(code)) for code in ids) for ids in documents(12)]
        expected = run(texts, tokenizer=Characters())
        padded = torch.zeros(12, 3 * WINDOW, dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, ids in enumerate(documents(12)):
            side = slice(None, len(ids)) if row % 2 else slice(3 * WINDOW - len(ids), None)
            padded[row, side], mask[row, side] = ids, 1
        batches = [{"input_ids": padded[i : i + 5], "attention_mask": mask[i : i + 5]} for i in (0, 5, 10)]
        for form in (iter(texts), (text for text in texts), documents(12), iter(documents(12)), batches):
            assert_same_maps(run(form, tokenizer=Characters()), expected)

    def test_progress_goes_to_stderr_only(self, capsys):
        run(progress=True)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "calibrating" in captured.err
        assert "24/24" in captured.err
        assert "rows/s" in captured.err
        assert "solving split 1" in captured.err
        run(progress=False)
        assert capsys.readouterr() == ("", "")
        run(iter(documents()), progress=True)
        assert "24/?" in capsys.readouterr().err


class Interrupted(Iterator[Tensor]):
    """Documents, and a Ctrl-C where the next one would be asked for."""

    def __init__(self, texts: list[Tensor], before: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.texts, self.before, self.error, self.at = texts, before, error, 0

    def __next__(self) -> Tensor:
        if self.at == self.before:
            raise self.error
        self.at += 1
        return self.texts[self.at - 1]


class TestResume:
    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    @pytest.mark.parametrize("before", [9, 13, 23])
    def test_interrupted_and_resumed_equals_uninterrupted(self, tmp_path, monkeypatch, before, error):
        """Bit for bit, in the sums too; and what was summed is not run again."""
        final: list[checkpoints.SumsSoFar] = []
        save = checkpoints.Checkpoint.save

        def record(self: checkpoints.Checkpoint, state: checkpoints.SumsSoFar) -> None:
            final.append(state)
            save(self, state)

        monkeypatch.setattr(checkpoints.Checkpoint, "save", record)
        expected = run(held_out=2, splits=[1, 2], checkpoint=tmp_path / "whole")
        with pytest.raises(error):
            run(Interrupted(documents(), before, error), held_out=2, splits=[1, 2], checkpoint=tmp_path / "c")
        assert (tmp_path / "c" / checkpoints.FILE).exists()
        made = []

        def factory(*args: Any, **options: Any) -> HookCollector:
            made.append(HookCollector(*args, **options))
            return made[-1]

        got = run(held_out=2, splits=[1, 2], checkpoint=tmp_path / "c", _collector=factory)
        assert_same_maps(got, expected)
        whole, resumed = final[21], final[-1]
        assert whole.documents == resumed.documents == 22
        for split in (1, 2):
            for name, tensor in whole.by_split[split].to_tensors().items():
                assert torch.equal(tensor, resumed.by_split[split].to_tensors()[name])
        rest = sum(-(-(len(ids) - WINDOW // 4 + 1) // WINDOW) for ids in documents()[before:])
        assert sum(kind == "sums" for kind, _ in made[0].calls) == rest
        assert not (tmp_path / "c").exists()
        assert not (tmp_path / "whole").exists()

    def test_killed_between_documents_any_number_of_times(self, tmp_path):
        expected = run(held_out=1)
        for before in range(5, 24, 3):
            with pytest.raises(KeyboardInterrupt):
                run(Interrupted(documents(), before), held_out=1, checkpoint=tmp_path / "c")
        assert_same_maps(run(held_out=1, checkpoint=tmp_path / "c"), expected)

    def test_interrupted_inside_a_document_loses_only_that_document(self, tmp_path):
        class Dies(HookCollector):
            def sums(self, input_ids: Tensor) -> dict[int, RidgeStatistics]:
                if len(self.calls) == 20:
                    raise KeyboardInterrupt
                return super().sums(input_ids)

        with pytest.raises(KeyboardInterrupt):
            run(held_out=1, checkpoint=tmp_path / "c", _collector=Dies)
        assert_same_maps(run(held_out=1, checkpoint=tmp_path / "c"), run(held_out=1))

    def test_finished_sums_need_no_further_pass(self, tmp_path, monkeypatch):
        """A crash while solving costs the solving only."""

        def out_of_memory(*args: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[calibrate.__module__], "fit_split", out_of_memory)
            with pytest.raises(MemoryError):
                run(checkpoint=tmp_path / "c")

        class NoSums(HookCollector):
            def sums(self, input_ids: Tensor) -> dict[int, RidgeStatistics]:
                raise AssertionError("summed again")

        assert_same_maps(run(checkpoint=tmp_path / "c", _collector=NoSums), run())

    @pytest.mark.parametrize(
        ("changed", "says"),
        [
            ({"splits": [1, 2]}, r"splits=\[1\], now splits=\[1, 2\]"),
            ({"window": 2 * WINDOW}, "window=32, now window=64"),
            ({"stride": 2}, "stride=4, now stride=2"),
            ({"held_out": 2}, "held_out_documents=1, now held_out_documents=2"),
            ({"model": Decoder(seed=1)}, "model="),
            ({"tokenizer": Characters()}, "tokenizer=None, now tokenizer="),
        ],
    )
    def test_other_settings_are_refused(self, tmp_path, changed, says):
        with pytest.raises(KeyboardInterrupt):
            run(Interrupted(documents(), 12), held_out=1, checkpoint=tmp_path)
        before = (tmp_path / checkpoints.FILE).read_bytes()
        with pytest.raises(CalibrationError, match=f"is of another calibration: .*{says}"):
            run(**{"held_out": 1, "checkpoint": tmp_path} | changed)
        assert (tmp_path / checkpoints.FILE).read_bytes() == before

    def test_other_penalties_dtype_and_inner_may_go_on(self, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            run(Interrupted(documents(), 12), held_out=1, checkpoint=tmp_path / "c")
        late: dict[str, Any] = {"held_out": 1, "penalties": [0.5], "dtype": "float32"}
        assert_same_maps(run(checkpoint=tmp_path / "c", inner="aot_eager", **late), run(**late))

    def test_other_texts_are_refused(self, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            run(Interrupted(documents(), 12), held_out=1, checkpoint=tmp_path)
        for place in (0, 5, 11):
            texts = documents()
            texts[place] = texts[place].flip(0)
            with pytest.raises(CalibrationError, match="the texts that it has summed are not the first of these"):
                run(texts, held_out=1, checkpoint=tmp_path)
        with pytest.raises(CalibrationError, match="are not the first of these"):
            run(documents()[:11], held_out=1, checkpoint=tmp_path)
        texts = documents()
        texts[12] = texts[12].flip(0)  # not summed yet
        run(texts, held_out=1, checkpoint=tmp_path)

    def test_damaged_checkpoint_is_refused(self, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            run(Interrupted(documents(), 12), held_out=1, checkpoint=tmp_path)
        path = tmp_path / checkpoints.FILE
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(CalibrationError, match="cannot be read"):
            run(held_out=1, checkpoint=tmp_path)


class TestMemory:
    def test_documents_are_let_go_and_sums_do_not_grow(self, tmp_path, monkeypatch):
        alive = 0
        most = 0
        sizes = []

        def died() -> None:
            nonlocal alive
            alive -= 1

        def lazily() -> Iterator[Tensor]:
            nonlocal alive
            for seed in range(100):
                array = np.random.default_rng(seed).integers(0, TOKENS - 1, WINDOW)
                weakref.finalize(array, died)
                alive += 1
                yield torch.from_numpy(array)
                del array

        save = checkpoints.Checkpoint.save

        def watch(self: checkpoints.Checkpoint, state: checkpoints.SumsSoFar) -> None:
            nonlocal most
            most = max(most, alive)
            save(self, state)
            sizes.append(self.path.stat().st_size)

        monkeypatch.setattr(checkpoints.Checkpoint, "save", watch)
        run(lazily(), held_out=2, checkpoint=tmp_path)
        assert len(sizes) == 98
        assert max(sizes) - min(sizes) <= 8  # the digits of a counter
        assert most <= 4 * 2 + 1  # what was read ahead to count, and the next one

    def test_reads_ahead_a_fixed_number_only(self):
        taken = 0
        at_first_pass = []

        class Watches(HookCollector):
            def rows(self, input_ids: Tensor) -> dict[int, Tensor]:
                at_first_pass.append(taken)
                return super().rows(input_ids)

        def counted() -> Iterator[Tensor]:
            nonlocal taken
            for ids in documents(60):
                taken += 1
                yield ids

        run(counted(), held_out=2, _collector=Watches)
        assert at_first_pass[0] == 8


class TestNotFinite:
    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_weight_is_named_before_anything_runs(self, poison, dtype):
        model = Decoder().to(dtype)
        with torch.no_grad():
            model.get_parameter("blocks.3.mix.bias")[4] = poison
        with pytest.raises(CalibrationError, match=r"parameter blocks\.3\.mix\.bias holds NaN or infinite values"):
            run(Interrupted(documents(), 0), model=model)

    def test_eight_bit_weights_can_be_checked(self):
        model = nn.Module()
        model.low = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
        model.whole = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        with pytest.raises(CalibrationError, match="no text"):
            calibrate(model, [], splits=1)
        model.low.data = torch.tensor([1, math.nan]).to(torch.float8_e4m3fn)
        with pytest.raises(CalibrationError, match="parameter low"):
            calibrate(model, [], splits=1)

    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    @pytest.mark.parametrize("layer", [1, 3])
    def test_activation_names_layer_and_document_and_keeps_nothing_of_it(self, tmp_path, poison, layer):
        texts = documents()
        texts[14] = torch.cat([torch.zeros(WINDOW, dtype=torch.int64), texts[14]])
        texts[14][WINDOW + 4] = TOKENS - 1

        class Spoilt(HookCollector):
            spoil = (TOKENS - 1, layer, poison)

        with pytest.raises(
            CalibrationError,
            match=rf"input of layer {layer} is NaN or infinite on document 14 .*rows {WINDOW} to",
        ):
            run(texts, splits=[2, 1], held_out=1, checkpoint=tmp_path, _collector=Spoilt)
        # The checkpoint is of the documents before, and a run on repaired text goes on from it.
        texts[14][WINDOW + 4] = 0
        expected = run(texts, splits=[2, 1], held_out=1)
        assert_same_maps(run(texts, splits=[2, 1], held_out=1, checkpoint=tmp_path), expected)

    def test_held_out_document_is_named_before_the_long_pass(self, tmp_path):
        texts = documents()
        texts[1] = torch.zeros(3 * WINDOW, dtype=torch.int64)
        texts[1][2 * WINDOW + 4] = TOKENS - 1

        class Spoilt(HookCollector):
            spoil = (TOKENS - 1, 2, float("nan"))

            def sums(self, input_ids: Tensor) -> dict[int, RidgeStatistics]:
                raise AssertionError("summed before the held-out documents were checked")

        with pytest.raises(CalibrationError, match=r"input of layer 2 .* on document 1 .* rows 64 to 95"):
            run(texts, held_out=2, checkpoint=tmp_path, _collector=Spoilt)
        assert not list(tmp_path.iterdir())


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"splits": []}, "splits"),
            ({"splits": [1, 1]}, "splits"),
            ({"splits": [-1]}, "splits must be whole numbers of at least 0, not -1"),
            ({"splits": [1.5]}, "splits"),
            ({"splits": True}, "splits"),
            (
                {"splits": [LAYERS - 1]},
                "split 4 leaves no layer to fit: the model has 5 layers, so .* 0 to 3",
            ),
            ({"splits": [1, 99]}, "split 99 leaves no layer"),
            ({"window": 15}, "window must be whole numbers of at least 16"),
            ({"window": "2048"}, "window"),
            ({"stride": 0}, "stride"),
            ({"stride": 9}, "stride 9 must not exceed a quarter of the window, 32"),
            ({"held_out": 0}, "held_out"),
            ({"penalties": []}, "penalties"),
            ({"penalties": [0.1, -1]}, "penalties"),
            ({"penalties": [math.nan]}, "penalties"),
            ({"dtype": "int4"}, "dtype must be one of 'bfloat16', 'float32', 'int8', not 'int4'"),
            ({"texts": "one text"}, "put it in a list"),
            ({"texts": ["text"] * 8}, "need a tokenizer"),
            ({"texts": ["text" * 9] * 8, "tokenizer": object()}, "cannot be used as a tokenizer"),
        ],
    )
    def test_bad_argument_is_named(self, options, says):
        with pytest.raises(OptionError, match=says):
            run(**options)

    def test_split_zero_is_fine(self):
        assert run(splits=[0]).layers == (1, 2, 3, 4)

    @pytest.mark.parametrize("texts", [[], iter(()), [torch.empty(0, 5, dtype=torch.int64)]])
    def test_no_text(self, texts):
        with pytest.raises(CalibrationError, match="no text"):
            run(texts)

    def test_text_too_short(self):
        with pytest.raises(CalibrationError, match="longest document has 7 rows, and a window of 32 wants at least 8"):
            run(["a" * 7, "b" * 3], tokenizer=Characters())

    def test_checkpoint_path_that_is_a_file(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OptionError, match="checkpoint"):
            run(checkpoint=tmp_path / "file")
        assert Path(tmp_path / "file").read_text() == ""
