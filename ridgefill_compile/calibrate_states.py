"""Calibration of the states that filled prefixes leave recurrences: how far they are from exact ones, on average."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch import Tensor, nn

from ridgefill_compile.calibrate import evaluating
from ridgefill_compile.documents import read_documents
from ridgefill_compile.errors import CalibrationError, RidgefillWarning
from ridgefill_compile.fingerprint import Tokenizer
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.meter import Meter

FEWEST_PROMPTS = 13  # of fewer, the mean's own error may be larger than what it corrects


def calibrate_states(
    model: nn.Module,
    maps: RidgeMaps,
    texts_or_batches: Iterable[Any],
    *,
    tokenizer: Tokenizer | None = None,
    window: int = 2048,
    progress: bool = True,
    inner: str = "eager",
) -> RidgeMaps:
    """Measure what the option `state_correction` adds to the states of late recurrences.

    Each window of each document is a prompt: it is run exactly and filled, from every split of the maps, and at its end
    the difference of each late recurrence's state is taken. The means over prompts are kept with the maps.

    Args:
        model: the model that the maps were calibrated on, as for `calibrate`.
        maps: its maps; they are left as they are.
        texts_or_batches: as for `calibrate`, but none of the texts that the maps were fitted on: on these, the maps'
            errors are smaller than they will be.
        tokenizer: turns texts into ids.
        window: rows of a prompt. A document's rest of under a quarter of a window is dropped.
        progress: show a progress bar on stderr.
        inner: compiler that lowers the graphs, as in the backend's options.

    Returns:
        The maps, with `state_difference(layer)` of each late layer that has such a state.

    Raises:
        OptionError: texts without a tokenizer, or of a form that is not known.
        CalibrationError: no text is long enough; a state is NaN or infinite; the maps are of another model; or no late
            layer has a recurrence whose state is a matrix with logarithms of its decay.

    Warns:
        RidgefillWarning: of fewer than 13 prompts.
    """
    from ridgefill_compile.collect_states import TerminalStateCollector  # the compiler, wanted only when it runs

    documents = read_documents(texts_or_batches, tokenizer)
    items = len(texts_or_batches) if isinstance(texts_or_batches, Sized) else None
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    sums: dict[int, dict[int, Tensor]] = {split: {} for split in maps.splits}
    prompts = 0
    with evaluating(model), Meter(progress, items) as meter:
        collector = TerminalStateCollector(model, maps, inner)
        for document in documents:
            for ids in document.windows(window):
                for split, found in collector.differences(ids[None].to(device)).items():
                    _add(sums[split], found, f"document {document.index} (counting from 0)")
                prompts += 1
                meter.add_rows(len(ids))
            meter.read(document)
    if not prompts:
        raise CalibrationError(f"no text has a quarter of a window of {window} rows, or more, to measure states on")
    if prompts < FEWEST_PROMPTS:
        warnings.warn(
            f"state differences are means over {prompts} prompts; pass text for at least {FEWEST_PROMPTS}",
            RidgefillWarning,
            stacklevel=2,
        )
    means = {
        split: {layer: (total / prompts).to("cpu", torch.float32) for layer, total in found.items()}
        for split, found in sums.items()
    }
    return maps.with_state_differences(means, prompts)


def _add(sums: dict[int, Tensor], found: dict[int, Tensor], where: str) -> None:
    """Add one prompt's differences, float64 [1, heads, key, value].

    Raises:
        CalibrationError: one is NaN or infinite.
    """
    for layer, difference in found.items():
        if not difference.isfinite().all():
            raise CalibrationError(f"the state of layer {layer} is NaN or infinite on {where}")
        sums[layer] = sums[layer] + difference[0] if layer in sums else difference[0]
