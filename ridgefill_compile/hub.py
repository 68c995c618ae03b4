"""Maps on the Hugging Face Hub: the same directory in a repository, beside a model card that says what they are."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import huggingface_hub

from ridgefill_compile.card import model_card
from ridgefill_compile.errors import MapsError
from ridgefill_compile.mapfiles import MANIFEST

if TYPE_CHECKING:
    from ridgefill_compile.maps import RidgeMaps

T = TypeVar("T")

# A path that is no directory yet, such as "./maps", "maps/" or "maps", is not meant to be asked for on the network.
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_TENSOR_FILES = "split-*.safetensors"  # of all splits; a repository may hold a model's own weights too
_LOG_IN = "log in (hf auth login), or pass token="


def read(
    source: str,
    load: Callable[[Path], T],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> T:
    """`load(directory)` of a directory, or of a repository's files in the Hub's cache, where they are fetched to.

    Args:
        source: a directory; or, if nothing is there, "user/repository".
        load: reads the maps.
        revision: branch, tag or commit.
        token: for a private repository.
        cache_dir: where the cache is.
        local_files_only: ask nobody.

    Raises:
        MapsError: what `load` raises; or the repository is not there, cannot be reached, or holds no maps.
    """
    if Path(source).exists() or not _REPOSITORY.fullmatch(source):
        return load(Path(source))
    try:
        fetched = huggingface_hub.snapshot_download(
            source,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=[MANIFEST, _TENSOR_FILES],
        )
    except Exception as error:  # which, depends on the client's version and its HTTP library
        raise MapsError(_why_not_fetched(error, source, revision, local_files_only)) from error
    root = Path(fetched)
    if not (root / MANIFEST).is_file():
        raise MapsError(f"{source} on the Hub holds no maps: there is no {MANIFEST}; see RidgeMaps.push_to_hub")
    try:
        return load(root)
    except MapsError as error:
        raise MapsError(f"the maps of {source} on the Hub: {error}; to fetch them anew, delete {root}") from error


def push(
    maps: RidgeMaps,
    repo_id: str,
    *,
    private: bool | None,
    token: str | bool | None,
    commit_message: str,
    revision: str | None,
) -> str:
    """Upload maps and their model card, and remove the maps that were there; the repository's full name.

    Raises:
        MapsError: the Hub cannot be reached, or refuses.
    """
    api = huggingface_hub.HfApi(token=token)
    try:
        full_name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(full_name, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            maps.save(folder)
            (Path(folder) / "README.md").write_text(model_card(maps, full_name), encoding="utf-8")
            api.upload_folder(
                repo_id=full_name,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                delete_patterns=_TENSOR_FILES,
            )
    except Exception as error:  # as above
        raise MapsError(_why_not_pushed(error, repo_id)) from error
    return full_name


def _why_not_fetched(error: Exception, source: str, revision: str | None, local_files_only: bool) -> str:
    from huggingface_hub import errors  # slow to import

    if isinstance(error, errors.GatedRepoError):
        return f"{source} on the Hub is gated: ask for access on its page, then {_LOG_IN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no directory {source}, and no repository of that name on the Hub; "
            f"if it is a private one, {_LOG_IN}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{source} on the Hub has no revision {revision!r}: pass a branch, tag or commit of it"
    if isinstance(error, errors.LocalEntryNotFoundError) and local_files_only:
        return f"there is no directory {source}, and no such repository in the Hub's cache; allow its download once"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            f"there is no directory {source}, no such repository in the Hub's cache, and the Hub cannot be reached: "
            "try again online, or pass a directory of maps"
        )
    return f"{source} cannot be fetched from the Hub: {_first_line(error)}"


def _why_not_pushed(error: Exception, repo_id: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return f"{repo_id!r} cannot be the name of a repository: {_first_line(error)}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.LocalTokenNotFoundError) or status in (401, 403, 404):
        return f"the Hub does not let you write to {repo_id}: {_LOG_IN}, of one that may write there"
    if status is None:
        return (
            f"the maps were not pushed to {repo_id} ({_first_line(error)}): try again online, "
            "or save() them and upload the directory"
        )
    return f"the Hub refuses the maps for {repo_id}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
