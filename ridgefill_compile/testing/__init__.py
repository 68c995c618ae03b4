"""Property-based testing of graph rewrites: random decoders and fills, and what must be equal.

    decoders, routings             strategies of hypothesis
    assert_rows_sound              a decoder's fill: oracle == exact, eliminated == routed
    assert_same_on_demanded_rows   two graphs, or a graph and a rewrite of it
    first_difference               where two graphs part
    check_rule                     one op's row rule

The strategies need hypothesis: `pip install ridgefill-compile[testing]`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgefill_compile.testing.config import DecoderConfig, Routing
    from ridgefill_compile.testing.decoder import Decoder
    from ridgefill_compile.testing.difference import Difference, Mismatch, first_difference
    from ridgefill_compile.testing.graphs import traced, traced_call
    from ridgefill_compile.testing.rules import check_rule
    from ridgefill_compile.testing.soundness import assert_rows_sound, assert_same_on_demanded_rows
    from ridgefill_compile.testing.square import Sample, sample
    from ridgefill_compile.testing.strategies import decoders, routings

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Difference",
    "Mismatch",
    "Routing",
    "Sample",
    "assert_rows_sound",
    "assert_same_on_demanded_rows",
    "check_rule",
    "decoders",
    "first_difference",
    "routings",
    "sample",
    "traced",
    "traced_call",
]

_WHERE = {
    "config": ("DecoderConfig", "Routing"),
    "decoder": ("Decoder",),
    "difference": ("Difference", "Mismatch", "first_difference"),
    "graphs": ("traced", "traced_call"),
    "rules": ("check_rule",),
    "soundness": ("assert_rows_sound", "assert_same_on_demanded_rows"),
    "square": ("Sample", "sample"),
    "strategies": ("decoders", "routings"),
}


def __getattr__(name: str) -> Any:
    where = next((module for module, names in _WHERE.items() if name in names), None)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{where}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "hypothesis":
            raise
        raise ImportError(
            f"ridgefill_compile.testing.{name} needs hypothesis: pip install 'ridgefill-compile[testing]'",
            name="hypothesis",
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
