"""Where real text is found on any machine, without a network.

- `code`: the Python standard library's sources;
- `prose`: the language reference that `pydoc` carries, the docstrings of the scientific packages this one
  depends on, documentation files inside site-packages and `/usr/share/doc` (Debian's `jargon-text`,
  `debian-handbook` and `developers-reference` land there when installed).
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import hashlib
import html
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from ridgefill_compile.errors import CalibrationError

Kind = Literal["prose", "code"]
KINDS: tuple[Kind, ...] = ("prose", "code")

SHORTEST = 14_000
"""Characters a document needs: about the 3,072 tokens of a window."""
LONGEST = 200_000
"""Characters read of a document; the rest of a very long one would only cost time."""
LETTERS = 0.4
"""Share of letters a document needs; tables of numbers have fewer."""
HELD_OUT_SHARE = 4
"""One document in so many is held out."""

DOCSTRING_PACKAGES = ("numpy", "scipy", "matplotlib", "networkx", "sympy", "torch")
NOT_SOURCE = {"test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "site-packages"}
NOT_DOCUMENT = re.compile(r"licen[cs]e|copying|copyright|notice|authors|change|news|relnotes|cmakelists")
DOCUMENT_SUFFIX = re.compile(r"\.(rst|md|txt|html)(\.gz)?$")


@dataclass(frozen=True)
class Document:
    """A named text."""

    name: str
    kind: Kind
    text: str


@dataclass(frozen=True)
class Source:
    """A document not read yet: its name decides its place and side, `text` brings its text."""

    name: str
    kind: Kind
    text: Callable[[], str] = field(compare=False)

    @property
    def place(self) -> str:
        """What sources are sorted by: a hash, so that one folder's files lie scattered in the text."""
        return hashlib.sha256(self.name.encode()).hexdigest()

    @property
    def held_out(self) -> bool:
        """Whether the document belongs to the held-out side; independent of its place in the order."""
        return hashlib.sha256(b"side " + self.name.encode()).digest()[0] % HELD_OUT_SHARE == 0

    def read(self) -> Document | None:
        """The document, at most `LONGEST` characters; `None` where unreadable, short or mostly numbers."""
        try:
            text = self.text()[:LONGEST]
        except (
            OSError,
            EOFError,
            ValueError,
            SyntaxError,
            RecursionError,
        ):  # gone, cut off, not text, not Python
            return None
        if len(text) < SHORTEST or sum(map(str.isalpha, text[:SHORTEST])) < LETTERS * SHORTEST:
            return None
        return Document(self.name, self.kind, text)


def machine_sources() -> list[Source]:
    """Every document on this machine that this module knows to look for, in no particular order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = Path(sysconfig.get_paths()["purelib"])
    found = list(code_sources(library, "stdlib"))
    found += topic_sources(library / "pydoc_data" / "topics.py")
    for package in DOCSTRING_PACKAGES:
        found += docstring_sources(packages / package, package)
    found += document_sources(packages, "packages")
    found += document_sources(Path("/usr/share/doc"), "doc")
    return found


def folder_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """A user's own text: files as they are, and every readable file under folders. `.py` is code, all else
    prose.

    Raises:
        CalibrationError: a path does not exist.
    """
    for path in paths:
        if not path.exists():
            raise CalibrationError(f"no text: {path} does not exist")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                with contextlib.suppress(UnicodeDecodeError):  # a picture among the texts
                    yield Document(str(file), "code" if file.suffix == ".py" else "prose", plain_text(file))


def code_sources(root: Path, name: str) -> Iterator[Source]:
    """Python sources below a folder, without tests and generated tables."""
    for file, inside in python_files(root):
        yield Source(f"{name}/{inside}", "code", partial(plain_text, file))


def docstring_sources(root: Path, name: str) -> Iterator[Source]:
    """The docstrings of each Python file below a folder, one document a file."""
    for file, inside in python_files(root):
        yield Source(f"docstrings/{name}/{inside}", "prose", partial(docstrings, file))


def document_sources(root: Path, name: str) -> Iterator[Source]:
    """Documentation files below a folder, without licences and change logs."""
    for file in root.rglob("*"):
        inside = file.relative_to(root).as_posix()
        wanted = DOCUMENT_SUFFIX.search(inside) and not NOT_DOCUMENT.search(inside.lower())
        if wanted and file.is_file() and (file.suffix == ".gz" or large(file)):
            yield Source(f"{name}/{inside}", "prose", partial(plain_text, file))


def topic_sources(file: Path) -> Iterator[Source]:
    """The chapters of the language reference, which `pydoc` carries as one dictionary of texts."""
    if not file.is_file():
        return
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            for topic, text in ast.literal_eval(node).items():
                yield Source(f"topics/{topic}", "prose", partial(str, text))


def python_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Python files below a folder that are large enough, each with its path inside the folder."""
    for file in root.rglob("*.py"):
        inside = file.relative_to(root)
        if NOT_SOURCE.isdisjoint(inside.parts) and not file.name.startswith("_sysconfigdata") and large(file):
            yield file, inside.as_posix()


def large(file: Path) -> bool:
    """Whether a file can hold a document at all; spares reading the many that cannot."""
    try:
        return file.stat().st_size >= SHORTEST
    except OSError:
        return False


def plain_text(file: Path) -> str:
    """The text of a file; unpacked where compressed, without tags where HTML."""
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    text = raw.decode("utf-8")
    if ".html" in file.suffixes:
        text = re.sub(r"(?is)<(script|style|head)\b.*?</\1>|<[^>]+>", "", text)
        text = re.sub(r"\n\s*\n\s*", "\n\n", html.unescape(text))
    return text


def docstrings(file: Path) -> str:
    """All docstrings of a Python file in order, separated by an empty line."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text)
