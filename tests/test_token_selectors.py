from __future__ import annotations

import math
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

from ridgefill_compile.token_selectors import (
    _words,
    lexical_rows,
    number_rows,
    protected_count,
    protected_scores,
    special_rows,
)
from ridgefill_compile.tokens import TokenClass, TokenTable, count_tokens
from tests.test_tokens import TEXT, TOKENIZERS, Spelt

# Spelt the SentencePiece way, so that what a token says is seen: cut words, equal words of other pieces, ends.
SPECIAL = ("<s>", "<pad>")
TOKENS = (
    *("▁the", "▁Wal", "▁wal", "rus", "Walrus", "es", "▁of", "▁Kyiv", "▁sleeps", "▁in", "▁Oslo", "▁Os", "lo"),
    *("▁12", "3", "14", ".", "!", "?”", ",", "(", "▁(", ".\n", "<0x0A>", "▁", "'s", "x1", "▁B2B", "北", "京", "。"),
    *("<0xE5>", "<0x8C>", "▁مر", "حبا", "▁foo_bar", "end."),
)
TOKENIZER = Spelt(*TOKENS, special=SPECIAL)
SIZE = len(TOKENIZER.tokens)
COUNTS = torch.tensor([(7 * index) % 5 for index in range(SIZE)])
TABLE = TokenTable.of(TOKENIZER, COUNTS)
KEPT = ("CAPITAL_START", "CAPITAL_PIECE", "LOWER_PIECE", "UNCASED_PIECE", "MIXED")
HAN = re.compile("[一-龥]")


def ids_of(*rows: str) -> torch.Tensor:
    """Token ids of rows of tokens with a space between."""
    return torch.tensor([[TOKENIZER.tokens.index(token) for token in row.split()] for row in rows])


def prompts(longest: int = 40):
    """A batch of one to three prompts of one length, of any ids, one that no entry has among them."""
    token = st.integers(0, SIZE)
    return st.integers(1, longest).flatmap(
        lambda rows: st.lists(st.lists(token, min_size=rows, max_size=rows), min_size=1, max_size=3).map(torch.tensor)
    )


def validity(ids: torch.Tensor, seed: int) -> torch.Tensor | None:
    """No padding said, padding on the left, or holes anywhere."""
    chance = random.Random(seed)
    if seed % 3 == 0:
        return None
    if seed % 3 == 1:
        starts = torch.tensor([[chance.randrange(ids.shape[1])] for _ in ids])
        return torch.arange(ids.shape[1]) >= starts
    return torch.tensor([[chance.random() < 0.8 for _ in row] for row in ids])


def name_of(index: int) -> str:
    return TokenClass(int(TABLE.token_class[index])).name if index < SIZE else "SPECIAL"


def protected_by_loops(row: list[int], valid: list[bool], share: float) -> set[int]:
    """The rows to keep exact, by sorting Python tuples."""
    total = int(COUNTS.sum()) + SIZE
    matches = [
        ((int(COUNTS[index]) + 1) / total, at)
        for at, index in enumerate(row)
        if valid[at] and index < SIZE and name_of(index) in KEPT
    ]
    return {at for _, at in sorted(matches)[: round(share * len(matches))]}


def by_scores(kept: torch.Tensor, score: torch.Tensor, share: float) -> list[set[int]]:
    """The rows that scores and count choose."""
    order = score.sort(dim=1, descending=True, stable=True).indices
    count = protected_count(kept, share)
    return [set(rows[:many].tolist()) for rows, many in zip(order, count.tolist(), strict=True)]


class Row:
    """One row of a prompt as text: what it adds to a word, whether it is glued to its neighbours, what it ends."""

    def __init__(self, index: int, valid: bool, tokens, special):
        self.special = not valid or index >= len(tokens) or tokens[index] in special
        token = "" if self.special else tokens[index]
        byte = re.fullmatch("<0x(..)>", token)
        if byte:
            spelt = bytes.fromhex(byte[1])
            text = spelt.decode() if spelt.isascii() else "é"  # a part of a letter
            self.word = b"" if spelt.isspace() else spelt
        else:
            text = token.replace("▁", " ")
            self.word = re.sub(r"[\W_]", "", text).casefold().encode()
        self.glued_before = bool(self.word) and text[0].isalnum() and not HAN.match(text[0])
        self.glued_after = bool(self.word) and text[-1].isalnum() and not HAN.match(text[-1])
        self.line_end = self.special or "\n" in text
        self.stop = text.endswith((".", "!", "?”", "。"))


