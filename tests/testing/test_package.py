"""What importing costs, and what is said without hypothesis."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from ridgefill_compile import testing


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout


def test_hypothesis_is_imported_when_it_is_asked_for() -> None:
    out = run(
        """
        import sys, ridgefill_compile, ridgefill_compile.testing.variants
        from ridgefill_compile.testing import assert_rows_sound, check_rule
        print("hypothesis" in sys.modules)
        from ridgefill_compile.testing import decoders
        print("hypothesis" in sys.modules)
        """
    )
    assert out.split() == ["False", "True"]


def test_without_hypothesis_it_is_said_what_to_install() -> None:
    out = run(
        """
        import sys
        sys.modules["hypothesis"] = None
        import ridgefill_compile.testing
        from ridgefill_compile.testing import assert_same_on_demanded_rows, Decoder
        try:
            from ridgefill_compile.testing import decoders
        except ImportError as error:
            print(error)
        """
    )
    assert "pip install 'ridgefill-compile[testing]'" in out
    assert "decoders needs hypothesis" in out


def test_every_name_is_there() -> None:
    assert all(callable(getattr(testing, name)) for name in testing.__all__)
    assert set(testing.__all__) <= set(dir(testing))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        testing.nothing  # noqa: B018
