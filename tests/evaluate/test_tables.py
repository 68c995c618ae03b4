"""Figures as people read them."""

import io

from rich.console import Console

from ridgefill_compile.evaluate.tables import arm_table, interval


def test_an_interval_shows_its_ends_where_it_has_them():
    assert interval([0.12345, 0.1, 0.2]) == "0.123 [0.100, 0.200]"
    assert interval([0.12345, None, None], 1) == "0.1"


def test_the_table_fits_a_terminal():
    arm = {name: [0.1, 0.0, 0.2] for name in ("delta_nll", "top1_agreement", "kl_mean", "kl_median")}
    output = io.StringIO()
    Console(file=output, width=80).print(arm_table({"none": arm, "ridge": arm}))
    rows = [line for line in output.getvalue().splitlines() if "0.100 [0.000, 0.200]" in line]
    assert len(rows) == 2
    assert "no fill" in rows[0]
    assert "10.0 [0.0, 20.0]" in rows[0]
