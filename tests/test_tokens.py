from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from ridgefill_compile.errors import MapsError, OptionError
from ridgefill_compile.tokens import SentenceEnd, TokenClass, TokenTable, count_tokens

TEXT = """The walrus of Kyiv sleeps. Its number is 4711, said Anna; the other walruses don't care!
In 1984 a walrus, Wilhelmina, swam 3.14 miles to Oslo (and back) for 12,000 herrings.
As a WALRUS (can) do: in Kyiv in Kyiv for Anna for Anna.
McDonald's B2B camelCase x_1 = 0xFF; return [1, 22, 333]
Ünal está en São Paulo. Что говорит Анна? 北京是中国的首都。 مرحبا بالعالم 🙂
"""


class Spelt:
    """A tokenizer of these tokens and no rules: what a table reads of one."""

    def __init__(self, *tokens: str, special=("<s>",), added=()):
        self.tokens = [*special, *added, *tokens]
        self.all_special_ids = list(range(len(special)))
        self.added_tokens_decoder = {
            index: SimpleNamespace(content=token, special=token in special)
            for index, token in enumerate([*special, *added])
        }

    def get_vocab(self):
        return {token: index for index, token in enumerate(self.tokens)}


def classes(*tokens: str, **kinds) -> list[str]:
    """The classes of these tokens, read beside some that tell the scheme."""
    tokenizer = Spelt(*tokens, **kinds)
    table = TokenTable.of(tokenizer).token_class.tolist()
    return [TokenClass(table[tokenizer.tokens.index(token)]).name for token in tokens]


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    return _trained(tokenizer, trainer)


def wordpiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=220, special_tokens=["[UNK]", "<s>", "<pad>"], show_progress=False, continuing_subword_prefix="##"
    )
    return _trained(tokenizer, trainer, unk_token="[UNK]")


def metaspace() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=["<unk>", "<s>", "<pad>"], unk_token="<unk>", show_progress=False
    )
    return _trained(tokenizer, trainer, unk_token="<unk>")


