"""What Inductor makes of a filled prompt on CUDA, without a device: which kernels, in which order, on what memory.

Needs a CUDA build of torch, Triton, a C compiler and CUDA's headers (Triton brings some). A device, where
there is one, is left alone.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.no_device.generate import LAYERS, ROWS, SPLIT, TAIL, WIDTH

FOLDER = Path(__file__).parent / "no_device"
LATE = LAYERS - SPLIT  # layers, of which the first has no map, and the last runs one row
SITE = Path(torch.__file__).parents[1]


def _headers() -> list[Path]:
    """Folders with CUDA's headers, of the version that torch is built for: structures differ from one to the next."""
    version = f"#define CUDART_VERSION {(torch.version.cuda or '').split('.')[0]}0"
    places = [
        SITE / "triton/backends/nvidia/include",
        *SITE.glob("nvidia/cu*/include"),
        Path("/usr/local/cuda/include"),
    ]
    whole = [place for place in places if (place / "crt/host_defines.h").exists()]
    files = {place: place / "cuda_runtime_api.h" for place in whole}
    return [place for place, file in files.items() if file.exists() and version in re.sub(" +", " ", file.read_text())]


HEADERS = _headers()
MISSING = [
    name
    for name, there in {
        "a CUDA build of torch": torch.version.cuda is not None,
        "Triton": importlib.util.find_spec("triton") is not None,
        "a C compiler": shutil.which("gcc") is not None,
        "CUDA's headers": bool(HEADERS),
    }.items()
    if not there
]
HOPPER = ("pooled", "padded", "streamed", "CUDA graphs")
AMPERE = ("odd length",)

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.heavy,
]


@dataclass(frozen=True)
class Line:
    """One call of the generated wrapper: its target, the buffers it reads or writes, and its source."""

    target: str
    operands: tuple[str | None, ...]
    source: str


