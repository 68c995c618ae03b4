"""Check an installed wheel from outside the checkout: `python check_wheel.py FILE.whl`."""

import collections
import importlib
import importlib.metadata
import pathlib
import subprocess
import sys
import sysconfig
import zipfile

import torch

SITE = pathlib.Path(sysconfig.get_path("purelib")).resolve()


def check_contents(wheel: str) -> None:
    """Every module once, under one package, with the typing marker and without tests."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert "ridgefill_compile/py.typed" in names
    assert "ridgefill_compile/passes/__init__.py" in names
    assert {name.split("/")[0] for name in names} == {"ridgefill_compile"}, names
    assert max(collections.Counter(names).values()) == 1


def check_installed() -> None:
    """The packages come from the wheel, and importing the package computes nothing."""
    for name in ("ridgefill_compile", "ridgefill_compile.passes", "ridgefill_compile.evaluate"):
        module = importlib.import_module(name)
        assert SITE in pathlib.Path(str(module.__file__)).resolve().parents, module.__file__
    located = importlib.metadata.distribution("ridgefill-compile").locate_file("")
    assert pathlib.Path(str(located)).resolve() == SITE, located


def check_backend() -> None:
    """torch finds the backend by its entry point alone, and a model that it cannot fill still answers."""
    assert not any(name.startswith("ridgefill") for name in sys.modules), "check the entry point first"
    assert "ridgefill" in torch._dynamo.list_backends()
    model = torch.nn.Linear(3, 2)
    compiled = torch.compile(model, backend="ridgefill", options={"route": "exact", "inner": "eager"})
    rows = torch.randn(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows), model(rows))


def check_command() -> None:
    """The console script starts."""
    command = pathlib.Path(sys.executable).parent / "ridgefill"
    subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    check_contents(sys.argv[1])
    check_backend()
    check_installed()
    check_command()
    print("wheel: backend listed and run, packages installed once, command starts")
