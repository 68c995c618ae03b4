"""How much device memory streamed maps take, in maps, where the host is far ahead of the device: as JSON.

    python -m tests.no_device.stream result.json

The allocator is torch's own. The device, which is not there, is said to have finished nothing yet (`NO_DEVICE_BUSY=1`),
as it is while a long prompt's early layers run: the host has then called all of them.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch

from ridgefill_compile.host_maps import from_host, in_host_memory

MAPS, WIDTH = 12, 2048


def maps_held() -> float:
    """Memory that torch took from the device while each map was fetched, read and dropped."""
    device = torch.device("cuda:0")
    stored = [in_host_memory(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16), device) for _ in range(MAPS)]
    place = torch.empty(1, device=device)
    before = torch.cuda.memory_reserved()
    for mine, ahead in [*pairwise(stored), (stored[-1], stored[-1])]:
        from_host(mine, ahead, place)
    return (torch.cuda.max_memory_reserved() - before) / stored[0].nbytes


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(maps_held()))
