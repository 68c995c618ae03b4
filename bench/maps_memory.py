"""What maps cost in memory: mapped from their files, as they are loaded, or held by the process.

    python bench/maps_memory.py [--dtype bfloat16] [--maps-dtype int8] [--json]

Four processes answer one prompt of random ids with a wide model of random weights: filled without maps
(`route="identity"`), with maps from a folder, with these streamed (`stream_maps=True`), and with the same maps copied
into memory. Each then tells how much memory is its own, and how much are pages of files, which it shares with other
processes and which the system may drop.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from ridgefill_compile.evaluate.machine import machine, resident, versions
from ridgefill_compile.evaluate.progress import progress
from ridgefill_compile.evaluate.shapes import made_up_maps, random_model
from ridgefill_compile.evaluate.speed import compiled, first_token
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.splitmaps import SplitMaps, StoredMap

ARMS = ("none", "mapped", "streamed", "copied")
SPLIT, TAIL, ROWS, VOCABULARY = 4, 64, 640, 1000


def maps_memory(
    dtype: Annotated[str, typer.Option(help="Of the model's weights.")] = "bfloat16",
    maps_dtype: Annotated[str, typer.Option(help="Of the maps, as stored.")] = "bfloat16",
    only: Annotated[str | None, typer.Option(help="One of the arms, here.", hidden=True)] = None,
    folder: Annotated[Path | None, typer.Option(help="Of the maps.", hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Memory of a filled model by how its maps are held."""
    if only is not None:
        typer.echo(json.dumps(answered(only, folder, dtype)))
        return
    found: dict[str, Any] = {"machine": machine(), "versions": versions(), "dtype": dtype, "maps_dtype": maps_dtype}
    with tempfile.TemporaryDirectory() as place, progress("one process an arm", len(ARMS)) as step:
        maps = made_up_maps(random_model("wide", VOCABULARY, dtype), SPLIT).to(maps_dtype)
        maps.save(place)
        found["maps_bytes"] = maps.nbytes
        for arm in ARMS:
            command = [sys.executable, __file__, "--dtype", dtype, "--only", arm, "--folder", place]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            found[arm] = json.loads(output.stdout.splitlines()[-1])
            step()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show(found)


def answered(arm: str, folder: Path | None, dtype: str) -> dict[str, int]:
    """Bytes of a process that has answered the prompt."""
    model = random_model("wide", VOCABULARY, dtype)
    options: dict[str, Any] = {"split": SPLIT, "tail": TAIL, "strict": True, "inner": "eager"}
    if arm == "none":
        options["route"] = "identity"
    else:
        maps = RidgeMaps.load(folder or "")
        options |= {"maps": in_memory(maps) if arm == "copied" else maps, "stream_maps": arm == "streamed"}
    ready = compiled(model, backend="ridgefill", options=options)
    ids = torch.randint(0, VOCABULARY, (1, ROWS), generator=torch.Generator().manual_seed(0))
    first_token(ready, ids)
    return {"own": resident("RssAnon"), "files": resident("RssFile")}


def in_memory(maps: RidgeMaps) -> RidgeMaps:
    """The same maps in memory of this process."""
    stored = {}
    for layer in maps.layers:
        codes = maps.codes(layer)
        matrix, scales = (maps.matrix(layer), None) if codes is None else (codes.codes, codes.scales.clone())
        stored[layer] = StoredMap(matrix.clone(), maps.offset(layer).clone(), scales)
    return RidgeMaps([SplitMaps.made_of(maps.split, stored)], layer_count=maps.layer_count)


def show(found: dict[str, Any]) -> None:
    """Print the figures for people."""
    table = Table("maps", "own MiB", "of files MiB", title=f"{found['maps_bytes'] / 2**20:.0f} MiB of maps")
    for arm in ARMS:
        each = found[arm]
        table.add_row(arm, *(f"{each[name] / 2**20:.0f}" for name in ("own", "files")))
    Console().print(f"{found['machine']}; model {found['dtype']}, maps {found['maps_dtype']}", highlight=False)
    Console().print(table)


if __name__ == "__main__":
    typer.run(maps_memory)
