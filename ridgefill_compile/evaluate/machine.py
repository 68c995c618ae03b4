"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def machine() -> str:
    """Processor, cores this process may use, threads torch uses, and memory, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    threads = torch.get_num_threads()
    return f"{processor()}, {cores} cores, {threads} threads, {memory:.0f} GiB, {platform.system()}"


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of what decides the figures."""
    names = ("torch", "transformers", "ridgefill-compile")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def version(name: str) -> str:
    """Version of an installed package; "not installed" where it runs from a checkout."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def resident(name: str) -> int:
    """A size of this process in bytes, from the kernel's list."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the kernel tells no {name}")
    return 1024 * int(found[1])
