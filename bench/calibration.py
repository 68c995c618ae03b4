"""What calibration costs beside the plain forward passes it needs.

    python bench/calibration.py [--windows 6] [--split 15] [--json]

Real text, windows of 2,048 rows. Each window is run twice, in turns: by the model as transformers runs it, and by the
calibration's own step (the same forward with accumulators, sums added, checked and checkpointed). Both leave a cache
and give one row's logits.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ridgefill_compile.checkpoint import Checkpoint, SumsSoFar
from ridgefill_compile.collect import StateCollector
from ridgefill_compile.evaluate.machine import machine, versions
from ridgefill_compile.evaluate.progress import progress
from ridgefill_compile.evaluate.texts import split_texts
from ridgefill_compile.evaluate.trained import NAME, load_trained

ROWS = 2048


def calibration(
    windows: Annotated[int, typer.Option(help="Windows of 2,048 rows.")] = 6,
    split: Annotated[int, typer.Option(help="First late layer.")] = 15,
    stride: Annotated[int, typer.Option(help="Every how manyth row is fitted.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Time plain forward passes and calibration's, window by window in turns."""
    with contextlib.redirect_stdout(sys.stderr):
        model, tokenizer, _ = load_trained()
        with progress("reading text on this machine"):
            found = split_texts().calibration(tokenizer, ROWS, windows)
        ids = [window.ids.reshape(1, -1)[:, :ROWS] for window in found]
        plain, fitted = measure(model, ids, split, stride)
    result: dict[str, Any] = {
        "model": NAME,
        "machine": machine(),
        "versions": versions(),
        "dtype": "float32",
        "rows": ROWS,
        "windows": windows,
        "split": split,
        "stride": stride,
        "plain_s": plain,
        "calibration_s": fitted,
        "ratio": statistics.median(fitted) / statistics.median(plain),
    }
    if as_json:
        typer.echo(json.dumps(result))
    else:
        Console().print(
            f"{result['machine']}, split {split}, stride {stride}: a window of {ROWS} rows takes "
            f"{statistics.median(plain):.2f} s plain and {statistics.median(fitted):.2f} s in calibration, "
            f"{result['ratio']:.2f} times as long"
        )


def measure(model: Any, ids: list[torch.Tensor], split: int, stride: int) -> tuple[list[float], list[float]]:
    """Seconds a window, plain and in calibration; the first window of each, which compiles, is run once before."""
    collector = StateCollector(model, [split], stride=stride)
    plain, fitted = [], []
    with tempfile.TemporaryDirectory() as folder, progress("plain and calibration", 1 + len(ids)) as step:
        checkpoint = Checkpoint(Path(folder), {"bench": "calibration"})
        sums = SumsSoFar(0, "", {split: collector.sums(ids[0])[split].zeros_like()})
        step()
        for each in ids:
            started = time.perf_counter()
            with torch.no_grad():
                model(each, use_cache=True, logits_to_keep=1)
            between = time.perf_counter()
            sums.by_split[split].add(collector.sums(each)[split])
            sums.documents += 1
            checkpoint.save(sums)
            fitted.append(time.perf_counter() - between)
            plain.append(between - started)
            step()
    return plain, fitted


if __name__ == "__main__":
    typer.run(calibration)
