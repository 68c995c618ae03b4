"""Retrieval from the filled region: a number in one sentence of the prefix, asked for at the end of the prompt.

    python bench/needles.py [--split 15 --split 11] [--arm ridge --arm pooled:0.1] [--samples 32] [--json]

Prompts of 3,072 rows of held-out prose, tail 256; maps from 60 calibration windows of 2,048 rows. Of every selector the
table also says which share of the sentence's rows it keeps. Answers are kept one by one, and an interrupted run goes on
there.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from ridgefill_compile.demo import demo_maps
from ridgefill_compile.evaluate.arms import Forward, filling
from ridgefill_compile.evaluate.intervals import bootstrap
from ridgefill_compile.evaluate.kept import Kept, digest_of
from ridgefill_compile.evaluate.machine import machine, versions
from ridgefill_compile.evaluate.needles import NEW_TOKENS, Answer, Needle, compare_found, judge, needles, say
from ridgefill_compile.evaluate.progress import progress
from ridgefill_compile.evaluate.selection import selection
from ridgefill_compile.evaluate.tables import interval
from ridgefill_compile.evaluate.texts import split_texts, windows_of
from ridgefill_compile.evaluate.trained import NAME, cache_folder, load_trained
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.selectors import parse_rows

SPLITS = (15, 11)
FITTED = (11, 15, 19)
"""Splits whose maps are calibrated in one go, as for `quality.py`."""
EXACT = "exact"
SELECTED = ("pooled:0.1", "pooled:0.05", "attention:0.1", "mixed:0.1", "random:0.1", "tail:0.1")
ARMS: dict[str, dict[str, Any]] = {"ridge": {}, **{rows: {"rows": rows} for rows in SELECTED}}
"""Name -> options of the backend, besides maps, split and tail."""

Arms = Mapping[str, Mapping[str, Any]]
Select = Callable[[Tensor], dict[str, Tensor]]


def measure(
    split: Annotated[list[int] | None, typer.Option(help="First late layer; may be repeated.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="An arm besides exact; may be repeated. Default: all.")] = None,
    rows: Annotated[int, typer.Option(help="Prompt rows.")] = 3072,
    tail: Annotated[int, typer.Option(help="Last rows that run every layer.")] = 256,
    samples: Annotated[int, typer.Option(help="Prompts, each of a text of its own.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Numbers found by the exact model and by every arm, and needle rows that selectors keep."""
    splits, arms = tuple(split or SPLITS), chosen(arm)
    with contextlib.redirect_stdout(sys.stderr):
        model, tokenizer, digest = load_trained()
        with progress("reading text on this machine"):
            texts = split_texts()
            fitted = texts.calibration(tokenizer, 2048, 60)
            prose = (each for each in texts.held_out_documents if each.kind == "prose")
            prompts = needles(tokenizer, windows_of(prose, tokenizer, rows, samples), tail, seed)
        maps = demo_maps(model, tokenizer, digest, fitted, *sorted({*FITTED, *splits}))
        kept = Kept(cache_folder() / f"needles-{digest_of((digest, str(model.dtype), versions()))}")
        with progress("exact and filled answers", samples * (1 + len(splits) * (len(arms) + 1))) as step:
            asking = Asking(model, tokenizer, prompts, tail, kept, step)
            exact = asking.exact()
            found = {each: asking.at_split(maps.at(each), arms, exact) for each in splits}
        result = {
            "model": NAME,
            "machine": machine(),
            "versions": versions(),
            "rows": rows,
            "tail": tail,
            "samples": samples,
            "seed": seed,
            "depths": [prompt.depth for prompt in prompts],
            "exact": asdict(compare_found(exact, exact)),
            "splits": {str(each): figures for each, figures in found.items()},
        }
    if as_json:
        typer.echo(json.dumps(result))
    else:
        show(result)


