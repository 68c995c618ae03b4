from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from ridgefill_compile.errors import OptionError
from ridgefill_compile.fingerprint import ModelFingerprint, parameter_digests, tokenizer_fingerprint

LAYERS = 4


def decoder(layers: int = LAYERS, width: int = 8, seed: int = 0, tokens: int = 40) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width)) for _ in range(layers)]
    model = nn.ModuleDict(
        {"embed": nn.Embedding(tokens, width), "blocks": nn.ModuleList(blocks), "norm": nn.LayerNorm(width)}
    )
    for parameter in model.parameters():  # norms start as ones, which every model shares
        nn.init.normal_(parameter)
    return model


class TestDigests:
    def test_bfloat16_and_float32_copies_agree(self):
        full, low = decoder(), decoder().bfloat16()
        assert parameter_digests(full.parameters()) == parameter_digests(low.parameters())
        assert parameter_digests(low.parameters()) == parameter_digests(low.float().parameters())

    def test_names_and_order_do_not_matter(self):
        parameters = list(decoder().parameters())
        assert parameter_digests(parameters) == parameter_digests(reversed(parameters))

    def test_values_and_shapes_do_matter(self):
        weight = torch.arange(12.0).reshape(3, 4)
        digests = [parameter_digests([tensor]) for tensor in (weight, weight + 0.1, weight.reshape(4, 3), weight.T)]
        assert len(set(digests)) == 4

    def test_first_and_last_values_are_sampled(self):
        weight = torch.zeros(1000, 1000)
        first, last = weight.clone(), weight.clone()
        first[0, 0] = last[-1, -1] = 1
        assert len({parameter_digests([tensor]) for tensor in (weight, first, last)}) == 3

    def test_odd_tensors(self):
        tensors = [torch.tensor(3.0), torch.empty(0, 4), torch.arange(5), torch.randn(6, 6).T]
        assert len(parameter_digests(tensors)) == 4


class TestMatch:
    def test_whole_model_subset_and_copy_are_the_same(self):
        model = decoder()
        fingerprint = ModelFingerprint.of(model)
        assert fingerprint.match(model.parameters(), LAYERS) == "same"
        assert fingerprint.match_whole(model, LAYERS) == "same"
        assert fingerprint.match(list(model.parameters())[1:], LAYERS) == "same"
        assert fingerprint.match(list(model.parameters())[1:3], LAYERS) == "same"
        assert fingerprint.match_whole(decoder().bfloat16(), LAYERS) == "same"

    def test_other_weights(self):
        model = decoder()
        fingerprint = ModelFingerprint.of(model)
        assert fingerprint.match_whole(decoder(seed=1), LAYERS) == "other weights"
        with torch.no_grad():
            list(model.parameters())[3].mul_(1.1)
        assert fingerprint.match_whole(model, LAYERS) == "other weights"
        assert fingerprint.match(model.parameters(), LAYERS) == "other weights"

    def test_added_tokens_and_adapters_are_other_weights(self):
        fingerprint = ModelFingerprint.of(decoder())
        assert fingerprint.match_whole(decoder(tokens=41, seed=1), LAYERS) == "other weights"
        adapted = decoder()
        adapted["adapter"] = nn.ModuleList(nn.Linear(8, 2) for _ in range(LAYERS))  # type: ignore[operator]
        assert fingerprint.match_whole(adapted, LAYERS) == "other weights"
        assert fingerprint.match(adapted.parameters(), LAYERS) == "other weights"

    @pytest.mark.parametrize("other", [{"width": 16}, {"layers": LAYERS + 1}, {"layers": 2 * LAYERS}])
    def test_other_widths_or_more_layers_are_other_shapes(self, other):
        fingerprint = ModelFingerprint.of(decoder())
        assert fingerprint.match_whole(decoder(**other), LAYERS) == "other shapes"
        assert fingerprint.match(decoder(**other).parameters(), LAYERS) == "other shapes"

    def test_fewer_layers_are_seen_in_a_whole_model(self):
        """Not in a subset: there, the rest may just not have been passed."""
        fewer = decoder(layers=LAYERS - 1)
        assert ModelFingerprint.of(decoder()).match_whole(fewer, LAYERS) == "other shapes"

    def test_shared_layers_have_no_repeated_shapes(self):
        model = nn.ModuleDict({"embed": nn.Embedding(32, 8), "shared": nn.Linear(8, 8)})
        fingerprint = ModelFingerprint.of(model)
        assert fingerprint.match_whole(model, LAYERS) == "same"
        assert fingerprint.match(nn.Linear(9, 9).parameters(), LAYERS) == "other shapes"

    def test_key_tells_models_apart(self):
        assert ModelFingerprint.of(decoder()).key() == ModelFingerprint.of(decoder().bfloat16()).key()
        assert ModelFingerprint.of(decoder()).key() != ModelFingerprint.of(decoder(seed=1)).key()


class Characters:
    """A tokenizer of single characters."""

    def __init__(self, shift: int = 0, start: tuple[int, ...] = (), extra: tuple[str, ...] = ()) -> None:
        self.shift, self.start, self.extra, self.pad_token = shift, start, extra, None

    def __call__(self, text: str, *, verbose: bool = True) -> Mapping[str, Any]:
        return {"input_ids": [*self.start, *((ord(letter) + self.shift) % 128 for letter in text)]}

    def get_vocab(self) -> dict[str, int]:
        return {chr(index): index for index in range(128)} | {text: 128 + i for i, text in enumerate(self.extra)}


class TestTokenizer:
    def test_equal_ones_agree_whatever_the_padding(self):
        padded = Characters()
        padded.pad_token = "<pad>"  # type: ignore[assignment]
        assert tokenizer_fingerprint(Characters()) == tokenizer_fingerprint(padded)

    def test_vocabulary_splitting_and_specials_matter(self):
        others = [Characters(), Characters(shift=1), Characters(start=(5,)), Characters(extra=("<new>",))]
        assert len({tokenizer_fingerprint(tokenizer) for tokenizer in others}) == 4

    @pytest.mark.parametrize("other", [object(), len, {"input_ids": []}])
    def test_what_is_no_tokenizer_is_refused(self, other):
        with pytest.raises(OptionError, match="cannot be used as a tokenizer"):
            tokenizer_fingerprint(other)

    def test_real_tokenizers(self):
        tokenizers = pytest.importorskip("tokenizers")
        transformers = pytest.importorskip("transformers")

        def build(words: list[str]) -> Any:
            vocabulary = {word: index for index, word in enumerate(["<unk>", *words])}
            model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
            fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model), unk_token="<unk>")
            fast.pad_token = "<unk>"
            return fast

        one, same, other = build(["a", "b"]), build(["a", "b"]), build(["b", "a"])
        assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same) != tokenizer_fingerprint(other)