def lexical_by_loops(
    rows: list[Row], prefix: int, question_tokens: int, shared: int, rare: int, longest: int
) -> list[bool]:
    """The lexical net in words that are bytes and sentences that are lists."""
    words: list[list] = []  # [first row, text]
    word_of = {}
    for at, row in enumerate(rows):
        if not row.word:
            continue
        goes_on = at > 0 and rows[at - 1].glued_after and row.glued_before
        if goes_on:
            words[-1][1] += row.word
        else:
            words.append([at, row.word])
        word_of[at] = words[-1]
    asked = {word_of[at][1] for at in sorted(word_of)[-question_tokens:]}

    sentences: list[list[int]] = [[]]
    for at in range(prefix):
        sentences[-1].append(at)
        next_glued = at + 1 < len(rows) and rows[at + 1].glued_before
        if rows[at].line_end or (rows[at].stop and not next_glued):
            sentences.append([])
    of_prefix = [text for first, text in words if first < prefix]
    chosen = [False] * prefix
    for sentence in sentences:
        texts = [text for first, text in words if first in sentence]
        if len(set(texts) & asked) >= shared and any(of_prefix.count(text) <= rare for text in texts):
            for at in sentence[:longest]:
                chosen[at] = not rows[at].special
    return chosen


class TestProtected:
    @given(prompts(), st.integers(0, 999), st.sampled_from([0.25, 0.1, 0.5, 0.0, 1.0]))
    def test_as_the_loops(self, ids, seed, share):
        valid = validity(ids, seed)
        kept, score = protected_scores(ids, TABLE, valid)
        assert kept.dtype == torch.bool
        assert torch.equal(kept, score > -math.inf)
        there = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid
        assert by_scores(kept, score, share) == [
            protected_by_loops(row, ok, share) for row, ok in zip(ids.tolist(), there.tolist(), strict=True)
        ]

    def test_the_rarest_first_and_then_the_lower_row(self):
        table = TABLE.with_counts(torch.zeros(SIZE, dtype=torch.int64))
        ids = ids_of("rus lo ▁the ▁Kyiv es rus lo rus rus")
        kept, score = protected_scores(ids, table)
        assert by_scores(kept, score, 0.5) == [{0, 1, 3, 4}]
        counts = torch.zeros(SIZE, dtype=torch.int64)
        counts[TOKENIZER.tokens.index("rus")] = 10
        counts[TOKENIZER.tokens.index("lo")] = 2**40 + 1
        counts[TOKENIZER.tokens.index("es")] = 2**40
        kept, score = protected_scores(ids, table.with_counts(counts))
        assert [by_scores(kept, score, share) for share in (0.1, 0.4, 0.75)] == [
            [{3}],
            [{0, 3, 5}],
            [{0, 3, 4, 5, 7, 8}],
        ]
        total = 10 + 2**41 + 1 + SIZE
        assert score[0, 3].item() == -1 / total
        assert score[0, 0].item() == -11 / total

    def test_none_and_all(self):
        kept, score = protected_scores(ids_of("▁the , 3 ▁", "rus rus rus rus"), TABLE)
        assert kept.tolist() == [[False] * 4, [True] * 4]
        assert by_scores(kept, score, 0.25) == [set(), {0}]

    @pytest.mark.parametrize("share", [0.25, 0.1, 1 / 3])
    def test_halves_go_to_even(self, share):
        kept = torch.arange(100)[None] < torch.arange(100)[:, None]
        count = protected_count(kept, share)
        assert count.tolist() == [round(share * matches) for matches in range(100)]
        assert count.dtype == torch.int64

    def test_a_script_without_case(self):
        kept, _ = protected_scores(ids_of("北 京 。 <0xE5> ▁مر حبا"), TABLE)
        assert kept.tolist() == [[True, True, False, False, False, True]]


class TestClasses:
    @given(prompts(), st.integers(0, 999))
    def test_numbers_and_specials(self, ids, seed):
        valid = validity(ids, seed)
        for select, name in ((number_rows, "NUMBER"), (special_rows, "SPECIAL")):
            found = select(ids, TABLE, valid)
            assert found.tolist() == [
                [name_of(index) == name and (valid is None or bool(valid[sample, at])) for at, index in enumerate(row)]
                for sample, row in enumerate(ids.tolist())
            ]

    def test_ids_of_no_entry_are_special(self):
        ids = torch.tensor([[-1, SIZE, SIZE + 1000, 0, 2]])
        assert special_rows(ids, TABLE).tolist() == [[True, True, True, True, False]]
        assert not protected_scores(ids, TABLE)[0].any()


