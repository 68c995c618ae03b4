"""How a decoder is called: which arguments its forward takes, and where its cache is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ridgefill_compile.zoo.shrink import token_ids
from ridgefill_compile.zoo.sizes import VOCABULARY

CACHES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")


class LastRows(nn.Module):
    """A decoder that returns the logits of its last rows and its cache, and nothing else.

    For models whose forward takes no `logits_to_keep`: a filled row has no true logits, so a fill needs it said.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        super().__init__()
        self.model, self.rows = model, rows

    def forward(self, **call: Any) -> dict[str, Any]:
        """The model's outputs, cut."""
        output = self.model(**call)
        kept = {name: output[name] for name in CACHES if name in output}
        return {"logits": output["logits"][:, -self.rows :], **kept}


class Caller:
    """A decoder with the arguments that it takes.

    Attributes:
        module: what to call: the model, or the model behind `LastRows`.
        wrapped: whether it is behind `LastRows`.
    """

    def __init__(self, model: nn.Module, kept: int) -> None:
        self.model = model
        self.names = set(inspect.signature(model.forward).parameters)
        self.always: dict[str, Any] = {"use_cache": True} if "use_cache" in self.names else {}
        self.wrapped = "logits_to_keep" not in self.names
        if self.wrapped:
            self.module: nn.Module = LastRows(model, kept)
        else:
            self.module = model
            self.always["logits_to_keep"] = kept
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        self.vocabulary = min(VOCABULARY, getattr(embedding, "num_embeddings", VOCABULARY))

    def ids(self, rows: int, batch: int = 1, seed: int = 0) -> Tensor:
        """Random prompts of the model's tokens, [batch, rows], int64."""
        return token_ids(rows, batch, seed) % self.vocabulary

    def prompt(self, ids: Tensor) -> dict[str, Any]:
        """A call with one prompt, or prompts of the same length. A model that makes no cache of its own gets an empty
        one, as `generate` gives it.
        """
        call = {"input_ids": ids, **self.always}
        name = self._wanted_cache
        if name is None:
            return call
        assert isinstance(self.model, PreTrainedModel)
        return {**call, name: DynamicCache(config=self.model.config)}

    @functools.cached_property
    def _wanted_cache(self) -> str | None:
        """The argument for a cache, of a model that returns none when it is called without."""
        name = next((name for name in ("cache", "past_key_values") if name in self.names), None)
        if name is None or not isinstance(self.model, PreTrainedModel):
            return None
        output = self.module(input_ids=self.ids(3), **self.always)
        return name if all(output.get(each) is None for each in CACHES) else None

    def padded(self, ids: Tensor) -> dict[str, Any] | None:
        """A call whose first prompt is a fifth shorter, padded on the left; None where masks are not taken."""
        if "attention_mask" not in self.names:
            return None
        mask = torch.ones_like(ids)
        mask[0, : ids.shape[1] // 5] = 0
        return {**self.prompt(ids), "attention_mask": mask}

    def continued(self, first: Tensor, ids: Tensor) -> dict[str, Any] | None:
        """A call that goes on from the cache of a first prompt; None where no cache is returned, or none is taken."""
        call = self.prompt(first)
        output = self.model(**call)
        if self._wanted_cache is not None:
            return {**self.prompt(ids), self._wanted_cache: call[self._wanted_cache]}
        name = next((name for name in CACHES if output.get(name) is not None), None)
        if name is None:
            return None
        taken = name if name in self.names else "past_key_values" if self._takes_anything() else None
        return None if taken is None else {**self.prompt(ids), taken: output[name]}

    def _takes_anything(self) -> bool:
        kinds = [each.kind for each in inspect.signature(self.model.forward).parameters.values()]
        return "past_key_values" in self.names or inspect.Parameter.VAR_KEYWORD in kinds


def worst(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest difference between two lists of tensors, relative to each one's largest entry.

    Infinite where shapes, types, integers or the places of infinite entries differ.
    """
    if len(left) != len(right):
        return float("inf")
    return max((_difference(a, b) for a, b in zip(left, right, strict=True)), default=0.0)


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel() or torch.equal(a, b):
        return 0.0
    if not (a.is_floating_point() or a.is_complex()) or not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    left, right = (x.where(x.isfinite(), 0.0).to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    return float((left - right).abs().max() / max(1.0, float(left.abs().max())))


def logits_of(output: Mapping[str, Any]) -> Tensor:
    """Logits of a model's output."""
    logits: Tensor = output["logits"]
    return logits
