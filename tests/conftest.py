"""Settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from ridgefill_compile.passes import arithmetic_rules, layout_rules
from ridgefill_compile.passes.rules import RULES

# Examples build and trace models, so there is no deadline, and their number is small: the fast tests look for
# what is broken, `HYPOTHESIS_PROFILE=search` for what is rare. Continuous integration draws the same ones.
_NO_HURRY: dict = {
    "deadline": None,
    "print_blob": True,
    "phases": set(hypothesis.Phase) - {hypothesis.Phase.explain},  # it runs hundreds of examples more
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
hypothesis.settings.register_profile("fast", max_examples=20, **_NO_HURRY)
hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, **_NO_HURRY)
hypothesis.settings.register_profile("search", max_examples=500, **_NO_HURRY)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "fast")
hypothesis.settings.load_profile(_PROFILE)


@pytest.fixture(autouse=True)
def fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test starts with a fixed seed, no compiled code, and one thread unless it is heavy.

    Dynamo counts recompilations per code object, not per model. Toy tensors gain nothing from threads, and on
    a busy machine threads cost twenty times the work.
    """
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    if request.node.get_closest_marker("heavy") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much there is to trust: the row rules, by count and lines."""
    rules = Path(arithmetic_rules.__file__), Path(layout_rules.__file__)
    lines = sum(len(path.read_text().splitlines()) for path in rules)
    terminalreporter.write_line(f"row rules: {len(RULES)} ops, {len(set(RULES.values()))} rules, {lines} lines")
