from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgefill_compile.documents import Document, hold_out, read_documents
from ridgefill_compile.errors import CalibrationError, OptionError
from tests.test_fingerprint import Characters


def ids_of(items, tokenizer=None) -> list[list[int]]:
    return [document.ids.tolist() for document in read_documents(items, tokenizer)]


def stream(*lengths: int):
    return read_documents((torch.arange(length) for length in lengths), None)


class TestReading:
    def test_texts(self):
        documents = list(read_documents(["ab", "", "c"], Characters(start=(7,))))
        assert [document.ids.tolist() for document in documents] == [[7, 97, 98], [7], [7, 99]]
        assert [(document.index, document.item) for document in documents] == [(0, 0), (1, 1), (2, 2)]
        assert all(document.ids.dtype == torch.int64 for document in documents)

    def test_batches_give_a_document_a_sample(self):
        items = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, 6, 7]), {"input_ids": [[8, 9]]}]
        documents = list(read_documents(items, None))
        assert [document.ids.tolist() for document in documents] == [[1, 2], [3, 4], [5, 6, 7], [8, 9]]
        assert [(document.index, document.item) for document in documents] == [(0, 0), (1, 0), (2, 1), (3, 2)]

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
    def test_padding_is_dropped_on_either_side(self, dtype):
        ids = torch.tensor([[0, 0, 1, 2], [3, 4, 5, 6], [7, 8, 0, 0]])
        mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]).to(dtype)
        assert ids_of([{"input_ids": ids, "attention_mask": mask, "labels": ids}]) == [
            [1, 2],
            [3, 4, 5, 6],
            [7, 8],
        ]

    def test_a_real_batch_encoding(self):
        transformers = pytest.importorskip("transformers")
        batch = transformers.BatchEncoding({"input_ids": torch.tensor([[1, 2, 0]]), "attention_mask": [[1, 1, 0]]})
        assert ids_of([batch]) == [[1, 2]]

    def test_nothing_is_read_before_it_is_asked_for(self):
        taken = 0

        def items():
            nonlocal taken
            for taken in itertools.count(1):  # noqa: B007 - counted from outside
                yield torch.arange(3)

        documents = read_documents(items(), None)
        assert taken == 0
        next(documents)
        assert taken == 1

    @pytest.mark.parametrize(
        ("items", "says"),
        [
            ("one text", "got a str: put it in a list"),
            (torch.arange(5), "got a Tensor: put it in a list"),
            ({"input_ids": [[1]]}, "got a dict: put it in a list"),
            (5, "got a int"),
        ],
    )
    def test_one_item_instead_of_several(self, items, says):
        with pytest.raises(OptionError, match=says):
            read_documents(items, Characters())

    @pytest.mark.parametrize(
        ("item", "says"),
        [
            ({"ids": 1, "text": 2}, "item 1 has no 'input_ids', only 'ids', 'text'"),
            (torch.ones(2, 3), "whole numbers, not torch.float32"),
            (torch.ones(2, dtype=torch.bool), "whole numbers, not torch.bool"),
            (torch.ones(1, 2, 3, dtype=torch.int64), r"\[rows\] or \[batch, rows\], not \[1, 2, 3\]"),
            (torch.tensor(3), r"not \[\]"),
            (object(), "item 1 is neither a text nor a batch"),
            ([[1, 2], [3]], "item 1 is neither a text nor a batch"),
            ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask"),
        ],
    )
    def test_items_that_are_no_documents_are_named(self, item, says):
        documents = read_documents([torch.arange(3), item], None)
        next(documents)
        with pytest.raises(OptionError, match=says):
            next(documents)

    def test_text_without_a_tokenizer(self):
        with pytest.raises(OptionError, match="need a tokenizer"):
            list(read_documents(["text"], None))

    def test_text_that_the_tokenizer_refuses(self):
        class Refuses(Characters):
            def __call__(self, text, *, verbose=True):
                raise TypeError("TextEncodeInput must be Union[...]")

        with pytest.raises(OptionError, match="refused text 0: TextEncodeInput"):
            list(read_documents(["\ud800"], Refuses()))


class TestWindows:
    @given(length=st.integers(0, 200), window=st.integers(4, 64))
    def test_windows_cover_all_but_a_short_rest(self, length, window):
        windows = Document(0, 0, torch.arange(length)).windows(window)
        joined = torch.cat([torch.arange(0), *windows])
        assert torch.equal(joined, torch.arange(len(joined)))
        assert all(len(piece) == window for piece in windows[:-1])
        assert all(window // 4 <= len(piece) <= window for piece in windows)
        assert length - len(joined) < window // 4


class TestHoldOut:
    @pytest.mark.parametrize(
        ("documents", "wanted", "held"),
        [
            (2, 5, 1),
            (3, 5, 1),
            (8, 5, 2),
            (19, 5, 4),
            (20, 5, 5),
            (21, 5, 5),
            (60, 5, 5),
            (4, 1, 1),
            (60, 1, 1),
        ],
    )
    def test_first_ones_and_at_most_a_quarter(self, documents, wanted, held):
        out, rest = hold_out(stream(*[16 + i for i in range(documents)]), wanted, 16)
        assert [len(document.ids) for document in out] == [16 + i for i in range(held)]
        assert [len(document.ids) for document in rest] == [16 + i for i in range(held, documents)]

    def test_too_short_ones_are_in_neither(self):
        out, rest = hold_out(stream(3, 40, 2, 41, 0, 42, 43, 3, 44), 1, 16)
        assert [len(document.ids) for document in out] == [40]
        assert [(len(document.ids), document.index) for document in rest] == [
            (41, 3),
            (42, 5),
            (43, 6),
            (44, 8),
        ]

    def test_reads_ahead_no_further_than_needed(self):
        endless = (torch.arange(16) for _ in itertools.count())
        out, rest = hold_out(read_documents(endless, None), 3, 16)
        assert len(out) == 3
        assert [document.index for document in itertools.islice(rest, 30)] == list(range(3, 33))

    def test_no_text(self):
        with pytest.raises(CalibrationError, match="no text"):
            hold_out(stream(), 5, 16)

    def test_too_short_text_says_how_long_it_was(self):
        with pytest.raises(CalibrationError, match="longest document has 3 rows, and a window of 16 wants at least 4"):
            hold_out(stream(2, 3, 1), 5, 16)
        with pytest.raises(CalibrationError, match="longest document has 0 rows"):
            hold_out(stream(0), 5, 16)

    def test_a_single_document(self):
        with pytest.raises(CalibrationError, match="only one document is long enough"):
            hold_out(stream(2, 100, 3), 5, 16)
