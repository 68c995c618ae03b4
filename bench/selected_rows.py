"""What selected rows win back of a fill's loss, and whether it matters which rows they are.

    python bench/selected_rows.py [--split 15 --split 11] [--arm ridge --arm pooled] [--windows 8] [--json]

Prompts of 3,072 rows of held-out technical prose and code, tail 512, the last 256 tokens scored; maps from 60
calibration windows of 2,048 rows; 10 % of the prefix selected. The scored tokens are given to the model, so selectors
that go by the attention of the last rows go by the last 64 *before* the scored ones. Key tokens are those whose loss
rises by more than 2 nats when the exact model sees the last 1,024 rows alone (the paper: 4,096 of longer prompts).
Scores are kept for every arm and window, and an interrupted run goes on there.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from ridgefill_compile.demo import demo_maps
from ridgefill_compile.errors import OptionError
from ridgefill_compile.evaluate.arms import LONGER_TAIL, Forward, filling, paired, removed, score_window
from ridgefill_compile.evaluate.equal_cost import longer_tail
from ridgefill_compile.evaluate.intervals import Interval, bootstrap
from ridgefill_compile.evaluate.kept import Kept, digest_of
from ridgefill_compile.evaluate.machine import machine, versions
from ridgefill_compile.evaluate.measures import TokenScores, key_tokens
from ridgefill_compile.evaluate.progress import progress
from ridgefill_compile.evaluate.tables import interval
from ridgefill_compile.evaluate.texts import Window, split_texts
from ridgefill_compile.evaluate.trained import NAME, cache_folder, load_trained
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.selectors import Attention, LongerTail, Pooled, QuestionBlind, Random
from ridgefill_compile.splitmaps import PROJECTIONS

SPLITS = (15, 11)
FITTED = (11, 15, 19)
"""Splits whose maps are calibrated in one go, as for `quality.py`."""
SCORED = 256
SHARE = 0.1
RIDGE, CUT = "ridge", "cut"
ARMS: dict[str, dict[str, Any]] = {
    RIDGE: {},
    "pooled": {"rows": (Pooled(SHARE, before=SCORED),)},
    "attention": {"rows": (Attention(SHARE, before=SCORED),)},
    "mixed": {"rows": (Pooled(SHARE / 2, before=SCORED), Attention(SHARE / 2, before=SCORED))},
    "question_blind": {"rows": (QuestionBlind(SHARE),)},
    "random": {"rows": (Random(SHARE),)},
    "tail": {"rows": (LongerTail(SHARE),)},
    "key_rescale": {"key_rescale": 256},  # the rows of the tail that are not scored
    "int8": {"maps": "int8"},  # no rows, but maps in another type, which are bfloat16 else
    PROJECTIONS: {"maps": PROJECTIONS},  # nor here, but maps to what keys and values are made of
    LONGER_TAIL: {"route": "none"},  # no fill, and a tail as long as costs what ridge does
}
"""Name -> options of the backend, besides split and tail; of maps, their type, or what they predict."""
CONTROLS = (RIDGE, "random", "tail")
"""Arms that every other one is held against, token by token."""

Arms = Mapping[str, Mapping[str, Any]]
Scores = Mapping[tuple[int, str], Sequence[TokenScores]]
"""By split and arm, a window each; at split 0 those of the exact model without the rows before the cut."""


def measure(
    split: Annotated[list[int] | None, typer.Option(help="First late layer; may be repeated.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="An arm; may be repeated. Default: all.")] = None,
    rows: Annotated[int, typer.Option(help="Prompt rows of a window.")] = 3072,
    tail: Annotated[int, typer.Option(help="Last rows that run every layer.")] = 512,
    windows: Annotated[int, typer.Option(help="Held-out windows.")] = 16,
    cut: Annotated[int, typer.Option(help="Last rows that key tokens are told by.")] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Loss of every arm on novel and on key tokens, and what it is over that of the controls."""
    splits, arms = tuple(split or SPLITS), chosen(arm)
    with contextlib.redirect_stdout(sys.stderr):
        model, tokenizer, digest = load_trained()
        with progress("reading text on this machine"):
            texts = split_texts()
            fitted = texts.calibration(tokenizer, 2048, 60)
            held_out = texts.held_out(tokenizer, rows + 1, windows)
        all_splits = sorted({*FITTED, *splits})
        maps = demo_maps(model, tokenizer, digest, fitted, *all_splits)
        direct = (
            demo_maps(model, tokenizer, digest, fitted, *all_splits, cut=PROJECTIONS) if PROJECTIONS in arms else maps
        )
        settings = (digest, str(model.dtype), tail, SCORED, cut, versions())
        kept = Kept(cache_folder() / f"selected-rows-{digest_of(settings)}")
        by_split = {each: (maps.at(each), direct.at(each)) for each in splits}
        scores = score_arms(model, by_split, arms, held_out, tail, cut, kept)
        kinds = tokens_of(scores)
        result = {
            "model": NAME,
            "machine": machine(),
            "versions": versions(),
            "rows": rows,
            "tail": tail,
            "scored": SCORED,
            "cut": cut,
            "share": SHARE,
            "windows": [window.name for window in held_out],
            "tokens": {kind: int(sum(each.sum() for each in which)) for kind, which in kinds.items()},
            "without_the_rest": {kind: loss(scores[0, CUT], which) for kind, which in kinds.items()},
            "splits": {str(each): figures(scores, each, tuple(arms)) for each in splits},
        }
    if as_json:
        typer.echo(json.dumps(result))
    else:
        show(result)