def _trained(tokenizer, trainer, **names) -> PreTrainedTokenizerFast:
    tokenizer.train_from_iterator([TEXT] * 8, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", **names)


TOKENIZERS = {"byte level": byte_level, "wordpiece": wordpiece, "metaspace": metaspace}


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


def spelling(tokenizer, token: str) -> str | None:
    """A token's text with a space where a word starts, by the tokenizer's own decoder; None if there is none."""
    index = tokenizer.get_vocab()[token]
    if index in tokenizer.all_special_ids:
        return None
    kind = type(tokenizer.backend_tokenizer.model).__name__
    if kind == "BPE":
        text = tokenizer.backend_tokenizer.decode([index])
        return None if "\ufffd" in text else text
    if kind == "WordPiece":
        return token[2:] if token.startswith("##") and token != "##" else " " + token
    return token.replace("▁", " ")


def expected(text: str) -> str:
    """The class of a text by regular expressions; for the letters of `TEXT`."""
    letters = re.sub(r"\s", "", text)
    if not letters.isprintable():
        return "OTHER"
    if not letters:
        return "NEWLINE" if re.search(r"[\r\n]", text) else "SPACE"
    start = "START" if re.match(r"\s", text) else "PIECE"
    if re.fullmatch(r"[^\W\d_]+", letters):
        if re.match("[一-龥]", letters):
            return "UNCASED_PIECE"
        if re.match("[ء-ي]", letters):
            return f"UNCASED_{start}"
        return f"CAPITAL_{start}" if letters[0] != letters[0].lower() else f"LOWER_{start}"
    if re.search(r"[^\W\d_]", letters):
        return "MIXED"
    return "NUMBER" if re.search(r"\d", letters) else "PUNCTUATION"


class TestClasses:
    def test_byte_level(self):
        assert classes("ĠWal", "rus", "Wal", "Ġwal", "Ġ", "Ċ", "ĠĊĊ", "ĉ", ".", "Ġ(", "'s", "Ġx1") == [
            *("CAPITAL_START", "LOWER_PIECE", "CAPITAL_PIECE", "LOWER_START", "SPACE", "NEWLINE", "NEWLINE", "SPACE"),
            *("PUNCTUATION", "PUNCTUATION", "MIXED", "MIXED"),
        ]

    def test_sentencepiece(self):
        assert classes("▁Wal", "rus", "Wal", "▁wal", "▁", "<0x0A>", "▁▁", "<0xE4>", "<0x41>", "\n", ".") == [
            *("CAPITAL_START", "LOWER_PIECE", "CAPITAL_PIECE", "LOWER_START", "SPACE", "NEWLINE", "SPACE", "OTHER"),
            *("CAPITAL_PIECE", "NEWLINE", "PUNCTUATION"),
        ]

    def test_wordpiece(self):
        assert classes("Wal", "##rus", "##Wal", "wal", "##.", "##", "#") == [
            *("CAPITAL_START", "LOWER_PIECE", "CAPITAL_PIECE", "LOWER_START"),
            *("PUNCTUATION", "PUNCTUATION", "PUNCTUATION"),
        ]

    def test_no_marks(self):
        assert classes("Wal", "rus", "7") == ["CAPITAL_START", "LOWER_START", "NUMBER"]
        # Spaces stand in the vocabulary, so a token without one does not follow one.
        assert classes(" Wal", "rus", " ", "W") == ["CAPITAL_START", "LOWER_PIECE", "SPACE", "CAPITAL_PIECE"]

    @pytest.mark.parametrize("marker", ["Ġ{}", "▁{}", "{}"])
    def test_numbers(self, marker):
        tokens = [marker.format(text) for text in ("1", "12", "4711", "3.14", "1,000", "$5", "-2")]
        tokens += ["9", "84", "1984", "##77"] if marker == "{}" else ["9", "84", "1984"]
        assert set(classes(*tokens, "Ġa" if marker == "{}" else marker.format("a"))[:-1]) == {"NUMBER"}

    def test_marks_of_the_rarer_kind_are_text(self):
        assert classes("Ġa", "Ġb", "Ġc", "###", "####") == [*["LOWER_START"] * 3, "PUNCTUATION", "PUNCTUATION"]
        assert classes("▁a", "▁b", "Ġorn") == ["LOWER_START", "LOWER_START", "CAPITAL_PIECE"]

    def test_scripts_without_case(self):
        tokens = ("▁北京", "京", "▁مرحبا", "با", "▁नमस्ते", "คน", "▁ひらがな", "ー", "한국", "▁한국", "北a", "▁а")
        assert classes(*tokens) == [
            *("UNCASED_PIECE", "UNCASED_PIECE", "UNCASED_START", "UNCASED_PIECE", "UNCASED_START", "UNCASED_PIECE"),
            *("UNCASED_PIECE", "UNCASED_PIECE", "UNCASED_PIECE", "UNCASED_START", "LOWER_PIECE", "LOWER_START"),
        ]

    def test_characters_of_several_bytes(self):
        # Ünal, 北 and its first two bytes, as byte-level BPE writes them.
        assert classes("ĠÃľnal", "åĮĹ", "åĮ", "ĠåĮ", "Ã") == [
            *("CAPITAL_START", "UNCASED_PIECE", "OTHER", "OTHER", "OTHER"),
        ]

    def test_symbols_and_controls(self):
        assert classes("▁“", "🙂", "→", "…", "\x00", "½") == [*["PUNCTUATION"] * 4, "OTHER", "NUMBER"]

    def test_added_tokens(self):
        added = ("<think>", "Ridgefill", "  ", "\n\n", "▁▁▁", "[12]")
        tokenizer = Spelt("▁a", special=("<|end|>", "<s>"), added=added)
        table = TokenTable.of(tokenizer)
        names = [TokenClass(value).name for value in table.token_class.tolist()]
        assert names[:2] == ["SPECIAL", "SPECIAL"]
        assert names[2:8] == ["OTHER", "CAPITAL_PIECE", "SPACE", "NEWLINE", "SPACE", "NUMBER"]
        assert not table.content[:3].any()

    def test_ids_without_a_token(self):
        class Gaps(Spelt):
            def get_vocab(self):
                return {"<s>": 0, "▁a": 5}

        table = TokenTable.of(Gaps("▁a"))
        assert table.size == 6
        assert table.token_class[1:5].tolist() == [TokenClass.OTHER] * 4
        assert not table.content[1:5].any()

    def test_every_token_of_real_tokenizers(self, tokenizer):
        table = TokenTable.of(tokenizer)
        found = set()
        for token, index in tokenizer.get_vocab().items():
            text = spelling(tokenizer, token)
            name = TokenClass(int(table.token_class[index])).name
            if text is None:
                assert name == ("SPECIAL" if index in tokenizer.all_special_ids else "OTHER"), token
            else:
                assert name == expected(text), token
            found.add(name)
        assert found >= {"CAPITAL_START", "LOWER_START", "LOWER_PIECE", "NUMBER", "PUNCTUATION", "SPECIAL"}

    def test_a_slow_tokenizer(self):
        class Slow(PreTrainedTokenizer):
            def __init__(self):
                self.words = {"<unk>": 0, "▁the": 1, "▁Wal": 2, "rus": 3}
                super().__init__(unk_token="<unk>")

            vocab_size = property(lambda self: len(self.words))

            def get_vocab(self):
                return self.words | self.added_tokens_encoder

            def _convert_token_to_id(self, token):
                return self.words.get(token, 0)

        slow = Slow()
        slow.add_tokens(["<think>"])
        assert [TokenClass(value).name for value in TokenTable.of(slow).token_class.tolist()] == [
            *("SPECIAL", "LOWER_START", "CAPITAL_START", "LOWER_PIECE", "OTHER"),
        ]

    @pytest.mark.parametrize("wrong", [object(), "text", Spelt(special=())])
    def test_no_tokenizer(self, wrong):
        with pytest.raises(OptionError, match=r"cannot be used as a tokenizer|has no vocabulary"):
            TokenTable.of(wrong)


class TestSentenceEnds:
    @pytest.mark.parametrize(
        ("token", "end"),
        [
            (".", SentenceEnd.UNLESS_GLUED),
            ("?”", SentenceEnd.UNLESS_GLUED),
            ("。", SentenceEnd.UNLESS_GLUED),
            ("end.)▁", SentenceEnd.UNLESS_GLUED),
            (".get", SentenceEnd.NO),
            (",", SentenceEnd.NO),
            (".\n", SentenceEnd.ALWAYS),
            ("<0x0A>", SentenceEnd.ALWAYS),
            ("<s>", SentenceEnd.ALWAYS),
        ],
    )
    def test_ends(self, token, end):
        tokenizer = Spelt("▁a", token) if token != "<s>" else Spelt("▁a")
        assert TokenTable.of(tokenizer).sentence_end[tokenizer.tokens.index(token)] == end


class TestWords:
    @given(st.text("aB3é北", min_size=1, max_size=12), st.data())
    def test_a_word_has_one_hash_however_it_is_cut(self, word, data):
        # The last character starts a word of its own, or goes on, the same in every cut.
        places = data.draw(st.sets(st.integers(1, max(1, len(word) - 1)), max_size=4))
        edges = [0, *sorted(places), len(word)]
        cut = [word[a:b] for a, b in itertools.pairwise(edges) if a < b]
        cased = [word.swapcase()] if word.swapcase().casefold() == word.casefold() else []
        tokenizer = Spelt(*dict.fromkeys(["▁x", word, *cased, *cut]))
        table = TokenTable.of(tokenizer)

        def whole(pieces):
            value, power = 0, 1
            for piece in pieces:
                at = tokenizer.tokens.index(piece)
                value += power * int(table.piece_hash[at])
                power *= int(table.piece_power[at])
            return value % 2**64, power % 2**64

        assert whole([word]) == whole(cut) == whole([*cased, word][:1])
        assert torch.equal(table.piece_power * table.piece_inverse, torch.ones(table.size, dtype=torch.int64))

    def test_different_words_differ(self, tokenizer):
        table = TokenTable.of(tokenizer)
        kept = table.piece_hash[table.content]
        texts = {
            re.sub(r"[\W_]", "", text).casefold()
            for token in tokenizer.get_vocab()
            if (text := spelling(tokenizer, token)) is not None
        }
        incomplete = int((table.content & (table.token_class == TokenClass.OTHER)).sum())
        assert len(texts - {""}) <= len(kept.unique()) <= len(texts - {""}) + incomplete


class TestCounts:
    def test_counts(self):
        batches = [torch.tensor([[1, 1, 3], [0, 9, -1]]), torch.tensor([3], dtype=torch.int32)]
        counts = count_tokens(iter(batches), 4)
        assert counts.tolist() == [1, 2, 0, 2]
        assert counts.dtype == torch.int64
        assert count_tokens([], 2).tolist() == [0, 0]

    def test_in_a_table(self):
        tokenizer = Spelt("▁a", "b")
        counts = torch.tensor([5, 6, 7])
        assert TokenTable.of(tokenizer).count.tolist() == [0, 0, 0]
        assert torch.equal(TokenTable.of(tokenizer, counts).count, counts)
        assert torch.equal(TokenTable.of(tokenizer).with_counts(counts).count, counts)

    @pytest.mark.parametrize(
        "wrong", [torch.zeros(2, dtype=torch.int64), torch.zeros(3), torch.tensor([0, -1, 0]), torch.tensor(3)]
    )
    def test_wrong_counts(self, wrong):
        with pytest.raises(OptionError, match="counts must"):
            TokenTable.of(Spelt("▁a", "b"), wrong)


class TestStorage:
    def test_there_and_back(self, tokenizer):
        table = TokenTable.of(tokenizer)
        table = table.with_counts(torch.arange(table.size))
        back = TokenTable.from_tensors(load(save(table.tensors()))).to("cpu")
        assert back.tensors().keys() == table.tensors().keys()
        assert all(torch.equal(tensor, table.tensors()[name]) for name, tensor in back.tensors().items())

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"count": None}, "a token table has token_class, count"),
            ({"more": torch.zeros(3)}, "a token table has token_class, count"),
            ({"count": torch.zeros(3)}, r"count must be \[3\] torch.int64, not \[3\] torch.float32"),
            ({"starts": torch.zeros(2, dtype=torch.bool)}, r"starts must be \[3\] torch.bool, not \[2\]"),
            ({"token_class": torch.zeros(3, 1, dtype=torch.int8)}, r"token_class must be \[3\]"),
            ({"token_class": torch.tensor([0, 13, 0], dtype=torch.int8)}, "token_class must lie within 0 and 12"),
            ({"sentence_end": torch.tensor([0, -1, 0], dtype=torch.int8)}, "sentence_end must lie within 0 and 2"),
            ({"count": torch.tensor([0, -1, 0])}, "count must not be negative"),
        ],
    )
    def test_what_does_not_fit(self, change, says):
        tensors = TokenTable.of(Spelt("▁a", "b")).tensors() | change
        with pytest.raises(MapsError, match=says):
            TokenTable.from_tensors({name: tensor for name, tensor in tensors.items() if tensor is not None})

    def test_empty(self):
        tensors = TokenTable.of(Spelt("▁a")).tensors()
        with pytest.raises(MapsError, match="no entries"):
            TokenTable.from_tensors({name: tensor[:0] for name, tensor in tensors.items()})
        with pytest.raises(MapsError, match="not nothing"):
            TokenTable.from_tensors({})
