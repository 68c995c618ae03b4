"""Checks of many model types, a process each, with a time limit: a crash or a hang of one is a row, not the end."""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from ridgefill_compile.zoo.check import Verdict, check_model
from ridgefill_compile.zoo.shrink import tiny_config, tiny_model

SECONDS = 600.0  # a type may take, on a busy machine
GOODBYE = 5.0  # seconds that a process may take to end, once it has said what it found
Check = Callable[..., Verdict]  # of a type; and keywords quick and dtype


def check_type(kind: str, quick: bool = False, dtype: str = "float32") -> Verdict:
    """Check one model type of transformers at toy size, in this process."""
    try:
        model = tiny_model(tiny_config(kind)).to(getattr(torch, dtype))
    except Exception as error:  # a model's own code may raise anything
        return Verdict(kind, reason=f"not built: {type(error).__name__}: {error}"[:300])
    return check_model(model, kind, quick=quick)


def check_types(
    kinds: Sequence[str],
    *,
    jobs: int = 1,
    quick: bool = False,
    dtype: str = "float32",
    seconds: float = SECONDS,
    resume: Path | None = None,
    check: Check = check_type,
) -> Iterator[Verdict]:
    """Verdicts of model types, as they come.

    Args:
        kinds: model types.
        jobs: processes at a time, of one thread each.
        quick: prompts of one length and of changing lengths only.
        dtype: of the weights.
        seconds: limit of each.
        resume: file of JSON lines: what it already holds, checked as thoroughly and in this dtype, is not checked
            again; what is found is added to it.
        check: what to do in each process; a function of a module, since processes import it.
    """
    found = _read(resume) if resume is not None and resume.exists() else []
    done = {each.type: each for each in found if each.dtype == dtype and (quick or not each.quick)}
    yield from (done[kind] for kind in kinds if kind in done)
    ahead = [kind for kind in kinds if kind not in done]
    for verdict in _run(ahead, jobs, seconds, partial(check, quick=quick, dtype=dtype)):
        verdict.quick, verdict.dtype = quick, dtype
        if resume is not None:
            with resume.open("a") as file:
                file.write(json.dumps(verdict.to_dict()) + "\n")
        yield verdict


def _read(resume: Path) -> list[Verdict]:
    """What a file holds; a last line that was cut off is taken out of it."""
    whole = [line for line in resume.read_text().splitlines(keepends=True) if line.endswith("\n")]
    resume.write_text("".join(whole))
    return [Verdict(**json.loads(line)) for line in whole]


@dataclass
class _Running:
    """A process that checks one type, and where its verdict comes out."""

    kind: str
    process: BaseProcess
    pipe: Connection
    started: float

    def stop(self, patience: float = 0.0) -> None:
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def _run(kinds: list[str], jobs: int, seconds: float, check: Callable[[str], Verdict]) -> Iterator[Verdict]:
    context = _context()
    ahead, running = list(kinds), list[_Running]()
    try:
        while ahead or running:
            while ahead and len(running) < jobs:
                running.append(_start(context, ahead.pop(0), check))
            wait([each.pipe for each in running], timeout=1.0)
            for each in list(running):
                verdict = _verdict(each, seconds)
                if verdict is not None:
                    running.remove(each)
                    each.stop(GOODBYE if verdict.built else 0.0)
                    yield verdict
    finally:
        for each in running:
            each.stop()


def _context() -> BaseContext:
    """Processes forked from one that has imported everything and started no threads, where the system can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ridgefill_compile.zoo.pool"])
    return context


def _start(context: BaseContext, kind: str, check: Callable[[str], Verdict]) -> _Running:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, kind, check), daemon=True)  # type: ignore[attr-defined]
    process.start()
    there.close()
    return _Running(kind, process, here, time.monotonic())


def _work(pipe: Connection, kind: str, check: Callable[[str], Verdict]) -> None:
    sys.stdout = sys.stderr  # stdout is for results
    torch.set_num_threads(1)  # toy tensors gain nothing from threads
    logging.disable(logging.ERROR)  # what transformers says of each configuration
    warnings.simplefilter("ignore")
    pipe.send(check(kind).to_dict())


def _verdict(running: _Running, seconds: float) -> Verdict | None:
    """What a process found, or what became of it; None while it works."""
    took = round(time.monotonic() - running.started, 2)
    if running.pipe.poll():
        try:
            return Verdict(**running.pipe.recv())
        except EOFError:
            running.process.join()
            return Verdict(
                running.kind, reason=f"the process ended with exit code {running.process.exitcode}", seconds=took
            )
    if took > seconds:
        return Verdict(running.kind, reason=f"took longer than {seconds:g} s", seconds=took)
    return None
