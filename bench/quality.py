"""What none, identity and ridge lose at several splits: the yardstick for the quality of a fill.

    python bench/quality.py [--split 11 --split 15 --split 19] [--windows 16] [--json]

Prompts of 3,072 rows of held-out technical prose and code, tail 512, the last 256 tokens scored; maps from 60
calibration windows of 2,048 rows. Scores are kept after every window, and an interrupted run goes on there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ridgefill_compile.demo import demo_maps
from ridgefill_compile.evaluate.arms import ARMS, arms_of, score_window, summarize
from ridgefill_compile.evaluate.machine import machine, versions
from ridgefill_compile.evaluate.measures import TokenScores
from ridgefill_compile.evaluate.progress import progress
from ridgefill_compile.evaluate.tables import LABELS, arm_cells, figure_table
from ridgefill_compile.evaluate.texts import Window, split_texts
from ridgefill_compile.evaluate.trained import NAME, cache_folder, load_trained
from ridgefill_compile.maps import RidgeMaps

SPLITS = (11, 15, 19)


def quality(
    split: Annotated[list[int] | None, typer.Option(help="First late layer; may be repeated.")] = None,
    rows: Annotated[int, typer.Option(help="Prompt rows of a window.")] = 3072,
    tail: Annotated[int, typer.Option(help="Last rows that run every layer.")] = 512,
    scored: Annotated[int, typer.Option(help="Tokens scored at the end of a window.")] = 256,
    windows: Annotated[int, typer.Option(help="Held-out windows.")] = 16,
    calibration_windows: Annotated[int, typer.Option(help="Calibration windows, of 2,048 rows.")] = 60,
    by_length: Annotated[bool, typer.Option(help="Maps of a fit in which rows weigh by their square length.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Loss on novel tokens, agreement and divergence of every arm, with intervals over windows."""
    splits = tuple(split or SPLITS)
    with contextlib.redirect_stdout(sys.stderr):
        model, tokenizer, digest = load_trained()
        with progress("reading text on this machine"):
            texts = split_texts()
            fitted = texts.calibration(tokenizer, 2048, calibration_windows)
            held_out = texts.held_out(tokenizer, rows + 1, windows)
        maps = demo_maps(model, tokenizer, digest, fitted, *splits, by_length=by_length)
        kept = Kept(maps, held_out, tail, scored, digest)
        scores = score_splits(model, [maps.at(each) for each in splits], held_out, tail, scored, kept)
        result = {
            "model": NAME,
            "machine": machine(),
            "versions": versions(),
            "rows": rows,
            "tail": tail,
            "scored": scored,
            "windows": [window.name for window in held_out],
            "calibration_windows": calibration_windows,
            "by_length": by_length,
            "first_rows": {str(each): maps.at(each).first_rows for each in splits},
            "penalty": {str(each): maps.at(each).penalty for each in splits},
            "splits": {str(each): {arm: summarize(scores[each, arm]).to_dict() for arm in ARMS} for each in splits},
        }
    if as_json:
        typer.echo(json.dumps(result))
    else:
        show(result)


class Kept:
    """Scores on disk, a file for each split and window, under a folder that names all they depend on."""

    def __init__(self, maps: RidgeMaps, windows: Sequence[Window], tail: int, scored: int, digest: str) -> None:
        key = hashlib.sha256(repr((digest, maps.splits, tail, scored, versions())).encode())
        for split in maps.splits:
            for layer in maps.at(split).layers:
                key.update(maps.at(split).matrix(layer).float().numpy().tobytes())
        for window in windows:
            key.update(window.ids.numpy().tobytes())
        self.folder = cache_folder() / f"quality-{key.hexdigest()[:16]}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, split: int, window: int) -> dict[str, TokenScores] | None:
        """What was put, or None."""
        file = self.folder / f"{split}-{window}.pt"
        if not file.exists():
            return None
        stored = torch.load(file, weights_only=True)
        return {arm: TokenScores(**fields) for arm, fields in stored.items()}

    def put(self, split: int, window: int, scores: dict[str, TokenScores]) -> None:
        """Keep the scores of a window; all of them or nothing, whatever happens meanwhile."""
        file = self.folder / f"{split}-{window}.pt"
        torch.save({arm: vars(each) for arm, each in scores.items()}, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)


def score_splits(
    model: Any, maps: Sequence[RidgeMaps], windows: Sequence[Window], tail: int, scored: int, kept: Kept
) -> dict[tuple[int, str], list[TokenScores]]:
    """Scores of every arm at every split on every window; the exact model runs once a window."""
    arms = {(each.split, arm): forward for each in maps for arm, forward in arms_of(model, each, tail).items()}
    scores: dict[tuple[int, str], list[TokenScores]] = {key: [] for key in arms}
    limit = torch._dynamo.config.patch(recompile_limit=len(arms) + 8)  # each arm compiles the model once
    with limit, progress(f"exact and {len(arms)} arms", len(windows)) as step:
        for number, window in enumerate(windows):
            found = {each.split: kept.get(each.split, number) for each in maps}
            missing = {key: forward for key, forward in arms.items() if found[key[0]] is None}
            fresh = score_window(model, missing, window.ids, scored) if missing else {}
            for split, stored in found.items():
                of_split = stored or {arm: fresh[split, arm] for arm in ARMS}
                if not stored:
                    kept.put(split, number, of_split)
                for arm in ARMS:
                    scores[split, arm].append(of_split[arm])
            step()
    return scores


def show(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    table = figure_table("split", "arm")
    for split, arms in result["splits"].items():
        for arm, figures in arms.items():
            table.add_row(split, LABELS[arm], *arm_cells(figures))
    ridge = next(iter(result["splits"].values()))["ridge"]
    console = Console()
    console.print(
        f"{result['model']}, N {result['rows']}, T {result['tail']}; {len(result['windows'])} windows, "
        f"{ridge['novel']} novel of {ridge['scored']} scored tokens; 95 % BCa intervals over windows",
        highlight=False,
    )
    console.print(table)


if __name__ == "__main__":
    typer.run(quality)
