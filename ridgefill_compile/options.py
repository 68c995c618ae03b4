"""The options of `torch.compile(model, backend="ridgefill", options={...})`, each checked before anything runs."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ridgefill_compile.errors import OptionError
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.passes.splice import SPLICES
from ridgefill_compile.recurrences.tiles import TILE
from ridgefill_compile.selectors import count_of, parse_rows

ROUTES = ("exact", "lossless", "none", "identity", "ridge", "oracle")
INNER_COMPILERS = ("inductor", "eager", "aot_eager")
DUMP_VARIABLE = "RIDGEFILL_DUMP"


@dataclass(frozen=True)
class Options:
    """What to fill and how.

    Attributes:
        maps: directory of saved maps, or a `RidgeMaps`; wanted by `route="ridge"` only.
        route: what late layers read on prefix rows: "exact" (everything: the stock graph), "lossless" (everything that
            anybody needs: rows that nobody reads are dropped), "none" (nothing: the tail attends to itself only),
            "identity" (the split state), "ridge" (its map), "oracle" (the true input).
        split: first late layer; layers `0..split-1` run exactly on every row. Default: the maps' own.
        tail: last prompt rows that run every layer exactly.
        first_rows: first rows of each sequence to run every layer exactly, too, unless a cache holds earlier ones.
            Default: as many as the maps say, for routes "ridge" and "identity".
        rows: what selects prefix rows to run every layer exactly, too: "pooled:0.1", or selectors (`selectors.py`).
        value_rescale: tail rows on which filled values are brought to the length of exact ones, per head; 0: none.
        key_rescale: the same for keys.
        state_correction: how much of the mean difference between exact and filled states of late recurrences is added
            to theirs where the prefix ends; 0: none.
        splice: for measuring alone, since it runs the whole model beside the fill: filled "keys", "values" or "both"
            are the exact model's, or filled keys have the exact ones' norms ("key_norms").
        min_fill: fewest prefix rows worth filling; shorter prompts run the stock graph.
        strict: raise `CannotFill` instead of running exactly with a reason.
        inner: compiler that lowers the rewritten graph.
        mode: passed to Inductor ("default", "max-autotune", ...).
        dump: directory for every pass's graph before and after, as text (or the environment's RIDGEFILL_DUMP).
        verify: check every pass's result (shapes, aliasing, constants); costs compile time.
        stream_maps: keep maps in host memory, and copy each to the model's device while the layer before it runs.
        check_weights: refuse maps that were calibrated on other weights than the model's.
        eliminate: drop the rows nobody reads (False: the slow, obviously right routed graph; for tests).
    """

    maps: Any = None
    route: str = "ridge"
    split: int | None = None
    tail: int = 512
    first_rows: int | None = None
    rows: Any = None
    value_rescale: int = 0
    key_rescale: int = 0
    state_correction: float = 0.0
    splice: str | None = None
    min_fill: int = 256
    strict: bool = False
    inner: str = "inductor"
    mode: str | None = None
    dump: str | None = None
    verify: bool = False
    stream_maps: bool = False
    check_weights: bool = True
    eliminate: bool = True

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Check a user's mapping.

        Raises:
            OptionError: unknown name, wrong type, value out of range, or options that contradict each other.
        """
        values = dict(given or {})
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
                raise OptionError(f"unknown option {name!r}{hint}")
        if mode is not None:
            if values.get("mode", mode) != mode:
                raise OptionError(f"mode given twice: {mode!r} and options['mode'] = {values['mode']!r}")
            values["mode"] = mode
        values.setdefault("dump", os.environ.get(DUMP_VARIABLE) or None)
        if isinstance(values["dump"], Path):
            values["dump"] = str(values["dump"])
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        _one_of("route", self.route, ROUTES)
        _one_of("inner", self.inner, INNER_COMPILERS)
        _whole_number("tail", self.tail, 1)
        _whole_number("min_fill", self.min_fill, 1)
        if self.split is not None:
            _whole_number("split", self.split, 0)
        for name in ("strict", "verify", "stream_maps", "check_weights", "eliminate"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"option {name!r} must be True or False, not {getattr(self, name)!r}")
        for name in ("mode", "dump"):
            if not isinstance(getattr(self, name), str | None):
                raise OptionError(f"option {name!r} must be text, not {getattr(self, name)!r}")
        if not isinstance(self.maps, str | os.PathLike | RidgeMaps | None):
            raise OptionError(f"option 'maps' must be a directory or RidgeMaps, not {self.maps!r}")
        if self.maps == "":
            raise OptionError("option 'maps' is empty: pass a directory or RidgeMaps")
        self._check_rows()
        self._check_correction()
        self._check_state_correction()
        if self.mode is not None:
            _one_of("mode", self.mode, _modes())
        if self.mode is not None and self.inner != "inductor":
            raise OptionError(f"option 'mode' is Inductor's; it cannot go with inner={self.inner!r}")
        self._check_route()

    def _check_route(self) -> None:
        if self.route == "ridge" and self.maps is None:
            raise OptionError(
                "route 'ridge' needs maps: pass options={'maps': directory_or_RidgeMaps} from "
                "ridgefill_compile.calibrate(...), or choose route='identity', 'none' or 'exact'"
            )
        if self.stream_maps and self.route != "ridge":
            raise OptionError(f"option 'stream_maps' is about maps, and route {self.route!r} reads none")
        if self.route in ("none", "identity", "oracle") and self.split is None and self.maps is None:
            raise OptionError(f"route {self.route!r} needs a split: pass options={{'split': first_late_layer}}")

    def _check_rows(self) -> None:
        if self.first_rows is not None:
            _whole_number("first_rows", self.first_rows, 0)
            if self.first_rows > self.min_fill:
                raise OptionError(
                    f"option 'first_rows' is {self.first_rows}, and 'min_fill' lets a prefix have {self.min_fill} rows"
                )
            if self.first_rows and self.route in ("exact", "lossless"):
                raise OptionError(f"option 'first_rows' is about rows of a fill, and route {self.route!r} fills none")
        for selector in parse_rows(self.rows):
            if count_of(selector.share, self.min_fill) < 1:
                raise OptionError(f"option 'rows': {selector.share} of min_fill = {self.min_fill} rows is no row")
        if self.rows is not None and self.route in ("exact", "lossless"):
            raise OptionError(f"option 'rows' selects rows of a fill, and route {self.route!r} fills none")

    def _check_correction(self) -> None:
        for name in ("value_rescale", "key_rescale"):
            _whole_number(name, getattr(self, name), 0)
            if getattr(self, name) > self.tail:
                raise OptionError(f"option {name!r} is {getattr(self, name)} rows of a tail of {self.tail}")
        if self.splice is not None:
            _one_of("splice", self.splice, tuple(SPLICES))
        for name in ("value_rescale", "key_rescale", "splice"):
            if getattr(self, name) and self.route in ("exact", "lossless", "none"):
                raise OptionError(f"option {name!r} corrects filled states, and route {self.route!r} has none")

    def _check_state_correction(self) -> None:
        given: Any = self.state_correction
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < math.inf:
            raise OptionError(f"option 'state_correction' must be a finite number of at least 0, not {given!r}")
        if given == 0:
            return
        if self.route not in ("ridge", "oracle"):
            raise OptionError(
                f"option 'state_correction' corrects what maps predict, and route {self.route!r} reads none of them"
            )
        if self.maps is None:
            raise OptionError("option 'state_correction' needs maps that ridgefill_compile.calibrate_states(...) gave")
        if self.min_fill < TILE:
            raise OptionError(
                f"option 'state_correction' corrects a state behind whole tiles of {TILE} filled rows: 'min_fill' must "
                f"be at least {TILE}, not {self.min_fill}"
            )


def _modes() -> tuple[str, ...]:
    from torch._inductor import list_mode_options  # slow to import

    return tuple(list_mode_options())


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"option {name!r} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def _whole_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"option {name!r} must be a whole number of at least {least}, not {value!r}")