class TestLexical:
    @given(
        prompts(),
        st.integers(0, 999),
        st.fixed_dictionaries(
            {
                "question_tokens": st.sampled_from([1, 3, 8, 64]),
                "shared": st.integers(1, 3),
                "rare": st.integers(1, 3),
                "longest": st.sampled_from([1, 3, 80]),
            }
        ),
        st.floats(0, 1),
    )
    def test_as_the_loops(self, ids, seed, settings, part):
        valid = validity(ids, seed)
        prefix = round(part * ids.shape[1])
        found = lexical_rows(ids, TABLE, prefix, valid, **settings)
        assert found.shape == (ids.shape[0], prefix)
        for sample, row in enumerate(ids.tolist()):
            rows = [
                Row(index, valid is None or bool(valid[sample, at]), TOKENIZER.tokens, SPECIAL)
                for at, index in enumerate(row)
            ]
            assert found[sample].tolist() == lexical_by_loops(rows, prefix, **settings)

    def test_words_count_once_and_by_text(self):
        question = "▁the ▁Wal rus ▁sleeps ▁in ▁Oslo"
        sentences = {
            "▁the ▁the ▁the ▁the ▁Kyiv .": False,
            "▁the ▁wal rus ▁sleeps ▁in ▁Kyiv .": True,
            "▁the ( Walrus ▁Os lo ▁in .": True,
            "▁the ▁Wal ▁Os ▁in ▁sleeps .": False,
        }
        for sentence, right in sentences.items():
            rows = sentence.split()
            found = lexical_rows(ids_of(f"{sentence} {question}"), TABLE, len(rows), question_tokens=6)
            assert found.tolist() == [[right] * len(rows)], sentence

    def test_a_rare_word_is_wanted(self):
        sentence = "▁the ▁Wal rus ▁sleeps ▁in .\n"
        for times, right in ((1, True), (2, True), (3, False)):
            ids = ids_of(sentence * times + " ▁the ▁wal rus ▁sleeps ▁in")
            prefix = 6 * times
            assert lexical_rows(ids, TABLE, prefix).tolist() == [[right] * prefix]
        ids = ids_of(sentence * 2 + "▁the ▁Wal rus ▁sleeps ▁in ▁Kyiv .\n ▁the ▁wal rus ▁sleeps ▁in")
        assert lexical_rows(ids, TABLE, 19).tolist() == [[False] * 12 + [True] * 7]

    def test_at_most_the_first_rows_of_a_sentence(self):
        ids = ids_of("▁Kyiv . ▁the ▁wal rus ▁sleeps ▁in " + ", " * 100 + ". ▁the ▁wal rus ▁sleeps ▁in")
        found = lexical_rows(ids, TABLE, 108)[0]
        assert found.tolist() == [False] * 2 + [True] * 80 + [False] * 26

    def test_the_question_is_its_last_content_tokens(self):
        prompt = "▁the ▁wal rus ▁sleeps ▁in ▁Kyiv . ▁the ▁wal rus ▁sleeps ▁in"
        for behind, right in ((". " * 100, True), ("▁of " * 59, True), ("▁of " * 60, False), ("▁of " * 64, False)):
            found = lexical_rows(ids_of(f"{prompt} {behind}"), TABLE, 7)
            assert found.tolist() == [[right] * 7], behind

    def test_decimals_do_not_end_a_sentence(self):
        ids = ids_of("▁the ▁wal rus ▁12 . 14 ▁sleeps ▁in . ▁the ▁wal rus ▁sleeps ▁in")
        assert lexical_rows(ids, TABLE, 9).all()
        ids = ids_of("▁the ▁wal rus ▁12 . ▁sleeps ▁in . ▁the ▁wal rus ▁sleeps ▁in")
        assert not lexical_rows(ids, TABLE, 8).any()

    def test_samples_do_not_see_each_other(self):
        first = "▁the ▁wal rus ▁sleeps ▁in ▁Kyiv . ▁the ▁wal rus ▁sleeps ▁in"
        second = "▁of ▁wal rus ▁foo_bar ▁12 ▁Oslo . ▁the ▁Kyiv rus ▁sleeps ▁in"
        found = lexical_rows(ids_of(first, second), TABLE, 7, question_tokens=5)
        assert found.tolist() == [[True] * 7, [False] * 7]

    @pytest.mark.parametrize("kind", TOKENIZERS)
    def test_words_of_real_text(self, kind):
        """Rows share a word's hash exactly where the text has the same word."""
        tokenizer = TOKENIZERS[kind]()
        text = "The walrus, the WALRUS (walrus) of Kyiv: 4711 herrings and 4711 walruses care for Anna in Kyiv"
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        _, begins, words = _words(ids, TokenTable.of(tokenizer), None)
        hashes = words[begins].tolist()
        truth = re.findall(r"\w+", text.casefold())
        number: dict = {}
        assert [number.setdefault(value, len(number)) for value in hashes] == [
            list(dict.fromkeys(truth)).index(word) for word in truth
        ]

    @pytest.mark.parametrize("kind", TOKENIZERS)
    def test_real_tokenizers(self, kind):
        tokenizer = TOKENIZERS[kind]()
        table = TokenTable.of(tokenizer)
        sentences = [
            "Its number is 4711, said Anna.",
            "The walrus of Kyiv sleeps for Anna in Oslo.",
            "Its number is 12,000, said Anna.",
            "As a walrus, Wilhelmina swam miles in Kyiv!",
        ]
        question = "Does the WALRUS of Kyiv swim for Anna in Oslo"
        filler = "and back again " * 40
        texts = [f" {text}" for text in (*sentences, filler, question)]
        pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        ids = torch.tensor([[row for piece in pieces for row in piece]])
        prefix = sum(map(len, pieces[:-1]))
        asked = sum(map(int, table.content[torch.tensor(pieces[-1])]))
        found = lexical_rows(ids, table, prefix, question_tokens=asked)[0].split([len(piece) for piece in pieces[:-1]])
        assert [bool(rows.all()) for rows in found] == [False, True, False, False, False]
        assert [bool(rows.any()) for rows in found] == [False, True, False, False, False]

    @pytest.mark.parametrize("kind", TOKENIZERS)
    def test_protected_rows_of_real_text(self, kind):
        tokenizer = TOKENIZERS[kind]()
        ids = torch.tensor([tokenizer(TEXT, add_special_tokens=False)["input_ids"]])
        table = TokenTable.of(tokenizer)
        table = table.with_counts(count_tokens([ids], table.size))
        kept, score = protected_scores(ids, table)
        rarest = by_scores(kept, score, 0.25)[0]
        times = {at: ids[0].tolist().count(int(ids[0, at])) for at in range(ids.shape[1]) if kept[0, at]}
        assert 0 < len(rarest) == round(len(times) / 4)
        assert max(times[at] for at in rarest) <= min(many for at, many in times.items() if at not in rarest)


