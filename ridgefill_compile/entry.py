"""What torch loads when it looks up `backend="ridgefill"`: the backend, with recurrences made ready to be traced.

Models write their recurrences as loops, which Dynamo would unroll before any backend sees them. So this is done when
the backend is asked for by name, and not when the package is imported; from then on, also when a modelling file is
loaded.
"""

from __future__ import annotations

from ridgefill_compile.backend import ridgefill
from ridgefill_compile.recurrences.substitute import substitute_recurrences, substitute_when_loaded

__all__ = ["ridgefill"]

substitute_recurrences()
substitute_when_loaded()
