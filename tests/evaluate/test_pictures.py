"""The picture holds what the result says."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ridgefill_compile.evaluate import pictures

RESULT = {
    "model": "tiny",
    "machine": "a machine",
    "layers": 30,
    "split": 15,
    "tail": 512,
    "rows": 4096,
    "delta_nll": {"none": 0.7, "identity": 0.4, "ridge": -0.1},
    "delta_nll_interval": {"none": [0.6, 0.8], "identity": [0.3, 0.5], "ridge": [None, None]},
    "held_out_windows": 8,
    "held_out_rows": 1536,
    "top1_agreement": 0.84,
    "ttft_exact_s": 10.0,
    "ttft_filled_s": 6.25,
    "speedup": 1.6,
    "ceiling_multiply_adds": 1.6,
    "ceiling_layer_passes": 2.0,
}


def test_a_picture_is_written(tmp_path):
    pictures.draw(RESULT, tmp_path / "deep" / "demo.png")
    assert (tmp_path / "deep" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_bars_have_the_heights_of_the_figures():
    axes = Figure().subplots()
    pictures.draw_arms(axes, RESULT)
    assert [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)] == pytest.approx([0.7, 0.4, -0.1])
    low, high = axes.get_ylim()
    assert low < -0.1
    assert high > 0.8


def test_ceilings_are_drawn_where_filled_would_end_at_best():
    axes = Figure().subplots()
    pictures.draw_speed(axes, RESULT)
    assert [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] == [10.0, 6.25]
    assert [np.asarray(line.get_xdata())[0] for line in axes.lines] == [6.25, 5.0]