FUNCTIONS = {
    "protected": lambda ids, table, valid: protected_scores(ids, table, valid),
    "count": lambda ids, table, valid: protected_count(protected_scores(ids, table, valid)[0], 0.25),
    "numbers": lambda ids, table, valid: number_rows(ids, table, valid),
    "specials": lambda ids, table, valid: special_rows(ids, table, valid),
    "lexical": lambda ids, table, valid: lexical_rows(ids, table, ids.shape[1] - 3, valid, shared=2, question_tokens=9),
}


class TestTraced:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_compiled_whole_for_every_length(self, name, padded):
        function = FUNCTIONS[name]
        compiles = CompileCounter()
        fast = torch.compile(function, fullgraph=True, dynamic=True, backend=compiles)
        for rows in (5, 40, 23):
            ids = torch.randint(0, SIZE + 1, (2, rows))
            valid = torch.rand(2, rows) < 0.8 if padded else None
            torch.testing.assert_close(fast(ids, TABLE, valid), function(ids, TABLE, valid), rtol=0, atol=0)
        assert compiles.frame_count == 1

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_make_fx_with_symbolic_rows(self, name):
        def function(ids, valid, *tensors):
            return FUNCTIONS[name](ids, TokenTable(*tensors), valid)

        tensors = tuple(TABLE.tensors().values())
        traced = make_fx(function, tracing_mode="symbolic")(
            torch.randint(0, SIZE, (2, 17)), torch.ones(2, 17, dtype=torch.bool), *tensors
        )
        for rows in (5, 60):
            ids, valid = torch.randint(0, SIZE + 1, (3, rows)), torch.rand(3, rows) < 0.8
            torch.testing.assert_close(traced(ids, valid, *tensors), function(ids, valid, *tensors), rtol=0, atol=0)
