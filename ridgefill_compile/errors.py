"""What this package raises and warns with."""

from __future__ import annotations


class RidgefillError(Exception):
    """Base of every error this package raises on purpose."""


class OptionError(RidgefillError, ValueError):
    """An option is unknown, or its value cannot be used."""


class MapsError(RidgefillError):
    """A map file or manifest is missing, damaged, foreign, or does not fit the model."""


class CalibrationError(RidgefillError):
    """Calibration cannot start or go on: no text, NaN, a checkpoint of other settings, ..."""


class CannotFill(RidgefillError):
    """A graph cannot be filled soundly, so it is compiled exactly as the model wrote it.

    Attributes:
        reason: what stands in the way, in one sentence.
        node: the graph node (name, op and shape) where it was found, if it was one.
        hint: what the user can do about it.
    """

    def __init__(self, reason: str, node: object = None, hint: str | None = None) -> None:
        self.reason = reason
        self.node = None if node is None else describe_node(node)
        self.hint = hint
        super().__init__(" | ".join(part for part in (reason, self.node, hint) if part))


class RidgefillWarning(UserWarning):
    """Something runs, but not as the user may expect."""


def describe_node(node: object) -> str:
    """Name, op, dtype and shape of an FX node, the layer it belongs to and the source line, on one line."""
    meta = getattr(node, "meta", None)
    if meta is None:
        return str(node)
    value = meta.get("val")
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if hasattr(value, "dtype") else "?"
    text = f"node {node} = {getattr(node, 'target', '?')} -> {kind}"
    stack = list((meta.get("nn_module_stack") or {}).values())
    if stack:
        text += f" in {stack[-1][0]}"
    trace = [line.strip() for line in (meta.get("stack_trace") or "").splitlines() if line.strip(" ^~")]
    if trace:
        text += f" ({trace[-1]})"
    return text
