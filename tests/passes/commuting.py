"""The commuting square of one call, under the name that the samples import it by."""

from __future__ import annotations

from ridgefill_compile.testing.square import Finding, Sample, Size, judge, sample

__all__ = ["Finding", "Sample", "Size", "judge", "sample"]
