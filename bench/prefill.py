"""Time to first token, compile time and peak memory: exact against filled, on a prompt of real text.

    python bench/prefill.py --rows 4096 --tail 512 --split 15 [--select attention:0.1] [--maps-dtype int8]
    [--runs 5] [--dynamic] [--dtype bfloat16] [--same-lowering] [--json]

The exact model is `model.compile()`, the filled one `model.compile(backend="ridgefill", ...)`; both leave a
cache and return the last row's logits. Runs take turns, and medians are reported. The time does not depend
on what the maps hold, so unless `--maps` names a folder they are made up: the identity plus a little noise.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from ridgefill_compile.capture import capture
from ridgefill_compile.evaluate.machine import STATUS, machine, resident, versions
from ridgefill_compile.evaluate.progress import progress
from ridgefill_compile.evaluate.shapes import SHAPES, made_up_maps, random_model
from ridgefill_compile.evaluate.speed import calls_of, compiled, first_token, measure_speed
from ridgefill_compile.evaluate.texts import long_prompt, split_texts
from ridgefill_compile.evaluate.trained import load_model
from ridgefill_compile.fill import keep_input_sources
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.passes.lower import lower
from ridgefill_compile.recurrences.substitute import substitute_recurrences

ARMS = ("exact", "filled")


def prefill(
    rows: Annotated[int, typer.Option(help="Prompt rows.")] = 4096,
    tail: Annotated[int, typer.Option(help="Last rows that run every layer.")] = 512,
    split: Annotated[int, typer.Option(help="First late layer.")] = 15,
    runs: Annotated[int, typer.Option(help="Timed runs of each model.")] = 5,
    dynamic: Annotated[bool, typer.Option(help="Time graphs that serve every length, not one.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the weights and the cache.")] = "float32",
    model: Annotated[str, typer.Option(help="Folder or name; 'demo', or a shape of random weights.")] = "demo",
    maps: Annotated[Path | None, typer.Option(help="Folder of maps. Default: made up.")] = None,
    maps_dtype: Annotated[str | None, typer.Option(help="Of the maps, as stored; 'int8', say.")] = None,
    select: Annotated[
        str | None, typer.Option(help="What selects prefix rows to keep exact, as option 'rows'.")
    ] = None,
    first_rows: Annotated[int | None, typer.Option(help="First rows to keep exact. Default: the maps' own.")] = None,
    same_lowering: Annotated[
        bool, typer.Option(help="Lower the exact graph as the filled one: what is left is gained by filling alone.")
    ] = False,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too, each model in its own process.")] = True,
    only: Annotated[
        str | None, typer.Option(help="Measure the memory of 'exact' or 'filled' here.", hidden=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Time to first token of the exact and the filled model, beside the ceilings that arithmetic sets."""
    with contextlib.redirect_stdout(sys.stderr):
        loaded, tokenizer = load_model("demo" if model in SHAPES else model, dtype)
        if model in SHAPES:
            loaded = random_model(model, loaded.config.vocab_size, dtype)
        substitute_recurrences(loaded)  # for the exact arm too: both run the same recurrence
        prompt = long_prompt(split_texts().held_out_in_turn(), tokenizer, rows)
        known = RidgeMaps.load(maps, model=loaded) if maps else made_up_maps(loaded, split)
        known = known if maps_dtype is None else known.to(maps_dtype)
        options = {"maps": known, "split": split, "tail": tail, "rows": select, "first_rows": first_rows}
        warm_up = other_lengths(rows, tail) if dynamic else ()
        if only:
            result = {only: peak_memory(loaded, prompt, options, warm_up, only)}
        else:
            with progress(f"{rows} rows, exact and filled", calls_of(runs, warm_up)) as step:
                exact = exactly_lowered if same_lowering else "inductor"
                speed = measure_speed(
                    loaded, prompt, options, runs=runs, exact_backend=exact, warm_up=warm_up, step=step
                )
            if dynamic and not speed.graph.dynamic:
                raise RuntimeError(f"the graph was compiled for {speed.graph.rows} rows only")
            result = speed.to_dict() | {
                "machine": machine(),
                "versions": versions(),
                "dtype": dtype,
                "dynamic": dynamic,
                "same_lowering": same_lowering,
                "model": model,
                "maps": str(maps) if maps else "made up",
                "maps_dtype": str(known.dtype).removeprefix("torch."),
                "select": select,
                "first_rows": speed.graph.first_rows,
                "peak_memory_bytes": in_processes(sys.argv[1:]) if memory else None,
            }
    if as_json or only:
        typer.echo(json.dumps(result))
    else:
        show(result)


def exactly_lowered(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """The exact graph, rewritten for Inductor as a filled one is in the end."""
    result = lower(capture(module))
    keep_input_sources(result, module)
    return compile_fx(result, list(inputs))


def other_lengths(rows: int, tail: int) -> tuple[int, ...]:
    """One shorter prompt, with half of the prefix: the second length is what makes a graph dynamic."""
    return ((rows + tail) // 2,)


def peak_memory(
    model: Any, prompt: torch.Tensor, options: dict[str, Any], warm_up: tuple[int, ...], which: str
) -> dict[str, int]:
    """Bytes this process held at most while answering, and right before, once all is compiled and warm."""
    how: dict[str, Any] = {"backend": "ridgefill", "options": {**options, "strict": True}}
    ready = compiled(model, **(how if which == "filled" else {}))
    for rows in (*warm_up, prompt.shape[1], prompt.shape[1]):
        first_token(ready, prompt[:, :rows])
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident size so far
    before = resident("VmRSS")
    first_token(ready, prompt)
    return {"before": before, "peak": resident("VmHWM")}


def in_processes(arguments: list[str]) -> dict[str, Any] | None:
    """Peak memory of each model in a process of its own; None where the system cannot tell."""
    if not STATUS.exists():
        return None
    found: dict[str, Any] = {}
    with progress("peak memory, one process each", len(ARMS)) as step:
        for only in ARMS:
            command = [sys.executable, __file__, *arguments, "--only", only]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            found |= json.loads(output.stdout.splitlines()[-1])
            step()
    return found


def show(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    selected = f"rows selected by {result['select']}, " if result["select"] else ""
    selected += f"first {result['first_rows']} rows exact, " if result["first_rows"] else ""
    lines = [
        f"{result['machine']}; {result['dtype']}, {'dynamic' if result['dynamic'] else 'static'} shapes",
        f"N {result['rows']}, T {result['tail']}, S {result['split']}, {selected}maps in {result['maps_dtype']}, "
        f"medians of {result['runs']} runs in turn",
        f"time to first token: exact {result['ttft_exact_s']:.3f} s, filled {result['ttft_filled_s']:.3f} s",
        f"speed-up {result['speedup']:.3f}x; ceiling by multiply-adds {result['ceiling_multiply_adds']:.3f}x "
        f"(reached: {100 * result['share_of_ceiling']:.1f} %), by layer passes {result['ceiling_layer_passes']:.3f}x",
        f"compiling: exact {result['compile_exact_s']:.1f} s, filled {result['compile_filled_s']:.1f} s",
    ]
    if result["peak_memory_bytes"]:
        peaks = [f"{name} {each['peak'] / 2**20:.0f} MiB" for name, each in result["peak_memory_bytes"].items()]
        lines.append(f"peak memory: {', '.join(peaks)}")
    Console().print("\n".join(lines), highlight=False)


if __name__ == "__main__":
    typer.run(prefill)
