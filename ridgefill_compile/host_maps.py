"""Maps that stay in host memory: each is copied to the device while the layer before it runs.

    weight = from_host(matrix of layer l in host memory, the same of layer l + 1, a row of layer l)

On CUDA the copy of layer l + 1 is started on a stream of its own when layer l asks for its map (the first is waited
for). So at most two maps are on the device at a time, however far the host is ahead of it: their memory is the reading
stream's, which frees it in the order in which it reads. The row of layer l holds the call in its place: without it,
nothing would keep a compiler from fetching every map first. On the CPU the matrix is copied when its layer runs, and
dropped behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_underway: dict[tuple[int, torch.device], tuple[Tensor, Any, Any]] = {}  # copies on their way, their ends and readers
_streams: dict[torch.device, Any] = {}
_pinned: WeakIdKeyDictionary = WeakIdKeyDictionary()  # stored tensor -> its copy in pinned memory, for all graphs


# What was started for a later call is no part of a CUDA graph that is played again.
@torch.library.custom_op("ridgefill::from_host", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def from_host(stored: Tensor, ahead: Tensor, place: Tensor) -> Tensor:
    """A stored tensor where `place` is, in memory of its own.

    Args:
        stored: any shape and dtype; on CUDA in pinned memory.
        ahead: what will be asked for next, or `stored` itself if nothing is.
        place: on the device, of the layer that asks.
    """
    if place.device.type != "cuda":
        return stored.clone()
    key = _key(stored, place.device)
    arrived, end, reader = _underway.pop(key) if key in _underway else _started(stored, place.device)
    if _key(ahead, place.device) != key:
        _underway[_key(ahead, place.device)] = _started(ahead, place.device)
    now = torch.cuda.current_stream(place.device)
    now.wait_event(end)
    if reader != now:  # a call that was broken off had asked for it
        arrived.record_stream(now)
    return arrived


@from_host.register_fake
def _(stored: Tensor, ahead: Tensor, place: Tensor) -> Tensor:
    return place.new_empty(stored.shape, dtype=stored.dtype)


def _key(stored: Tensor, device: torch.device) -> tuple[int, torch.device]:
    return stored.data_ptr(), device


def _started(stored: Tensor, device: torch.device) -> tuple[Tensor, Any, Any]:
    """A copy on its way, the event that tells its end, and the stream that its memory is of."""
    reader = torch.cuda.current_stream(device)
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    copy = torch.empty_like(stored, device=device)
    _streams[device].wait_stream(reader)  # which may still read what this memory held
    with torch.cuda.stream(_streams[device]):
        copy.copy_(stored, non_blocking=True)
        end = torch.cuda.Event()
        end.record(_streams[device])
    return copy, end, reader


def in_host_memory(stored: Tensor, device: torch.device) -> Tensor:
    """A stored tensor as `from_host` takes it for a device: pinned for CUDA, else as it is (mapped from its file)."""
    if device.type != "cuda":
        return stored.detach().cpu().contiguous()
    if stored not in _pinned:
        _pinned[stored] = stored.detach().cpu().contiguous().pin_memory()
    pinned: Tensor = _pinned[stored]
    return pinned
