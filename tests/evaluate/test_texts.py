"""Text on this machine, and the split that keeps its two sides apart."""

import gzip
import random
from functools import partial
from itertools import islice

import pytest

from ridgefill_compile.errors import CalibrationError
from ridgefill_compile.evaluate import sources
from ridgefill_compile.evaluate.sources import SHORTEST, Document, Source
from ridgefill_compile.evaluate.texts import long_prompt, shingles, split_texts, windows_of
from tests.evaluate.tiny import WORDS, made_up_sources, made_up_text


class WordTokenizer:
    """A token a word, with the call of a transformers tokenizer."""

    def __call__(self, text, verbose=True):
        return {"input_ids": [WORDS.index(word) if word in WORDS else 10 for word in text.split()]}


def made_up(count, kind="prose", prefix=""):
    return [source for source in made_up_sources(count, prefix) if source.kind == kind]


def texts_of(found):
    """Name and text of every source that can be read."""
    documents = (source.read() for source in found)
    return {document.name: document.text for document in documents if document}


def test_the_two_sides_share_no_document_and_no_50_words():
    shared = " ".join(random.Random(7).choices(WORDS, k=60))
    echoing = [
        Source(f"echo{seed}", "prose", partial(lambda name: made_up_text(name) + shared, f"echo{seed}"))
        for seed in range(40)
    ]
    texts = split_texts(made_up(30) + made_up(30, "code") + echoing)
    held_out = set().union(*(shingles(document.text) for document in texts.held_out_documents))
    calibration = [document for kind in sources.KINDS for document in texts.calibration_documents(kind)]
    assert len(texts.held_out_documents) > 10
    assert len(calibration) > 30
    for document in calibration:
        assert held_out.isdisjoint(shingles(document.text))
    # One echo at most is held out, and with it every echo on the other side is gone.
    assert sum(document.name.startswith("echo") for document in texts.held_out_documents) == 1
    assert not any(document.name.startswith("echo") for document in calibration)


def test_more_sources_move_no_document():
    before = split_texts(made_up(30))
    after = split_texts(made_up(30) + made_up(30, prefix="new"))
    old = [document for document in after.held_out_documents if not document.name.startswith("new")]
    assert old == before.held_out_documents
    assert split_texts(made_up(30)[::-1]).held_out_documents == before.held_out_documents


def test_calibration_does_not_depend_on_how_much_is_held_out():
    texts = split_texts(made_up(60))
    names = [document.name for document in texts.calibration_documents("prose")]
    texts.held_out(WordTokenizer(), 1000, 2)
    assert [document.name for document in texts.calibration_documents("prose")] == names


def test_windows_alternate_between_kinds_and_have_the_length_asked_for():
    texts = split_texts(made_up(30) + made_up(30, "code"))
    found = texts.held_out(WordTokenizer(), 500, 6)
    assert [window.kind for window in found] == ["prose", "code"] * 3
    assert all(window.ids.shape == (1, 500) for window in found)
    assert len({window.name for window in found}) == 6
    assert [window.kind for window in texts.calibration(WordTokenizer(), 500, 4)] == ["prose", "code"] * 2


def test_too_little_text_says_how_much_there_was():
    short = [Document("a", "prose", "row tail"), Document("b", "prose", "map")]
    with pytest.raises(CalibrationError, match=r"need 1 documents of 5 tokens, found 0: .* 2"):
        windows_of(iter(short), WordTokenizer(), 5, 1)
    with pytest.raises(CalibrationError, match="no usable text"):
        split_texts([]).calibration(WordTokenizer(), 5, 1)
    with pytest.raises(CalibrationError, match="9 tokens, all text together has 3"):
        long_prompt(iter(short), WordTokenizer(), 9)


def test_a_long_prompt_joins_documents():
    documents = [
        Document("a", "prose", "row tail map"),
        Document("b", "prose", "map arm"),
        Document("c", "prose", "x"),
    ]
    assert long_prompt(iter(documents), WordTokenizer(), 4).tolist() == [[0, 2, 5, 5]]


def test_tokens_are_sought_beyond_the_first_characters():
    document = Document("a", "prose", " " * 5000 + "row tail map")
    assert windows_of(iter([document]), WordTokenizer(), 2, 1)[0].ids.tolist() == [[0, 2]]


def test_sources_are_read_with_care(tmp_path):
    text = made_up_text("a")
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.html").write_text("<head><title>no</title></head><p>Tom &amp; row</p>" + text)
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(text.encode())[:100])
    (tmp_path / "numbers.txt").write_text("1.5 2.5\n" * SHORTEST)
    (tmp_path / "LICENSE.txt").write_text(text)
    (tmp_path / "latin.txt").write_bytes(text.encode() + b"\xff")
    read = texts_of(sources.document_sources(tmp_path, "doc"))
    assert set(read) == {"doc/a.txt", "doc/b.md.gz", "doc/c.html"}
    assert read["doc/b.md.gz"] == text
    assert read["doc/c.html"].startswith("Tom & row")


def test_docstrings_and_code_come_from_python_files(tmp_path):
    (tmp_path / "tests").mkdir()
    body = f'"""{made_up_text("b")}"""\nclass A:\n    def f(self):\n        """{made_up_text("c")}"""\n'
    (tmp_path / "module.py").write_text(body)
    (tmp_path / "tests" / "module.py").write_text(body)
    (tmp_path / "broken.py").write_text(body + "def (")
    assert set(texts_of(sources.code_sources(tmp_path, "lib"))) == {"lib/module.py", "lib/broken.py"}
    found = texts_of(sources.docstring_sources(tmp_path, "lib"))
    assert set(found) == {"docstrings/lib/module.py"}
    assert "class A" not in found["docstrings/lib/module.py"]


def test_a_users_folder(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.txt").write_text("row tail")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\xff")
    found = list(sources.folder_documents([tmp_path, tmp_path / "b.txt"]))
    assert [(document.kind, document.text) for document in found] == [
        ("code", "x = 1"),
        ("prose", "row tail"),
        ("prose", "row tail"),
    ]
    with pytest.raises(CalibrationError, match="does not exist"):
        list(sources.folder_documents([tmp_path / "nothing"]))


def test_this_machine_has_prose_and_code():
    texts = split_texts(pool=3)
    kinds = [document.kind for document in texts.held_out_documents]
    assert kinds == ["prose"] * 3 + ["code"] * 3
    names = {document.name for document in texts.held_out_documents}
    for kind in sources.KINDS:
        documents = list(islice(texts.calibration_documents(kind), 2))
        assert len(documents) == 2
        assert names.isdisjoint(document.name for document in documents)
