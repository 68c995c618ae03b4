"""The picture of a late layer: a file that can be opened, with a node of each kind, in its colour."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from ridgefill_compile.inspection import Inspection, inspect_model
from ridgefill_compile.layer_picture import COLOURS, draw_late_layer
from tests.toys import pretrained


@pytest.fixture(scope="module")
def found() -> Inspection:
    return inspect_model(pretrained(layers=3), rows=60, tail=16, split=1)


def pixels(picture: Path, colour: str) -> int:
    """How many pixels of a PNG have this colour."""
    image = matplotlib.image.imread(picture)[..., :3]
    return int((np.abs(image - np.array(to_rgb(colour))).max(axis=-1) < 0.01).sum())


def test_all_three_colours_are_shown(found: Inspection, tmp_path: Path) -> None:
    picture = draw_late_layer(found, tmp_path / "layer.png")
    assert picture == tmp_path / "layer.png"
    height, width, _ = matplotlib.image.imread(picture).shape
    assert width > 1000
    assert height > 1000
    for name, colour in COLOURS.items():
        assert pixels(picture, colour) > 20, name  # in the legend, if nowhere else


def test_nodes_are_coloured_by_their_rows(found: Inspection, tmp_path: Path) -> None:
    """Were every value needed on every row, more of the picture would be red and less of it blue."""
    whole = dataclasses.replace(found, values=[dataclasses.replace(v, rows="all") for v in found.values])
    mixed, red = draw_late_layer(found, tmp_path / "mixed.png"), draw_late_layer(whole, tmp_path / "red.png")
    assert pixels(red, COLOURS["all"]) > pixels(mixed, COLOURS["all"]) > 0
    assert pixels(mixed, COLOURS["tail"]) > 5 * pixels(red, COLOURS["tail"]) > 0


def test_the_suffix_chooses_the_format(found: Inspection, tmp_path: Path) -> None:
    text = draw_late_layer(found, str(tmp_path / "layer.svg")).read_text()
    assert text.lstrip().startswith("<?xml")
    assert "Layer 2 of 3, split 1: rows computed" in text or "<svg" in text


def test_nothing_to_draw(tmp_path: Path) -> None:
    refused = Inspection(rows=60, tail=16, split=1, reason="the moon is in the wrong house")
    with pytest.raises(ValueError, match="nothing would be filled: the moon is in the wrong house"):
        draw_late_layer(refused, tmp_path / "layer.png")
    assert list(tmp_path.iterdir()) == []
