"""The command line: `ridgefill demo | calibrate | inspect | eval | maps | zoo`.

Results go to stdout, progress and errors to stderr; with `--json` stdout holds one JSON object and nothing
else (of `zoo`, one a line).
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from ridgefill_compile.demo import DemoSettings, run_demo, show
from ridgefill_compile.errors import OptionError, RidgefillError

if TYPE_CHECKING:
    from ridgefill_compile.zoo.check import Verdict

app = typer.Typer(
    help="Answer long prompts sooner: run only the early layers on most prompt rows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
P = ParamSpec("P")
DEFAULT = DemoSettings()

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Model = Annotated[str, typer.Argument(help="Folder or name of a transformers model, or 'demo' for the demo's own.")]
Maps = Annotated[Path, typer.Argument(help="Folder of saved maps.")]
Text = Annotated[
    list[Path] | None,
    typer.Option("--text", help="File or folder of text; may be repeated. Default: text found on this machine."),
]


def fail(error: Exception) -> NoReturn:
    """Print an error in one line, and end."""
    Console(stderr=True).print(f"[red]error:[/red] {type(error).__name__}:", end=" ")
    typer.echo(str(error), err=True)
    raise typer.Exit(1) from error


def reporting(command: Callable[P, dict[str, Any]]) -> Callable[P, None]:
    """A command that prints what it returns if that was asked for with `--json`, and errors in one line.

    While the command runs with `--json`, whatever it or a library prints goes to stderr.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        try:
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                result = command(*args, **kwargs)
        except (RidgefillError, OSError) as error:
            fail(error)
        if as_json:
            typer.echo(json.dumps(result))

    run.__annotations__["return"] = None
    return run


@app.command()
@reporting
def demo(
    rows: Annotated[int, typer.Option(help="Prompt rows of the timing.")] = DEFAULT.rows,
    tail: Annotated[int, typer.Option(help="Last rows that run every layer.")] = DEFAULT.tail,
    split: Annotated[int, typer.Option(help="First late layer, of 30.")] = DEFAULT.split,
    runs: Annotated[int, typer.Option(help="Timed runs of each model.")] = DEFAULT.runs,
    calibration_windows: Annotated[int, typer.Option(help="Texts to calibrate on.")] = DEFAULT.calibration_windows,
    held_out_windows: Annotated[int, typer.Option(help="Held-out texts to compare on.")] = DEFAULT.held_out_windows,
    held_out_rows: Annotated[int, typer.Option(help="Prompt rows of each.")] = DEFAULT.held_out_rows,
    picture: Annotated[Path, typer.Option(help="Picture to write.")] = Path("ridgefill-demo/demo.png"),
    as_json: Json = False,
) -> dict[str, Any]:
    """Fill long prompts of a small trained model: how much sooner, how much worse, and how it answers."""
    settings = DemoSettings(
        rows=rows,
        tail=tail,
        split=split,
        runs=runs,
        calibration_windows=calibration_windows,
        held_out_windows=held_out_windows,
        held_out_rows=held_out_rows,
    )
    result = run_demo(settings, picture)
    if not as_json:
        show(result, Console())
    return result


