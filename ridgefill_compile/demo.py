"""`ridgefill demo`: on a real trained model and real text, what a fill gains and what it costs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ridgefill_compile.calibrate import calibrate
from ridgefill_compile.errors import OptionError
from ridgefill_compile.evaluate import answers, pictures
from ridgefill_compile.evaluate.arms import compare
from ridgefill_compile.evaluate.machine import machine, versions
from ridgefill_compile.evaluate.progress import progress
from ridgefill_compile.evaluate.speed import calls_of, compiled, filled_graph, measure_speed
from ridgefill_compile.evaluate.tables import arm_table
from ridgefill_compile.evaluate.texts import Texts, Window, long_prompt, split_texts
from ridgefill_compile.evaluate.trained import NAME, cache_folder, load_trained
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.report import report
from ridgefill_compile.splitmaps import INPUT


@dataclass(frozen=True)
class DemoSettings:
    """How much of everything. The defaults fit ten minutes on two cores the first time, four after that.

    Attributes:
        split, tail: of the fill; half of the model's 30 layers, and the rows that run all of them.
        rows: prompt rows of the timing.
        runs: timed runs of each model.
        calibration_windows, calibration_rows: text the maps are fitted on, a quarter of it or at most five
            windows only for choosing the penalty. More windows lower the loss a little.
        held_out_windows, held_out_rows: text the arms are compared on. Fewer and shorter than the timed prompt, since
            four arms run on each; `bench/quality.py` takes more and longer ones.
        scored: tokens scored at the end of each.
        question_rows, new_tokens: length of the prompts of the questions, and of their answers.
    """

    split: int = 15
    tail: int = 512
    rows: int = 4096
    runs: int = 2
    calibration_windows: int = 20
    calibration_rows: int = 2048
    held_out_windows: int = 5
    held_out_rows: int = 1536
    scored: int = 256
    question_rows: int = 2048
    new_tokens: int = 32

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise OptionError(f"{name} must be at least 1, not {value}")
        if self.scored > self.tail:
            raise OptionError(f"scored tokens ({self.scored}) must lie in the tail ({self.tail})")
        shortest = min(self.rows, self.held_out_rows, self.question_rows)
        if shortest <= self.tail:
            raise OptionError(f"a prompt of {shortest} rows has no prefix to fill before a tail of {self.tail}")


def run_demo(settings: DemoSettings, picture: Path) -> dict[str, Any]:
    """The whole demo: load, calibrate (kept for the next run), measure, ask, draw.

    Args:
        settings: how much of everything.
        picture: file to draw to.

    Returns:
        What `ridgefill demo --json` prints, plain values only.

    Raises:
        RidgefillError: the model is not installed, the machine has too little text, or the prompt was not
        filled.
    """
    started = time.perf_counter()
    model, tokenizer, digest = load_trained()
    with progress("reading text on this machine"):
        texts = split_texts()
        windows = texts.calibration(tokenizer, settings.calibration_rows, settings.calibration_windows)
    maps = demo_maps(model, tokenizer, digest, windows, settings.split)
    result = {"model": NAME, **demonstrate(model, tokenizer, maps, texts, settings)}
    result["picture"] = str(picture)
    pictures.draw(result, picture)
    result["total_s"] = time.perf_counter() - started
    return result


def demo_maps(
    model: Any,
    tokenizer: Any,
    digest: str,
    windows: Sequence[Window],
    *splits: int,
    by_length: bool = False,
    cut: str = INPUT,
) -> RidgeMaps:
    """Maps of the demo's model, calibrated once for each text and set of splits and kept in the cache folder.

    An interrupted calibration goes on where it stopped.
    """
    fit = ("rows by length" if by_length else "rows alike") + ("" if cut == INPUT else f", {cut}")
    key = hashlib.sha256(repr((digest, splits, versions(), model.dtype, fit)).encode())
    for window in windows:
        key.update(window.ids.numpy().tobytes())
    folder = cache_folder() / f"maps-{key.hexdigest()[:16]}"
    if not (folder / "manifest.json").exists():  # written last
        ids = [window.ids for window in windows]
        unfinished = f"{folder}.unfinished"
        given = {"tokenizer": tokenizer, "window": ids[0].shape[1], "by_length": by_length, "cut": cut}
        maps = calibrate(model, ids, splits=splits, **given, checkpoint=unfinished)
        maps.save(folder)
    return RidgeMaps.load(folder, model=model, tokenizer=tokenizer)


def demonstrate(
    model: Any, tokenizer: Any, maps: RidgeMaps, texts: Texts, settings: DemoSettings, inner: str = "inductor"
) -> dict[str, Any]:
    """Everything the demo says about a model and its maps.

    Args:
        model: a transformers model for causal language modelling.
        tokenizer: its tokenizer, with a chat template.
        maps: with maps for `settings.split`.
        texts: where prompts come from; only held-out ones are used.
        settings: how much of everything.
        inner: compiler of the filled model in the timing.
    """
    maps = maps.at(settings.split)
    options = {"maps": maps, "split": settings.split, "tail": settings.tail}
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": maps.layer_count,
        "penalty": maps.penalty,
        "settings": asdict(settings),
    }
    prompt = long_prompt(texts.held_out_in_turn(), tokenizer, settings.rows)
    with progress(f"first token of {settings.rows} rows, exact and filled", calls_of(settings.runs)) as step:
        timed = {**options, "inner": inner}
        result |= measure_speed(model, prompt, timed, runs=settings.runs, step=step).to_dict()
    windows = texts.held_out(tokenizer, settings.held_out_rows + 1, settings.held_out_windows)
    result |= quality(model, maps, windows, settings)
    return result | ask(model, tokenizer, options, texts, settings)


def quality(model: Any, maps: RidgeMaps, windows: Sequence[Window], settings: DemoSettings) -> dict[str, Any]:
    """What each arm loses on held-out windows of `[1, held_out_rows + 1]` tokens."""
    with progress("held-out text, exact and three arms", len(windows)) as step:
        figures = compare(model, maps, windows, settings.tail, settings.scored, step=step)
    return {
        "held_out_windows": len(windows),
        "held_out_rows": settings.held_out_rows,
        "novel_tokens": figures["ridge"].novel,
        "scored_tokens": figures["ridge"].scored,
        "delta_nll": {arm: each.delta_nll.value for arm, each in figures.items()},
        "delta_nll_interval": {arm: [each.delta_nll.low, each.delta_nll.high] for arm, each in figures.items()},
        "top1_agreement": figures["ridge"].top1_agreement.value,
        "arms": {arm: each.to_dict() for arm, each in figures.items()},
    }


def ask(model: Any, tokenizer: Any, options: dict[str, Any], texts: Texts, settings: DemoSettings) -> dict[str, Any]:
    """Two questions about a long text, answered by the exact and the filled model.

    The first is about the text as a whole. The second is about one sentence in the filled prefix: the hard
    case, and it is shown whatever comes out.
    """
    window = texts.held_out(tokenizer, settings.question_rows, 1)[0]
    text = tokenizer.decode(window.ids[0], skip_special_tokens=True)
    build = [(answers.GIST, None), (answers.FACT_QUESTION, answers.FACT)]
    questions = [
        answers.about(tokenizer, window.name, text, question, settings.question_rows, fact) for question, fact in build
    ]
    torch._dynamo.reset()
    before = len(report(model).graphs)
    # Not worth compiling for two answers.
    filled = compiled(model, backend="ridgefill", options={**options, "inner": "eager", "strict": True})
    asked = []
    with progress("two questions about a long text, exact and filled", 2 * len(questions)) as step:
        for question in questions:
            given = {}
            for name, each in (("exact", model), ("filled", filled)):
                given[name] = answers.answer(each, tokenizer, question, settings.new_tokens)
                step()
            asked.append({"text": question.text, "question": question.question, "fact": question.fact, **given})
    filled_graph(report(model).graphs[before:])
    first = asked[0]
    return {
        "question": first["question"],
        "answer_exact": first["exact"],
        "answer_filled": first["filled"],
        "questions": asked,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print a demo's result for people."""
    console.print(
        f"[bold]{result['model']}[/bold], {result['dtype']}, split {result['split']} of {result['layers']}, "
        f"tail {result['tail']}; {result['machine']}"
    )
    console.print(
        f"\nTime to first token of {result['rows']} prompt rows, median of {result['runs']} runs: "
        f"exact {result['ttft_exact_s']:.2f} s, filled {result['ttft_filled_s']:.2f} s: "
        f"[bold]{result['speedup']:.2f}x[/bold]\n"
        f"Ceiling by multiply-adds {result['ceiling_multiply_adds']:.2f}x, "
        f"by layer passes {result['ceiling_layer_passes']:.2f}x\n"
    )
    console.print(
        f"Novel tokens ({result['novel_tokens']} of {result['scored_tokens']} scored) of "
        f"{result['held_out_windows']} held-out texts of {result['held_out_rows']} rows"
    )
    console.print(arm_table(result["arms"]))
    for asked in result["questions"]:
        where = f"{asked['text']}, with a sentence put into it" if asked["fact"] else asked["text"]
        console.print(f"\n[bold]{asked['question']}[/bold] ({escape(where)})", highlight=False)
        console.print(f"  exact:  {asked['exact']}", markup=False, highlight=False)
        console.print(f"  filled: {asked['filled']}", markup=False, highlight=False)
    console.print(
        "\nThe second question hangs on one sentence in the filled prefix, which is what a fill loses first.",
        style="dim",
    )
    console.print(f"\npicture: {result['picture']}; {result['total_s']:.0f} s in all", highlight=False)
