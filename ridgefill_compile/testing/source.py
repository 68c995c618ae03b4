"""Python code that builds a failing example again: imports, the model, its inputs, the assertion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ridgefill_compile.testing.decoder import Decoder

MOST_ENTRIES = 128  # of a tensor that is written out
SOURCE = "ridgefill_source"  # meta key of a traced graph: code that traces it again, without its imports
_HERE = "from ridgefill_compile.testing import"


def of_model(model: nn.Module) -> list[str]:
    """Lines that make `model`. Weights of a model of transformers are drawn anew; an unknown module is only named."""
    if type(model) is Decoder:
        return [f"model = {model!r}"]
    if isinstance(model, PreTrainedModel):
        kind, config = type(model), type(model.config)
        unset = ("transformers_version", "architectures", "model_type", "dtype", "_name_or_path")
        settings = {k: v for k, v in model.config.to_diff_dict().items() if k not in unset}
        return [
            f"from {kind.__module__} import {kind.__name__}",
            f"from {config.__module__} import {config.__name__}",
            "from ridgefill_compile.zoo.shrink import enliven",
            f"model = {kind.__name__}({config.__name__}(**{settings!r})).eval()",
            "enliven(model)  # random weights",
        ]
    return [f"model = ...  # a {type(model).__module__}.{type(model).__qualname__}, built as you built it"]


def of_value(value: Any) -> str:
    """An expression for an argument. Large tensors of floats are drawn anew."""
    if isinstance(value, nn.Parameter):
        value = value.detach()
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, int | float | str | bool | None) else f"...  # {value!r:.80}"
    if value.numel() <= MOST_ENTRIES and not value.is_complex():
        return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
    if value.is_floating_point():
        return f"torch.randn({list(value.shape)}, dtype={value.dtype})"
    return f"torch.randint({int(value.max()) + 1}, {list(value.shape)}, dtype={value.dtype})"


def of_call(call: Mapping[str, Any]) -> list[str]:
    """Lines that make `call`, arguments by name."""
    given = [f"    {name!r}: {of_value(value)}," for name, value in call.items()]
    return ["call = {", *given, "}"]


def of_function(function: Callable[..., Any], name: str) -> str:
    """A line that makes `name` a function that can be imported; or says which one it was."""
    module, own = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module and own.isidentifier():
        return f"from {module} import {own}" + (f" as {name}" if own != name else "")
    return f"{name} = ...  # {own or function!r}"


def program(names: Sequence[str], lines: Sequence[str]) -> str:
    """The lines behind what they import; `names`: of this package."""
    imports = [line for line in lines if line.startswith("from ")]
    rest = [line for line in lines if line not in imports]
    uses = [name for name in ("Decoder", "DecoderConfig") if any(f"{name}(" in line for line in rest)]
    first = ["import torch"] if any("torch." in line for line in rest) else []
    return "\n".join([*first, *imports, f"{_HERE} {', '.join(sorted({*names, *uses}))}", "", *rest])


def settings(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """`, name=value` for each that is not its default."""
    shown = {name: value for name, value in given.items() if value != defaults.get(name)}
    return "".join(f", {name}={value!r}" for name, value in shown.items())


def kept(module: torch.fx.GraphModule) -> list[str] | None:
    """Lines that make `before` and `inputs`, of a graph of `traced_call`."""
    lines: list[str] | None = module.meta.get(SOURCE)
    return lines
