"""A directory of tensor files that is replaced in one step, and read only if it is whole.

The directory holds one safetensors file a part and a manifest, which names each file with its SHA-256 and
carries a checksum of itself. Tensor files are named after their content, so a new one never overwrites an
old one, and the manifest is replaced last: at every moment the directory holds the old parts or the new
ones, whatever happens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgefill_compile.atomic import publish, replace_file, write_flushed
from ridgefill_compile.errors import MapsError

MANIFEST = "manifest.json"
FORMAT = "ridgefill-maps"
VERSION = 1

Tensors = Mapping[str, Tensor]

_LEFTOVER = re.compile(r"(.+-[0-9a-f]{12}\.safetensors|\..+\.partial)")


def write_directory(root: Path, facts: Mapping[str, Any], parts: Mapping[str, Tensors]) -> None:
    """Replace what `root` holds; the directory is made if need be.

    Args:
        root: the directory; two processes must not write it at a time.
        facts: goes into the manifest as it is; JSON values only.
        parts: part name, such as `"split-15"`, -> its tensors.

    Raises:
        OSError: the disk's own errors; the old content is then still there.
    """
    root.mkdir(parents=True, exist_ok=True)
    files = {name: _write_tensors(root, name, tensors) for name, tensors in parts.items()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "written_with": {name: _version(name) for name in ("ridgefill-compile", "torch", "safetensors")},
        "files": files,
        "facts": dict(facts),
    }
    text = json.dumps(manifest | {"sha256": _checksum(manifest)}, indent=1)
    replace_file(root / MANIFEST, lambda aside: _write_text(aside, text))
    named = {file["name"] for file in files.values()}
    for path in root.iterdir():
        if path.name not in named and _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


def read_directory(root: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """What `write_directory` was given: `(facts, parts)`, tensors on the CPU. Every byte is checked.

    Tensors are views of the files, mapped into memory as private pages: what is written to a tensor stays in this
    process, and writing the directory anew changes none, since files are replaced, never overwritten. (Whoever
    truncates a file in place ends the processes that read it.)

    Raises:
        MapsError: nothing there; a file is missing, truncated, altered or not a safetensors file (a pickle
            is never opened); the manifest is foreign, altered or of another version.
    """
    manifest = _read_manifest(root / MANIFEST)
    try:
        named = {part: (Path(file["name"]).name, file["sha256"]) for part, file in manifest["files"].items()}
        facts = dict(manifest["facts"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MapsError(f"{root / MANIFEST} is not complete: {error!r}") from error
    return facts, {part: _read_tensors(root / name, sha256) for part, (name, sha256) in named.items()}


def _write_tensors(root: Path, name: str, tensors: Tensors) -> dict[str, str]:
    aside = root / f".{name}.safetensors.partial"
    # Cloned: safetensors refuses tensors that share memory.
    dense = torch.contiguous_format
    own = {key: tensor.detach().clone(memory_format=dense) for key, tensor in tensors.items()}
    write_flushed(aside, lambda path: save_file(own, path))
    digest = _file_digest(aside)
    file = f"{name}-{digest[:12]}.safetensors"
    publish(aside, root / file)
    return {"name": file, "sha256": digest}


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise MapsError(f"no maps in {path.parent}: there is no {path.name}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MapsError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise MapsError(f"{path} is not a manifest of ridgefill maps")
    version = manifest.get("version")
    if version != VERSION:
        raise MapsError(f"{path} is of format version {version}; this ridgefill-compile reads version {VERSION}")
    if manifest.pop("sha256", None) != _checksum(manifest):
        raise MapsError(f"{path} was altered: it does not match its own checksum")
    return manifest


def _read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    try:
        if _file_digest(path) != sha256:
            what = "is a pickle, which is never opened" if _looks_pickled(path) else "is truncated or altered"
            raise MapsError(f"{path} {what}: it is not the file that its manifest names")
        return load_file(path)  # maps the file, and copies nothing on the CPU
    except FileNotFoundError as error:
        raise MapsError(f"{path}, which the manifest names, is missing") from error
    except (OSError, SafetensorError) as error:
        raise MapsError(f"{path} cannot be read as a safetensors file: {error}") from error


def _looks_pickled(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(8)
    # A safetensors file may start with a pickle's first two bytes, but goes on with the zeros of a length.
    return head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] <= b"\x05" and any(head[4:]))


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