def run(folder: Path, module: str, *arguments: str, **environment: str) -> Any:
    """What a module of `tests.no_device` writes, run with a device that is not there."""
    for source, library in (("cudart.c", "libnodevice.so"), ("cuda.c", "libcuda.so.1")):
        make = ["gcc", "-shared", "-fPIC", f"-I{HEADERS[0]}", f"-Wl,-soname,{library}", str(FOLDER / source)]
        subprocess.run([*make, "-o", str(folder / library)], check=True)
    settings = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"} | {
        "LD_PRELOAD": str(folder / "libnodevice.so"),
        "LD_LIBRARY_PATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", f"tests.no_device.{module}", str(folder / "result.json"), *arguments]
    root = FOLDER.parents[1]
    done = subprocess.run(command, env=settings | environment, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Generated code by case, where torch prefers cuDNN's attention."""
    return run(tmp_path_factory.mktemp("hopper"), "generate", *HOPPER, NO_DEVICE_CAPABILITY="90")


@pytest.fixture(scope="module")
def ampere(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same, where it does not: of other devices."""
    return run(tmp_path_factory.mktemp("ampere"), "generate", *AMPERE, NO_DEVICE_CAPABILITY="80")


def lines(code: str) -> list[Line]:
    """Calls of kernels, library functions and operators, in the order in which they run."""
    found = []
    for function in ast.walk(ast.parse(code)):
        if not isinstance(function, ast.FunctionDef) or not (function.name.startswith(("call", "partition_"))):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            target = ast.unparse(node.func)
            if target.startswith(("torch.ops.", "extern_kernels.", "aten.")) or target.endswith(".run"):
                operands = tuple(_buffer(argument) for argument in node.args)
                found.append((node.lineno, Line(target, operands, ast.unparse(node))))
    return [line for _, line in sorted(found, key=lambda each: each[0])]


def _buffer(argument: ast.expr) -> str | None:
    """The buffer or input that an argument names, through views."""
    if isinstance(argument, ast.Call) and ast.unparse(argument.func) == "reinterpret_tensor":
        return _buffer(argument.args[0])
    return argument.id if isinstance(argument, ast.Name) else None


def attention(code: str) -> list[Line]:
    return [line for line in lines(code) if "attention" in line.target and line.target.startswith("torch.ops.")]


def masks(code: str) -> list[str]:
    """The buffers that calls of attention read masks from, call by call."""
    return [line.operands[3] or "" for line in attention(code) if len(line.operands) > 3 and line.operands[3]]


ALLOWED = (
    "extern_kernels.mm", "extern_kernels.addmm", "extern_kernels.bmm", "torch.ops.aten.sort.stable",
    "torch.ops.aten._scaled_dot_product_cudnn_attention.default",
    "torch.ops.aten._scaled_dot_product_flash_attention.default",
    "torch.ops.aten._scaled_dot_product_efficient_attention.default",
    "torch.ops.ridgefill.from_host.default",
)  # fmt: skip


@pytest.mark.parametrize("case", HOPPER)
def test_all_else_is_triton(hopper: dict[str, str], case: str) -> None:
    others = {line.target for line in lines(hopper[case]) if not line.target.endswith(".run")}
    assert others <= set(ALLOWED)


@pytest.mark.parametrize("case", AMPERE)
def test_no_attention_is_spelled_out(ampere: dict[str, str], case: str) -> None:
    """The kernel that takes a mask takes grouped heads, too: the math kernel would hold scores in float32."""
    kinds = [line.target.split("_")[4] for line in attention(ampere[case])]
    assert kinds == ["flash"] * SPLIT + ["efficient"] * LATE


def test_the_mask_is_made_once(hopper: dict[str, str]) -> None:
    found = masks(hopper["pooled"])
    assert len(found) == LATE
    assert len(set(found[:-1])) == 1, "one for all layers but the last, which runs one row"


@pytest.mark.parametrize("case", AMPERE)
def test_the_mask_is_made_once_without_cudnn(ampere: dict[str, str], case: str) -> None:
    found = masks(ampere[case])
    assert len(found) == LATE
    assert len(set(found[:-1])) == 1


def test_each_matrix_of_codes_is_made_right_before_its_product(hopper: dict[str, str]) -> None:
    calls = lines(hopper["pooled"])
    products = [place for place, line in enumerate(calls) if line.target == "extern_kernels.addmm"]
    assert len(products) == LATE - 1
    for place in products:
        matrix = calls[place].operands[2]
        made = max(i for i in range(place) if matrix in calls[i].operands)
        assert place - made <= 2
        assert calls[made].target.startswith("triton_poi_")
        assert not any(matrix in line.operands for line in calls[:made] if line.target == "extern_kernels.addmm")


def test_streamed_maps_are_fetched_layer_by_layer(hopper: dict[str, str]) -> None:
    """Each behind the layer's attention and before the next one's, and read at once."""
    calls = lines(hopper["streamed"])
    order = [
        "attention" if "attention" in line.target else "fetch" if "from_host" in line.target else "product"
        for line in calls
        if line.target.startswith("torch.ops.") or line.target == "extern_kernels.addmm"
    ]
    assert order == ["attention"] * SPLIT + ["attention", "fetch", "product"] * (LATE - 1) + ["attention"]
    fetched = [line.operands[:2] for line in calls if line.target == "torch.ops.ridgefill.from_host.default"]
    assert all(ahead == following for (_, ahead), (following, _) in pairwise(fetched))


def test_a_cuda_graph_holds_no_copy_from_the_host(hopper: dict[str, str]) -> None:
    module = ast.parse(hopper["CUDA graphs"])
    for function in ast.walk(module):
        if isinstance(function, ast.FunctionDef) and function.name.startswith("partition_"):
            assert "ridgefill.from_host" not in ast.unparse(function)


def test_the_sizes_are_those_that_were_meant(hopper: dict[str, str]) -> None:
    kept = TAIL + (ROWS - TAIL) // 10
    assert f"({kept + 1}, {ROWS})" in hopper["pooled"]
    assert f"{ROWS - TAIL}, {WIDTH}" in hopper["pooled"]


def test_two_maps_are_held_however_far_the_host_is_ahead(tmp_path: Path) -> None:
    assert run(tmp_path, "stream", NO_DEVICE_BUSY="1") < 3.5


def test_a_model_may_be_spread_over_devices(tmp_path: Path) -> None:
    refused = run(tmp_path, "two_devices", NO_DEVICE_COUNT="2")
    assert len(refused) == 6
    assert not any(refused.values()), refused