def chosen(names: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Options of the arms of some names; what is no arm is taken for rows to select.

    Raises:
        OptionError: a name is neither an arm nor selectors.
    """
    arms = {name: ARMS.get(name, {"rows": name}) for name in names or ARMS}
    for options in arms.values():
        parse_rows(options.get("rows"))
    return arms


class Asking:
    """Asks every prompt of one arm after another; what comes back is kept.

    Args:
        model: the exact model, which also goes on from every cache.
        tokenizer: its tokenizer.
        prompts: what is asked.
        tail: last rows that run every layer.
        kept: where answers and positions are kept.
        step: called after every prompt, once for the exact model and `1 + arms` times a split.
    """

    def __init__(
        self, model: Any, tokenizer: Any, prompts: Sequence[Needle], tail: int, kept: Kept, step: Callable[[], None]
    ) -> None:
        self.model, self.tokenizer, self.prompts = model, tokenizer, prompts
        self.tail, self.kept, self.step = tail, kept, step

    def exact(self) -> list[Answer]:
        """What the exact model says to every prompt."""
        return [self.answer(EXACT, self.model, prompt) for prompt in self.prompts]

    def at_split(self, maps: RidgeMaps, arms: Arms, exact: Sequence[Answer]) -> dict[str, dict[str, Any]]:
        """Figures of every arm at the split of maps, with the share of needle rows that its selectors keep."""
        torch._dynamo.reset()
        base = {"maps": maps, "split": maps.split, "tail": self.tail, "inner": "eager", "strict": True}
        filled = {arm: filling(self.model, {**base, **options}) for arm, options in arms.items()}
        stored = digest_of(*(maps.matrix(layer) for layer in maps.layers))
        names = {arm: f"{maps.split}-{digest_of(stored, self.tail, settings(each))}" for arm, each in arms.items()}
        keeping = {arm: options["rows"] for arm, options in arms.items() if "rows" in options}
        select = selection(self.model, maps.split, self.tail, keeping, maps.first_rows)
        said: dict[str, list[Answer]] = {arm: [] for arm in arms}
        positions = []
        with torch._dynamo.config.patch(recompile_limit=len(arms) + 8):  # each arm compiles the model once
            for prompt in self.prompts:
                positions.append(self.selected(select, maps, keeping, prompt))
                for arm in arms:
                    said[arm].append(self.answer(names[arm], filled[arm], prompt))
        figures = {arm: asdict(compare_found(exact, each)) for arm, each in said.items()}
        for arm in keeping:
            figures[arm] |= recall([each[arm] for each in positions], self.prompts)
        return figures

    def answer(self, name: str, prefill: Forward, prompt: Needle) -> Answer:
        """What one model says to a prompt, kept under a name."""
        ids = self._once(
            f"{name}-{digest_of(prompt.ids)}",
            lambda: say(prefill, self.model, prompt.ids, NEW_TOKENS, {self.tokenizer.eos_token_id}),
        )
        return judge(str(self.tokenizer.decode(ids)), prompt.number)

    def selected(self, select: Select, maps: RidgeMaps, rows: Mapping[str, Any], prompt: Needle) -> dict[str, Tensor]:
        """Positions that selectors keep of a prompt, by arm."""
        chosen = {arm: parse_rows(spec) for arm, spec in rows.items()}
        depends = digest_of(maps.split, maps.first_rows, self.tail, chosen, prompt.ids)
        found: dict[str, Tensor] = self._once(f"rows-{depends}", lambda: select(prompt.ids) if rows else {})
        return found

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        value = self.kept.get(name)
        if value is None:
            value = compute()
            self.kept.put(name, value)
        self.step()
        return value


def settings(options: Mapping[str, Any]) -> str:
    """Options as text, with all that selectors are made of."""
    return repr(sorted({**options, "rows": parse_rows(options.get("rows"))}.items()))


def recall(positions: Sequence[Tensor], prompts: Sequence[Needle]) -> dict[str, Any]:
    """Shares of the rows of sentences, and of the digits in them, that are among the selected ones, with intervals."""
    shares = {}
    for name in ("rows", "digit_rows"):
        hit = [torch.isin(getattr(prompt, name), rows) for prompt, rows in zip(prompts, positions, strict=True)]
        figure = bootstrap([each.double().numpy() for each in hit])
        shares[f"needle_{name}"] = [figure.value, figure.low, figure.high]
    return shares


def show(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    figures_of = ("found", "right (%)", "lost, gained", "p", "kept", "of digits")
    table = Table(
        "split", Column("arm", no_wrap=True), *figures_of, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    rows = [("", EXACT, result["exact"])]
    rows += [(split, arm, each) for split, arms in result["splits"].items() for arm, each in arms.items()]
    for split, arm, figures in rows:
        shares = [figures.get(name) or [] for name in ("needle_rows", "needle_digit_rows")]
        table.add_row(
            split,
            arm,
            str(figures["found"]),
            f"{100 * figures['digits_right']:.1f}",
            f"{figures['lost']}, {figures['gained']}",
            f"{figures['p']:.2g}",
            *(interval([end and 100 * end for end in each], 0) if each else "" for each in shares),
        )
    console = Console()
    console.print(
        f"{result['model']}, N {result['rows']}, T {result['tail']}, {result['exact']['samples']} prompts\n"
        "found: numbers; right: digits right in place; lost, gained: numbers against the exact model, and the p of the "
        "exact McNemar test; kept: % of the sentence's rows that are selected, of digits: % of its digits' rows; "
        "95 % BCa intervals over prompts",
        highlight=False,
    )
    console.print(table)


if __name__ == "__main__":
    typer.run(measure)
