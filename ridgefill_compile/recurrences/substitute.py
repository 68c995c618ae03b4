"""Recurrences of modelling files, replaced by operators while Dynamo traces. Eager runs keep the model's own.

Every modelling file holds its own copy of such a function, so it is recognised by its parameters, and then held to
ground truth: it is run beside the operator on small random inputs and replaced only if the results agree. A function
with the right parameters and other arithmetic stays as it is, and the reason is kept.

The replacement is for prompts at inference. Where gradients are enabled, sequences are packed into one, or there is but
one row (decoding) and the function can be traced for it, the traced call is the model's own function.

Dynamo looks for substitutes of functions, not of methods. A method is wrapped in its class instead: outside of Dynamo
the wrapper calls the method as it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgefill_compile.recurrences.samples import Arguments
from ridgefill_compile.recurrences.signatures import SIGNATURES, Signature

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest entry
_FAILS = "fails on a sample"
_PACKED = ("cu_seqlens", "seq_idx")  # arguments that say where packed sequences begin


@dataclass(frozen=True)
class Substitution:
    """What became of one function.

    Attributes:
        function: its qualified name.
        module: the module that defines it.
        operator: name of the operator that Dynamo now sees in its place, or None.
        reason: why there is none; empty if there is one.
    """

    function: str
    module: str
    operator: str | None
    reason: str = ""


_lock = threading.Lock()
_done: dict[types.FunctionType, Substitution] = {}


def known_substitutions() -> list[Substitution]:
    """What became of every function that was looked at so far."""
    with _lock:
        return list(_done.values())


def substitute_recurrences(
    model_or_modules: nn.Module | Iterable[types.ModuleType] | None = None,
) -> list[Substitution]:
    """Substitute every recurrence of the given model's or modules' source that an operator computes as well.

    Safe to call again and from several threads: each function is tried once.

    Args:
        model_or_modules: a model (then the modules that define its parts are searched), modules, or None for all
            modelling files of transformers loaded so far.

    Returns:
        One entry a function that looks like a recurrence, substituted or not.
    """
    found = []
    with _lock, _small_work():
        for function, kind in _functions(_modules(model_or_modules)):
            if function not in _done:
                candidates = [signature for signature in SIGNATURES if _looks_like(function, signature)]
                if not candidates:
                    continue
                _done[function] = _substitute(function, kind, candidates)
            found.append(_done[function])
    return found


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds modelling files of transformers as Python does, and substitutes what they hold once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if _is_modelling(fullname) else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_substitute(module: types.ModuleType) -> None:
            load(module)
            with contextlib.suppress(Exception):  # no reason not to load it; compiling it, it is tried again
                substitute_recurrences([module])

        setattr(spec.loader, "exec_module", load_and_substitute)  # noqa: B010 (a method, to type checkers)
        return spec


def substitute_when_loaded() -> None:
    """From now on, substitute recurrences of modelling files of transformers as soon as they are loaded.

    When a graph shows that one was not, it can be late: around a loop that Dynamo cannot trace it gives up on the whole
    model, and asks for parts of it alone.
    """
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


@contextlib.contextmanager
def _small_work() -> Iterator[None]:
    """No gradients and one thread: toy tensors gain nothing from threads, and on a busy machine lose much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def modelling_files() -> list[str]:
    """Names of all modelling files of transformers loaded so far."""
    return sorted(filter(_is_modelling, list(sys.modules)))


def _is_modelling(module: str) -> bool:
    return module.startswith("transformers.models.") and "modeling_" in module


def files_of(kinds: Iterable[type]) -> list[str]:
    """Names of the files that classes and what they are derived from are defined in, but for Python's and torch's."""
    names = {base.__module__ for kind in kinds for base in kind.__mro__} - {"builtins"}
    return sorted(name for name in names if not name.startswith("torch."))


def _modules(given: nn.Module | Iterable[types.ModuleType] | None) -> list[types.ModuleType]:
    if given is None:
        names = modelling_files()
    elif isinstance(given, nn.Module):
        names = files_of(type(module) for module in given.modules())
    else:
        return list(given)
    return [sys.modules[name] for name in names if name in sys.modules]


def _functions(modules: Iterable[types.ModuleType]) -> Iterator[tuple[types.FunctionType, type | None]]:
    """Functions that the modules define, each once: (function, None), or (method, its class)."""
    seen: set[types.FunctionType] = set()
    for module in modules:
        own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
        methods = [(value, kind) for kind in own if isinstance(kind, type) for value in vars(kind).values()]
        for value, kind in [*((value, None) for value in own), *methods]:
            if isinstance(value, types.FunctionType) and value not in seen:
                seen.add(value)
                yield value, kind


