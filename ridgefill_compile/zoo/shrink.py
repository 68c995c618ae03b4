"""Any causal decoder's configuration at toy size, with the same anatomy: layer kinds, head sharing, ranks, windows.

One mechanism serves every model type, by the names of configuration entries (`zoo.sizes`) and how they relate: key
heads divide query heads, per-layer lists are cut to the same few layers, rotary sections add up to half a head, token
ids lie in the vocabulary. What it gives is a configuration of the same class, so the model built from it runs the same
code as the real one, in milliseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ridgefill_compile.errors import OptionError
from ridgefill_compile.zoo.sizes import (
    HIDDEN,
    KEY_HEADS,
    LAYER_COUNTS,
    LAYER_NUMBERS,
    LAYERS,
    NOT_TEXT_DECODERS,
    SETTINGS,
    SIZES,
    VOCABULARY,
    WIDTHS,
)

MOST_LAYERS = 6
_SIZE_OF = {name: size for size, names in SIZES.items() for name in names}
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
_DERIVED = ("qk_head_dim", "transformers_version", "num_logits_to_keep")  # worked out anew, or of no interest


def model_types() -> list[str]:
    """Every model type of transformers that is a causal text decoder, in order."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_TEXT_DECODERS))


def require_decoder(kind: str) -> None:
    """Raise OptionError, with the reason, if there is no such model type or it is no causal text decoder."""
    if kind in NOT_TEXT_DECODERS:
        raise OptionError(f"{kind} is no text decoder: {NOT_TEXT_DECODERS[kind]}")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise OptionError(f"{kind} is no model type with a causal decoder in this version of transformers")


def tiny_config(kind: str, **settings: Any) -> PretrainedConfig:
    """The defaults of a model type, shrunk.

    Args:
        kind: a key of `transformers.CONFIG_MAPPING`.
        settings: entries that override what shrinking makes of them.

    Raises:
        OptionError: there is no such model type, or it is no text decoder.
    """
    require_decoder(kind)
    return shrink(CONFIG_MAPPING[kind](), **settings)


def shrink(config: PretrainedConfig, **settings: Any) -> PretrainedConfig:
    """A configuration of the same class and anatomy with about 4 layers of width 64. The given one is left alone."""
    entries = _shrink_entries(config.to_dict())
    for name, value in {**SETTINGS.get(config.model_type, {}), **settings}.items():
        _set(entries, name.split("."), value)
    shrunk: PretrainedConfig = type(config).from_dict(entries)
    return shrunk


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model of this configuration with random weights, in eval mode, fp32, on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    enliven(model, seed)
    model.eval()
    return model


def enliven(model: nn.Module, seed: int = 0) -> None:
    """Redraw every weight, in place, so that each of them moves the outputs far beyond rounding.

    The usual initialisation (std 0.02, biases 0, norms 1) makes a tiny model's layers near no-ops, on which a
    wrong rewrite goes unseen. Matrices get std 1 / sqrt(columns), kept within 0.05 to 0.3. Vectors and
    constants (biases, norms, decays) keep their place and get noise of std 0.1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # tied weights are listed once
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2 or bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * min(max(parameter.shape[-1] ** -0.5, 0.05), 0.3))


def token_ids(rows: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random prompt of shape [batch, rows], int64, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, rows), generator=generator)


def _set(entries: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        entries = entries[name]
    entries[path[-1]] = value


def _shrink_entries(old: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of one configuration, nested ones included."""
    layers = pick_layers(old)
    new: dict[str, Any] = {}
    for name, value in old.items():
        if name in _DERIVED:
            continue
        if isinstance(value, Mapping) and "model_type" in value:
            new[name] = _shrink_entries(value)
        elif name == "per_layer_config" and value:
            new[name] = _overrides_of_layers(value, layers, old)
        elif name in LAYER_COUNTS and isinstance(value, int):
            new[name] = len(layers) if value > 1 else value
        elif name == "moe_layer_end_index" and isinstance(value, int):
            new[name] = min(value, len(layers) - 1)
        elif name in LAYER_NUMBERS and isinstance(value, Sequence):
            new[name] = [place for place, layer in enumerate(layers) if layer in value]
        elif _is_per_layer(name, value, _layer_count(old)):
            new[name] = [_scalar(name, value[layer], old) for layer in layers]
        else:
            new[name] = _scalar(name, value, old)
    _shrink_rotary(old, new)
    if "is_decoder" in new and not new.get("is_encoder_decoder"):
        new["is_decoder"] = True  # an encoder's class is a decoder, with a cache, only when told so
    return new


def _layer_count(entries: Mapping[str, Any]) -> int:
    return next((int(entries[name]) for name in LAYER_COUNTS if isinstance(entries.get(name), int)), 0)


