"""The model card of maps on the Hub: what they are, how good, and how to use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgefill_compile.splitmaps import HELD_OUT_DTYPE, INPUT, mean_figure

if TYPE_CHECKING:
    from ridgefill_compile.maps import RidgeMaps

_CARD = """\
---
library_name: ridgefill-compile
tags:
- ridgefill
- ridge-maps
- torch.compile
- prefill
- long-context
---

# Ridge maps of {model}

With these maps [ridgefill-compile](https://pypi.org/project/ridgefill-compile/), a `torch.compile` backend, answers
long prompts of one model sooner: most prompt rows run through the early layers only, and the maps predict from the
input of layer {split} the {predicted} of each later layer. They are linear, fitted by ridge regression on ordinary
text. They fit the weights they were calibrated on; loading warns of others.

```python
from ridgefill_compile import RidgeMaps

maps = RidgeMaps.from_pretrained("{repo}", model=model, tokenizer=tokenizer)
model.compile(backend="ridgefill", options={{"maps": maps, "tail": 512}})
```

Stored as {dtype}, {megabytes:.1f} MB{scored}.

| split | layers predicted | rows fitted | penalty | first rows exact | held-out cosine | of the split state itself |
|---|---|---|---|---|---|---|
{rows}

The cosine is that between predicted and true {predicted}, on rows of texts that were not fitted, averaged over layers.
"""


def model_card(maps: RidgeMaps, repo: str) -> str:
    """The text of README.md.

    Args:
        maps: what the repository holds.
        repo: its full name.
    """
    scored = maps.calibration.get(HELD_OUT_DTYPE)
    parts = [maps.at(split) for split in maps.splits]
    return _CARD.format(
        model=f"{maps.calibration.get('model', 'a decoder')} of {maps.layer_count} layers, width {maps.d_in}",
        split=maps.split,
        predicted="inputs" if maps.cut == INPUT else "key and value projections",
        repo=repo,
        dtype=str(maps.dtype).removeprefix("torch."),
        megabytes=sum(part.nbytes for part in parts) / 1e6,
        scored=f"; the figures are of the {scored} maps they were made from" if scored else "",
        rows="\n".join(_row(part, part.split == maps.split) for part in parts),
    )


def _row(maps: RidgeMaps, default: bool) -> str:
    cosines = (mean_figure(maps.held_out, name) for name in ("cosine", "identity_cosine"))
    cells = (
        f"{maps.split} (default)" if default else str(maps.split),
        f"{maps.layers[0]} to {maps.layers[-1]}",
        f"{maps.rows:.0f}",
        f"{maps.penalty:g}",
        str(maps.first_rows),
        *("" if cosine is None else f"{cosine:.4f}" for cosine in cosines),
    )
    return f"| {' | '.join(cells)} |"
