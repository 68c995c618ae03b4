"""What a model and a tokenizer are recognised by, cheaply and without names."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ridgefill_compile.errors import OptionError

Match = Literal["same", "other weights", "other shapes"]

_SAMPLES = 64
# Says how a tokenizer splits text, and what it puts around it, beyond its vocabulary.
_PROBE = "The 3 naïve   foxes of code:\n\tif x_1 != 0xFF { return '日本'; } // 2,048…"


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers give it."""

    def __call__(self, text: str, *, verbose: bool = ...) -> Mapping[str, Any]:
        """`{"input_ids": [...]}` of one text."""

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""


def parameter_digests(parameters: Iterable[Tensor]) -> frozenset[str]:
    """One digest a parameter, such as `"576x1536:9f86d081884c7d65"`.

    Hashes the shape and 64 evenly spaced values rounded to bfloat16: a bfloat16 and a float32 copy of the
    same weights agree, names do not matter, and a large model takes milliseconds.
    """
    return frozenset(_digest(parameter) for parameter in _distinct(parameters))


@dataclass(frozen=True)
class ModelFingerprint:
    """What the model that maps were calibrated on is recognised by.

    Attributes:
        digests: `parameter_digests` of all its parameters.
        shapes: parameter shape, such as `"576x1536"`, -> how many parameters have it.
    """

    digests: frozenset[str]
    shapes: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module) -> ModelFingerprint:
        """Fingerprint of a model; shared parameters count once."""
        parameters = list(model.parameters())
        return cls(parameter_digests(parameters), Counter(_shape(tensor) for tensor in parameters))

    def match(self, parameters: Iterable[Tensor], layers: int) -> Match:
        """Whether these parameters, all or some of a model's, can be those of the calibrated model.

        Args:
            parameters: for instance those that one compiled graph reads.
            layers: how many layers the calibrated model has.

        Returns:
            "same": each is a parameter of the calibrated model. "other shapes": the shapes that the
            calibrated model repeats in every layer are not found, or more often than there. "other
            weights": anything between, such as a fine-tuned model, one with an adapter, or one with tokens
            added.
        """
        given = list(_distinct(parameters))
        found = Counter(_shape(tensor) for tensor in given)
        repeated = self._repeated(layers)
        if not any(shape in found for shape in repeated or self.shapes):
            return "other shapes"
        if any(found[shape] > count for shape, count in repeated.items()):
            return "other shapes"
        return "same" if parameter_digests(given) <= self.digests else "other weights"

    def match_whole(self, model: nn.Module, layers: int) -> Match:
        """As `match`, for a whole model: what every layer repeats must then be there exactly as often."""
        parameters = list(model.parameters())
        found = Counter(_shape(tensor) for tensor in parameters)
        if any(found[shape] != count for shape, count in self._repeated(layers).items()):
            return "other shapes"
        return self.match(parameters, layers)

    def key(self) -> str:
        """The fingerprint in one short hash."""
        return _hash(json.dumps(sorted(self.digests)).encode())

    def _repeated(self, layers: int) -> dict[str, int]:
        """The shapes that tell width and depth. Embeddings are too few to be among them: those may change."""
        return {shape: count for shape, count in self.shapes.items() if count >= max(layers, 2)}


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Hash of the vocabulary (ids and added tokens included) and of how a fixed text is tokenised.

    The text says what a vocabulary does not: merges, normalisation, and the special tokens put around a
    text. What does not change the ids of a text, such as the choice of a padding token or a chat template,
    does not matter.

    Raises:
        OptionError: the object is not a tokenizer that can be called and lists its vocabulary.
    """
    try:
        vocabulary = sorted(tokenizer.get_vocab().items())
        probe = [int(token) for token in tokenizer(_PROBE, verbose=False)["input_ids"]]
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise OptionError(f"{type(tokenizer).__name__} cannot be used as a tokenizer: {error}") from error
    return _hash(json.dumps([vocabulary, probe]).encode())


def _distinct(parameters: Iterable[Tensor]) -> Iterable[Tensor]:
    return {id(tensor): tensor for tensor in parameters}.values()


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _digest(parameter: Tensor) -> str:
    flat = parameter.detach().reshape(-1)
    if flat.numel() == 0:
        return f"{_shape(parameter)}:empty"
    at = torch.arange(_SAMPLES, device=flat.device) * (flat.numel() - 1) // (_SAMPLES - 1)
    values = flat[at].to(torch.bfloat16).view(torch.int16).cpu().numpy().astype("<i2").tobytes()
    return f"{_shape(parameter)}:{_hash(_shape(parameter).encode() + values)}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