def _is_per_layer(name: str, value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count > 1 and name not in LAYER_NUMBERS


def pick_layers(entries: Mapping[str, Any]) -> list[int]:
    """The layers to keep, by number: at least 4, in order, and one at least of every kind.

    A layer's kind is what the per-layer lists and overrides say of it. The first four are kept if they show every kind;
    else one of each run of equal layers, which keeps who follows whom.
    """
    count = _layer_count(entries)
    kinds = _kinds(entries, count)
    if set(kinds[:LAYERS]) == set(kinds):
        return [layer % count for layer in range(LAYERS)] if count > 1 else [0]
    runs = [layer for layer in range(count) if layer == 0 or kinds[layer] != kinds[layer - 1]]
    firsts = {kinds.index(kind) for kind in kinds}
    picked = set(firsts)
    for layer in runs:
        if len(picked) < max(LAYERS, min(len(firsts), MOST_LAYERS)):
            picked.add(layer)
    for layer in reversed(range(count)):
        if len(picked) < LAYERS:
            picked.add(layer)
    return sorted(picked)


def _kinds(entries: Mapping[str, Any], count: int) -> list[str]:
    lists = [value for name, value in entries.items() if _is_per_layer(name, value, count)]
    numbers = [entries[name] for name in LAYER_NUMBERS if isinstance(entries.get(name), Sequence)]
    overrides = {int(layer): value for layer, value in (entries.get("per_layer_config") or {}).items()}
    return [
        repr(([value[layer] for value in lists], [layer in value for value in numbers], overrides.get(layer)))
        for layer in range(count)
    ]


def _overrides_of_layers(old: Mapping[Any, Any], layers: list[int], entries: Mapping[str, Any]) -> dict[int, Any]:
    by_number = {int(layer): value for layer, value in old.items()}
    return {
        place: {name: _override(name, value, entries) for name, value in by_number[layer].items()}
        for place, layer in enumerate(layers)
        if layer in by_number
    }


def _override(name: str, value: Any, entries: Mapping[str, Any]) -> Any:
    """One layer's own value: it stays larger, smaller or equal to the one that all layers share."""
    shared = entries.get(name)
    if not isinstance(shared, int) or not isinstance(value, int):
        return _scalar(name, value, entries)
    shrunk: int = _scalar(name, shared, entries)
    return shrunk if value == shared else 2 * shrunk if value > shared else max(1, shrunk // 2)


def _scalar(name: str, value: Any, entries: Mapping[str, Any]) -> Any:
    """One entry's shrunk value."""
    if "token" in name and name.endswith(("_id", "_ids", "_index")):
        return _token(name, value)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name in KEY_HEADS:
        heads = entries.get(KEY_HEADS[name]) or _first(entries, "num_attention_heads", "n_heads", "n_head")
        return value if value <= 1 else 4 if value == heads else 2
    if name in WIDTHS:
        hidden = _first(entries, *SIZES[HIDDEN])
        return max(8, round(value * HIDDEN / hidden / 8) * 8) if hidden else value
    if name in ("head_dim", "global_head_dim", "swa_head_dim"):
        return _head_dim(name, value, entries)
    if name == "linear_num_value_heads":
        return 2 if value == entries.get("linear_num_key_heads") else 4
    if name == "linear_value_head_dim":
        return 16 if value == entries.get("linear_key_head_dim") else 32
    return min(value, _SIZE_OF.get(name, value))


def _head_dim(name: str, value: int, entries: Mapping[str, Any]) -> int:
    """16 where heads fill the hidden size, as they do by default; else 24, and 32 where kinds of heads differ."""
    if name != "head_dim" and value != entries.get("head_dim"):
        return 32
    rope, nope = entries.get("qk_rope_head_dim"), entries.get("qk_nope_head_dim")
    if rope and nope:  # latent attention: another name for one of its widths
        return _SIZE_OF["qk_rope_head_dim"] + (_SIZE_OF["qk_nope_head_dim"] if value >= rope + nope else 0)
    heads, hidden = _first(entries, *_HEADS), _first(entries, *SIZES[HIDDEN])
    return 16 if not heads or not hidden or value * heads == hidden else 24


def _token(name: str, value: Any) -> Any:
    """Padding is 0, beginnings are 1 and whatever else is 2: prompts hold none of them."""
    if isinstance(value, list | tuple):
        return [_token(name, one) for one in value]
    if not isinstance(value, int) or value < 0:
        return value
    return 0 if name.startswith("pad") else 1 if name.startswith("bos") else 2


def _first(entries: Mapping[str, Any], *names: str) -> int:
    return next((entries[name] for name in names if isinstance(entries.get(name), int)), 0)


def _shrink_rotary(old: Mapping[str, Any], new: dict[str, Any]) -> None:
    """Lists per rotary frequency and sections of them fit the new head; absolute rotary widths keep their share."""
    head = _rotary_head(new)
    before = _rotary_head(old)
    rotary = new.get("rotary_dim")
    if isinstance(rotary, int) and head and before:
        new["rotary_dim"] = max(2, rotary * head // before // 2 * 2)
    parameters = new.get("rope_parameters")
    if not isinstance(parameters, Mapping) or not head or not before:
        return
    nested = any(isinstance(value, Mapping) for value in parameters.values())
    kinds = parameters if nested else {"": parameters}
    found = {kind: _rotary(value, head) if isinstance(value, Mapping) else value for kind, value in kinds.items()}
    new["rope_parameters"] = found if nested else found[""]


def _rotary(parameters: Mapping[str, Any], head: int) -> dict[str, Any]:
    result = dict(parameters)
    half = int(head * (result.get("partial_rotary_factor") or 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(result.get(name), Sequence):
            result[name] = [result[name][0]] * half
    sections = result.get("mrope_section")
    if isinstance(sections, Sequence) and sum(sections):
        rest = half // len(sections)
        result["mrope_section"] = [half - rest * (len(sections) - 1), *[rest] * (len(sections) - 1)]
    return result


def _rotary_head(entries: Mapping[str, Any]) -> int:
    """Width of what rotary embeddings turn: part of a latent head, or a head."""
    own = _first(entries, "qk_rope_head_dim", "head_dim")
    heads, hidden = _first(entries, *_HEADS), _first(entries, *SIZES[HIDDEN])
    return own or (hidden // heads if heads else 0)