def chosen(names: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Options of the arms of some names, ridge always among them: it is what the others win back from.

    Raises:
        OptionError: there is no arm of that name.
    """
    for name in names or ():
        if name not in ARMS:
            raise OptionError(f"there is no arm {name!r}; known: {', '.join(ARMS)}")
    return {name: options for name, options in ARMS.items() if not names or name in (RIDGE, *names)}


def score_arms(
    model: Any,
    maps: Mapping[int, tuple[RidgeMaps, RidgeMaps]],
    arms: Arms,
    windows: Sequence[Window],
    tail: int,
    cut: int,
    kept: Kept,
) -> dict[tuple[int, str], list[TokenScores]]:
    """Scores of every arm at every split on every window; the exact model runs once a window, and once cut.

    `maps`: split -> those to layer inputs, and those to projections.
    """
    torch._dynamo.reset()
    rows = windows[0].ids.shape[1] - 1
    forwards: dict[tuple[int, str], Forward] = {(0, CUT): without_the_rest(model, cut)}
    names = {(0, CUT): CUT}
    for at, (to_inputs, to_projections) in maps.items():
        base = {"split": at, "tail": tail, "inner": "eager", "strict": True}
        digests = [digest_of(*(each.matrix(layer) for layer in each.layers)) for each in (to_inputs, to_projections)]
        for arm, options in arms.items():
            kind = options.get("maps")
            each, stored = (to_projections, digests[1]) if kind == PROJECTIONS else (to_inputs, digests[0])
            told = {**options, "tail": longer_tail(model, each, rows, tail)} if arm == LONGER_TAIL else options
            own = {**told, "maps": each.to(kind) if kind == "int8" else each}
            forwards[at, arm] = filling(model, {**base, **own})
            names[at, arm] = f"{at}-{digest_of(stored, sorted(told.items()))}"
    scores: dict[tuple[int, str], list[TokenScores]] = {key: [] for key in forwards}
    limit = torch._dynamo.config.patch(recompile_limit=len(forwards) + 8)  # each arm compiles the model once
    with limit, progress(f"exact and {len(forwards)} arms", len(windows)) as step:
        for window in windows:
            files = {key: f"{name}-{digest_of(window.ids)}" for key, name in names.items()}
            found = {key: kept.get(file) for key, file in files.items()}
            missing = {key: forward for key, forward in forwards.items() if found[key] is None}
            fresh = score_window(model, missing, window.ids, SCORED) if missing else {}
            for key, stored_scores in found.items():
                if stored_scores is None:
                    kept.put(files[key], vars(fresh[key]))
                scores[key].append(fresh[key] if stored_scores is None else TokenScores(**stored_scores))
            step()
    return scores


def without_the_rest(model: Any, cut: int) -> Forward:
    """The exact model on the last `cut` rows of a prompt."""

    def forward(input_ids: Tensor, **settings: Any) -> Any:
        return model(input_ids=input_ids[:, -cut:], **settings)

    return forward


def tokens_of(scores: Scores) -> dict[str, list[Tensor]]:
    """Kinds of scored tokens that losses are taken on, `[K]` bool a window; none of which there is no token."""
    exact = scores[0, CUT]
    kinds = {"novel": [each.novel for each in exact], "key": [key_tokens(each) for each in exact]}
    return {kind: tokens for kind, tokens in kinds.items() if any(bool(each.any()) for each in tokens)}


def figures(scores: Scores, split: int, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of every arm at a split: its loss over exact on each kind of tokens, and against ridge and the controls."""
    found: dict[str, dict[str, Any]] = {}
    for arm in arms:
        mine = scores[split, arm]
        found[arm] = {"top1_agreement": plain(bootstrap([each.agree.double().numpy() for each in mine]))}
        for kind, tokens in tokens_of(scores).items():
            found[arm][kind] = {"delta_nll": loss(mine, tokens)}
            if arm != RIDGE:
                found[arm][kind]["removed"] = plain(removed(mine, scores[split, RIDGE], tokens))
            for control in CONTROLS:
                if control in arms and arm not in (RIDGE, control):
                    against = paired(mine, scores[split, control], tokens)
                    found[arm][kind][f"minus_{control}"] = plain(against)
    return found


def loss(scores: Sequence[TokenScores], tokens: Sequence[Tensor]) -> list[float | None]:
    """Loss over exact in nats, `[value, low, high]`."""
    return plain(bootstrap([each.delta_nll[which].numpy() for each, which in zip(scores, tokens, strict=True)]))


def plain(figure: Interval) -> list[float | None]:
    """`[value, low, high]`, for JSON."""
    return [figure.value, figure.low, figure.high]


def show(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    console = Console()
    counts = ", ".join(f"{count} {kind}" for kind, count in result["tokens"].items())
    console.print(
        f"{result['model']}, N {result['rows']}, T {result['tail']}; {len(result['windows'])} windows, {counts} of "
        f"{len(result['windows']) * result['scored']} scored tokens; 95 % BCa intervals over windows",
        highlight=False,
    )
    for kind in result["tokens"]:
        against = [f"minus {control}" for control in CONTROLS]
        columns = ("loss over exact (nat)", "removed (%)", *against)
        arm = Column("arm", no_wrap=True)
        table = Table(
            "split", arm, *columns, title=f"{kind} tokens", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
        )
        for split, arms in result["splits"].items():
            for name, of_arm in arms.items():
                table.add_row(split, name, *cells(of_arm[kind]))
        console.print(table)


def cells(of_kind: Mapping[str, Sequence[float | None]]) -> list[str]:
    """Figures of one arm on one kind of tokens; empty where an arm is not held against itself."""
    share = [each and 100 * each for each in of_kind.get("removed", [])]
    against = [of_kind.get(f"minus_{control}", []) for control in CONTROLS]
    return [
        interval(of_kind["delta_nll"]),
        interval(share, 0) if share else "",
        *(interval(each) if each else "" for each in against),
    ]


if __name__ == "__main__":
    typer.run(measure)
