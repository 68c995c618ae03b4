"""RidgeFill as a `torch.compile` backend: long prompts start answering sooner.

    maps = ridgefill_compile.calibrate(model, texts, tokenizer=tokenizer, splits=[15])
    maps.save("maps/")
    model.compile(backend="ridgefill", options={"maps": "maps/", "tail": 512})
    model.generate(...)
    print(ridgefill_compile.report(model))

The backend is found by its name without importing this package.
"""

from ridgefill_compile.calibrate import calibrate
from ridgefill_compile.calibrate_states import calibrate_states
from ridgefill_compile.errors import (
    CalibrationError,
    CannotFill,
    MapsError,
    OptionError,
    RidgefillError,
    RidgefillWarning,
)
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.pieces import prompt_length
from ridgefill_compile.report import report

__all__ = [
    "CalibrationError",
    "CannotFill",
    "MapsError",
    "OptionError",
    "RidgeMaps",
    "RidgefillError",
    "RidgefillWarning",
    "calibrate",
    "calibrate_states",
    "prompt_length",
    "report",
]
