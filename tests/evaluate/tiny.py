"""A tiny random decoder, a tokenizer with a chat template, and made-up text: the demo's parts in a second."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ridgefill_compile.evaluate.sources import SHORTEST, Source
from ridgefill_compile.evaluate.texts import Texts, split_texts
from ridgefill_compile.maps import RidgeMaps, SplitMaps

LAYERS, WIDTH = 4, 32
WORDS = ["row", "prefix", "tail", "split", "layer", "map", "state", "arm", "value", "write"]
EXTRA = "What is the text above about ? access code of archive room Note : 4829173 . user assistant"
ASKED = "The special number for Answer with only 0 1 2 3 4 5 6 7 8 9"
TEMPLATE = (
    "{% for message in messages %}user {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %} assistant {% endif %}"
)


def tiny_model() -> Any:
    """Four random layers of width 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer(digits: bool = False) -> Any:
    """A token a word; if asked for, a token a digit."""
    words = ["<pad>", "<unk>", *dict.fromkeys([*WORDS, *EXTRA.split(), *ASKED.split()])]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    apart = [pre_tokenizers.Whitespace(), *([pre_tokenizers.Digits(individual_digits=True)] if digits else [])]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(apart)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", chat_template=TEMPLATE
    )


def tiny_maps(split: int = 2, scale: float = 0.05) -> RidgeMaps:
    """Maps near the identity."""
    generator = torch.Generator().manual_seed(1)
    late = range(split + 1, LAYERS)
    matrices = {n: torch.eye(WIDTH) + scale * torch.randn(WIDTH, WIDTH, generator=generator) for n in late}
    offsets = {layer: torch.zeros(WIDTH) for layer in late}
    return RidgeMaps([SplitMaps(split, matrices, offsets)], layer_count=LAYERS)


def made_up_text(name: str, length: int = SHORTEST) -> str:
    """Random words, the same for the same name."""
    generator = random.Random(name)
    text = ""
    while len(text) < length:
        text += " ".join(generator.choices(WORDS, k=100)) + "\n"
    return text


def made_up_sources(count: int, prefix: str = "") -> list[Source]:
    """Prose and code, `count` of each."""
    names = [(f"{prefix}{kind}{number}", kind) for kind in ("prose", "code") for number in range(count)]
    return [Source(name, kind, partial(made_up_text, name)) for name, kind in names]  # type: ignore[arg-type]


def made_up_texts() -> Texts:
    """A split of made-up text."""
    return split_texts(made_up_sources(20))
