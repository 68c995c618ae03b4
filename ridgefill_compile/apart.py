"""Compiling a model without leaving anything behind in Dynamo's cache of it.

Dynamo keeps what it compiled under the code that was compiled, and stops after a few entries. A calibration or an
inspection must not use up what the user's own `model.compile` will need. So these run the model inside a function whose
code is a copy made for the occasion: the cache goes with it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compile_apart(model: nn.Module, backend: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """`torch.compile(model, backend=backend, **settings)`, for calls of the result only."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    own = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, backend=backend, **settings)
    return compiled