def _parameters(function: types.FunctionType) -> dict[str, inspect.Parameter]:
    try:
        named = inspect.signature(function).parameters.items()
    except (TypeError, ValueError):
        return {}  # a signature of its own that is none
    return {name: p for name, p in named if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def _names_in(function: types.FunctionType) -> set[str]:
    try:
        return set(inspect.unwrap(function).__code__.co_names)
    except (AttributeError, ValueError):
        return set()  # it wraps an object that is no function, or itself


def _looks_like(function: types.FunctionType, signature: Signature) -> bool:
    names = function.__code__.co_varnames
    if "args" not in names and not signature.required <= set(names):
        return False  # told without asking for the signature, which takes long for thousands of functions
    if signature.reads and not signature.reads <= _names_in(function):
        return False
    parameters = _parameters(function).keys()
    return signature.required <= parameters <= signature.required | signature.known | {"self"}


def _substitute(function: types.FunctionType, kind: type | None, candidates: list[Signature]) -> Substitution:
    name, module = function.__qualname__, function.__module__
    reasons = []
    for signature in candidates:
        reason = _difference(function, kind, signature)
        if reason is None:
            done = Substitution(name, module, signature.operator)
            traced = _traced(function, signature)
            if kind is not None:
                _done[_wrap_method(function, kind, traced)] = done
                return done
            try:
                torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)
            except (TypeError, ValueError) as error:
                return Substitution(name, module, None, f"Dynamo does not take a substitute: {error}")
            return done
        reasons.append(reason)
    telling = [reason for reason in reasons if not reason.startswith(_FAILS)] or reasons
    return Substitution(name, module, None, telling[0])


def _wrap_method(method: types.FunctionType, kind: type, traced: Callable[..., Any]) -> types.FunctionType:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return traced(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(kind, method.__name__, wrapped)
    return cast(types.FunctionType, wrapped)


def _traced(function: types.FunctionType, signature: Signature) -> Callable[..., Any]:
    """What Dynamo traces where the model calls the function."""
    names, defaults = tuple(_parameters(function)), _defaults(function)
    compute, applies, original = signature.compute, signature.applies, _copy(function)
    (counted, dim), least = signature.rows, 1 if signature.one_row else 2

    def substituted(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        packed = any(given.get(name) is not None for name in _PACKED)
        is_prompt = given[counted].shape[dim] >= least
        if torch.is_grad_enabled() or packed or not (is_prompt and applies(given)):
            return original(*args, **kwargs)
        return compute(given)

    return substituted


def _copy(function: types.FunctionType) -> types.FunctionType:
    """The function under another identity, for which nothing is substituted."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _defaults(function: types.FunctionType) -> Arguments:
    return {name: p.default for name, p in _parameters(function).items() if p.default is not p.empty}


def _difference(function: types.FunctionType, kind: type | None, signature: Signature) -> str | None:
    """Why the operator is no substitute, found on the samples; None if it is one.

    Decorators that choose between a kernel and the function as written are looked through: where a kernel is chosen, it
    needs a GPU, and is meant to compute the same.
    """
    plain = inspect.unwrap(function)
    taken = _parameters(function).keys()
    defaults = _defaults(function)
    for sample, optional in signature.samples():
        arguments = {name: value for name, value in {"self": None, **sample}.items() if name in taken}
        try:
            if signature.stand_in is not None and kind is not None:
                arguments["self"] = signature.stand_in(kind)
            expected = plain(**_own(arguments))
        except Exception as error:
            if optional:
                continue
            return f"{_FAILS}: {type(error).__name__}: {error}"
        actual = signature.compute({**defaults, **_own(sample), **_own(arguments)})
        reason = _disagreement(expected, actual, sample)
        if reason is not None:
            return reason
    return None


def _own(arguments: Arguments) -> Arguments:
    """Tensors of its own, so that a function that writes into its arguments is seen as it is."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _disagreement(expected: Any, actual: Any, sample: Arguments) -> str | None:
    mine, shape = pytree.tree_flatten(actual)
    theirs, other_shape = pytree.tree_flatten(expected)
    if shape != other_shape:
        return "returns other things"
    allowed = max(_TOLERANCE.get(value.dtype, 0.0) for value in sample.values() if isinstance(value, Tensor))
    for a, b in zip(mine, theirs, strict=True):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if a is not b:
                return "returns other things"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"returns {b.dtype} {list(b.shape)}, the operator {a.dtype} {list(a.shape)}"
        off = (a.double() - b.double()).abs().max().item() / max(b.double().abs().max().item(), 1e-30)
        if not off <= allowed:
            return f"computes something else: off by {off:.1e} of the largest entry"
    return None