@app.command()
@reporting
def calibrate(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to save the maps in.")],
    split: Annotated[list[int], typer.Option(help="First late layer; may be repeated, the first is the default.")],
    text: Text = None,
    windows: Annotated[int, typer.Option(help="Texts taken from this machine, one window each.")] = 60,
    window: Annotated[int, typer.Option(help="Rows of one pass.")] = 2048,
    stride: Annotated[int, typer.Option(help="Every how manyth row is fitted.")] = 4,
    held_out: Annotated[int, typer.Option(help="Texts that only choose the penalty.")] = 5,
    dtype: Annotated[str, typer.Option(help="Of the stored maps: bfloat16, float32 or int8.")] = "bfloat16",
    cut: Annotated[str, typer.Option(help="What maps predict of late layers: input or projections.")] = "input",
    by_length: Annotated[bool, typer.Option(help="Weigh rows by their square length, as the paper does.")] = False,
    model_dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
    states: Annotated[
        int,
        typer.Option(min=0, help="Texts set apart to measure states on, for option state_correction: 13 or more."),
    ] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder to go on from. Default: beside --out.")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Fit a model's maps on text. Interrupted, the same command goes on where it stopped."""
    from ridgefill_compile.calibrate import calibrate as fit_maps
    from ridgefill_compile.calibrate_states import calibrate_states
    from ridgefill_compile.evaluate.sources import folder_documents
    from ridgefill_compile.evaluate.texts import split_texts
    from ridgefill_compile.evaluate.trained import load_model

    loaded, tokenizer = load_model(model, model_dtype)
    if text:
        documents: Any = (document.text for document in folder_documents(text))
    else:
        documents = iter([each.ids for each in split_texts().calibration(tokenizer, window, windows + states)])
    apart = list(islice(documents, states))
    maps = fit_maps(
        loaded,
        documents,
        splits=split,
        tokenizer=tokenizer,
        window=window,
        stride=stride,
        held_out=held_out,
        dtype=dtype,
        cut=cut,
        by_length=by_length,
        checkpoint=checkpoint or out.with_name(out.name + ".unfinished"),
    )
    maps.save(out)
    if states:
        calibrate_states(loaded, maps, apart, tokenizer=tokenizer, window=window).save(out)
    result = {"saved": str(out), **about_maps(out)}
    if not as_json:
        show_maps(result)
    return result


@app.command("eval")
@reporting
def evaluate(
    model: Model,
    maps: Maps,
    split: Annotated[int | None, typer.Option(help="First late layer. Default: the maps' own.")] = None,
    tail: Annotated[int, typer.Option(help="Last rows that run every layer.")] = 512,
    rows: Annotated[int, typer.Option(help="Prompt rows of each text.")] = 3072,
    windows: Annotated[int, typer.Option(help="Held-out texts.")] = 16,
    scored: Annotated[int, typer.Option(help="Tokens scored at the end of each.")] = 256,
    text: Text = None,
    model_dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
    as_json: Json = False,
) -> dict[str, Any]:
    """What no fill, identity and ridge lose against the exact model on held-out text.

    Beside no fill there is the same with a tail so much longer that it costs what ridge does, in multiply-adds.
    """
    from ridgefill_compile.errors import CannotFill
    from ridgefill_compile.evaluate.arms import compare
    from ridgefill_compile.evaluate.equal_cost import longer_tail
    from ridgefill_compile.evaluate.progress import progress
    from ridgefill_compile.evaluate.sources import folder_documents
    from ridgefill_compile.evaluate.tables import arm_table
    from ridgefill_compile.evaluate.texts import split_texts, windows_of
    from ridgefill_compile.evaluate.trained import load_model
    from ridgefill_compile.maps import RidgeMaps

    loaded, tokenizer = load_model(model, model_dtype)
    found = RidgeMaps.load(maps, model=loaded, tokenizer=tokenizer)
    found = found if split is None else found.at(split)
    if text:
        held_out = windows_of(folder_documents(text), tokenizer, rows + 1, windows)
    else:
        held_out = split_texts().held_out(tokenizer, rows + 1, windows)
    longer = None
    with contextlib.suppress(CannotFill):  # the arm without a fill then says why there is none
        longer = longer_tail(loaded, found, rows, tail)
    with progress("held-out text, exact and every arm", len(held_out)) as step:
        figures = compare(loaded, found, held_out, tail, scored, longer=longer, step=step)
    arms = {arm: each.to_dict() for arm, each in figures.items()}
    if not as_json:
        Console().print(arm_table(arms))
    if longer is not None and not as_json:
        Console().print(f"tail {tail}; of equal cost to ridge without a fill: {longer}", highlight=False)
    return {"split": found.split, "tail": tail, "longer_tail": longer, "rows": rows, "windows": windows, "arms": arms}


@app.command("inspect")
@reporting
def inspect_(
    model: Annotated[
        str, typer.Argument(help="Folder, config.json or name of a model, or 'demo'. No weights are read.")
    ],
    rows: Annotated[
        int | None, typer.Option(help="Prompt rows. Default: 4096, or as many as the model has positions for.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option(help="Last rows that run every layer. Default: 512, or half of fewer rows.")
    ] = None,
    split: Annotated[int | None, typer.Option(help="First late layer. Default: half of the layers.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw one late layer into this file.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run a tiny random copy, and check that filling it is right.")
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="With --check: check the model itself. Reads weights.")
    ] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """What the compiler finds in a model: layers, state writes, and the rows each value would be computed on."""
    from ridgefill_compile.evaluate.progress import progress
    from ridgefill_compile.evaluate.tables import inspection_tables
    from ridgefill_compile.evaluate.trained import model_without_weights
    from ridgefill_compile.inspection import inspect_model
    from ridgefill_compile.layer_picture import check_picture, draw_late_layer
    from ridgefill_compile.zoo.tables import verdict_lines

    if picture is not None:
        check_picture(picture)
    with progress("tracing", 1) as step:
        whole = model_without_weights(model)
        found = inspect_model(whole, rows=rows, tail=tail, split=split)
        step()
    result = found.to_dict()
    verdict = check_copy(model, whole.config, found.split, weights) if check or weights else None
    if verdict is not None:
        result |= {**verdict.to_dict(), "reason": verdict.reason or found.reason}
    if picture is not None:
        result["picture"] = str(draw_late_layer(found, picture))
    if not as_json:
        console = Console()
        for part in inspection_tables(found):
            console.print(part)
        for line in verdict_lines(verdict) if verdict is not None else ():
            console.print(line, markup=False, highlight=False)
        if picture is not None:
            console.print(f"picture: {picture}")
    return result


def check_copy(name: str, config: Any, split: int, weights: bool) -> Verdict:
    """Check a tiny random copy of a model, or the model itself.

    Raises:
        RidgefillError: weights are wanted, and there are none.
    """
    from ridgefill_compile.evaluate.progress import progress
    from ridgefill_compile.evaluate.trained import load_model
    from ridgefill_compile.zoo.check import SPLIT, check_model
    from ridgefill_compile.zoo.shrink import shrink, tiny_model

    subject = load_model(name)[0] if weights else tiny_model(shrink(config))
    with progress("checking a fill of it", 1) as step:
        verdict = check_model(subject, name, split=max(split, 0) if weights else SPLIT)
        step()
    return verdict


@app.command()
def zoo(
    types: Annotated[list[str] | None, typer.Argument(help="Model types of transformers. Default: all.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes at a time, of one thread each.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="No padded batch and no continued cache.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = "float32",
    limit: Annotated[float, typer.Option(help="Seconds that one type may take.")] = 600.0,
    resume: Annotated[Path | None, typer.Option(help="JSON lines to go on from, and to add to.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, as each is known.")] = False,
) -> None:
    """Check every causal decoder of transformers at toy size: filled and right, or exact with a reason.

    Ends with exit code 1 if any is unsound: wrong, or crashed.
    """
    from ridgefill_compile.evaluate.progress import progress
    from ridgefill_compile.zoo.pool import check_types
    from ridgefill_compile.zoo.shrink import model_types, require_decoder
    from ridgefill_compile.zoo.tables import counts, verdict_table

    kinds = types or model_types()
    try:
        if dtype not in ("float32", "bfloat16", "float16"):
            raise OptionError(f"dtype must be float32, bfloat16 or float16, not {dtype!r}")
        for kind in kinds:
            require_decoder(kind)
    except RidgefillError as error:
        fail(error)
    verdicts = []
    with progress("checking decoders", len(kinds)) as step:
        for verdict in check_types(kinds, jobs=jobs, quick=quick, dtype=dtype, seconds=limit, resume=resume):
            verdicts.append(verdict)
            if as_json:
                typer.echo(json.dumps(verdict.to_dict()))
            step()
    if not as_json:
        console = Console()
        console.print(verdict_table(verdicts))
        console.print(counts(verdicts))
    if not all(verdict.sound for verdict in verdicts):
        raise typer.Exit(1)


@app.command("maps")
@reporting
def show_folder(
    folder: Maps,
    dtype: Annotated[str | None, typer.Option(help="Store them as bfloat16, float32 or int8 in --out.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to save the converted maps in.")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """What a folder of maps holds, and how well they predict held-out rows; or convert them to another dtype."""
    from ridgefill_compile.maps import RidgeMaps

    if (dtype is None) != (out is None):
        raise OptionError("to convert maps, give both --dtype and --out")
    if dtype is None or out is None:
        result = about_maps(folder)
    else:
        RidgeMaps.load(folder).to(dtype).save(out)
        result = {"saved": str(out), **about_maps(out)}
    if not as_json:
        show_maps(result)
    return result


def about_maps(folder: Path) -> dict[str, Any]:
    """What is known about saved maps, plain values only. Reads and checks every file.

    Raises:
        MapsError: the folder holds no maps, or damaged ones.
    """
    from ridgefill_compile.maps import RidgeMaps

    maps = RidgeMaps.load(folder)
    parts = [maps.at(split) for split in maps.splits]
    return {
        "split": maps.split,
        "layer_count": maps.layer_count,
        "width": maps.d_in,
        "cut": maps.cut,
        "dtype": str(maps.dtype).removeprefix("torch."),
        "bytes": sum(part.nbytes for part in parts),
        "calibration": maps.calibration,
        "splits": [
            {
                "split": part.split,
                "layers": list(part.layers),
                "bytes": part.nbytes,
                "penalty": part.penalty,
                "rows": part.rows,
                "first_rows": part.first_rows,
                "states": [layer for layer in part.layers if part.state_difference(layer) is not None],
                "held_out": {str(layer): dict(figures) for layer, figures in part.held_out.items()},
            }
            for part in parts
        ],
    }


def show_maps(result: dict[str, Any]) -> None:
    """Print what is known about maps for people."""
    from ridgefill_compile.splitmaps import HELD_OUT_DTYPE, mean_figure

    console = Console()
    console.print(
        f"maps of a model of {result['layer_count']} layers, width {result['width']}, "
        f"stored as {result['dtype']}, {result['bytes'] / 1e6:.1f} MB"
        f"{'' if result['cut'] == 'input' else ', of ' + result['cut']}"
    )
    columns = ("layers", "MB", "penalty", "rows fitted", "first rows exact", "cosine", "of identity")
    table = Table(Column("split", no_wrap=True), *columns, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for part in result["splits"]:
        layers = part["layers"]
        cosines = [mean_figure(part["held_out"], name) for name in ("cosine", "identity_cosine")]
        table.add_row(
            f"{part['split']}{' (default)' if part['split'] == result['split'] else ''}",
            f"{layers[0]} to {layers[-1]}",
            f"{part['bytes'] / 1e6:.1f}",
            f"{part['penalty']:g}",
            f"{part['rows']:.0f}",
            str(part["first_rows"]),
            *("" if cosine is None else f"{cosine:.4f}" for cosine in cosines),
        )
    console.print(table)
    for part in result["splits"]:
        if part["states"]:
            layers = ", ".join(map(str, part["states"]))
            console.print(f"option state_correction can be used at split {part['split']}, for layers {layers}")
    if HELD_OUT_DTYPE in result["calibration"]:
        console.print(f"the cosines are of the {result['calibration'][HELD_OUT_DTYPE]} maps they were converted from")


if __name__ == "__main__":
    app()
