from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ridgefill_compile.recurrences.block_index import FormerKeys, block_index, key_order
from ridgefill_compile.recurrences.samples import Arguments
from ridgefill_compile.recurrences.samples import block_index as samples
from ridgefill_compile.recurrences.substitute import substitute_recurrences
from ridgefill_compile.report import report
from ridgefill_compile.zoo.shrink import tiny_config
from tests.recurrences.checks import close
from tests.recurrences.test_substitute import Captured, planted

HEADS, WIDTH, TURNED, HIDDEN = 12, 8, 4, 6


def causal(padding: list[int], rows: int, former: int = 0, unused: int = 0) -> Tensor:
    """[B, 1, N, K]: rows behind `former` ones of a sequence that begins behind `padding`, in a cache with room left."""
    mask = torch.ones(len(padding), 1, former + rows, former + rows, dtype=torch.bool).tril()[:, :, former:]
    for sequence, begin in enumerate(padding):
        mask[sequence, ..., :begin] = False
    return torch.nn.functional.pad(mask, (0, unused))


def chosen(given: Arguments) -> Tensor:
    """Which keys each row may attend to, asked of one row after the other."""
    index, hidden, (cosines, sines) = given["self"], given["hidden_states"], given["position_embeddings"]
    (batch, rows), ratio = hidden.shape[:2], index.compress_ratio
    queries, keys = index.index_qk_proj(hidden).split([HEADS * WIDTH, WIDTH], -1)
    queries = index.q_layernorm(queries.unflatten(-1, (-1, WIDTH)))
    keys = keys if given["cache"] is None else given["cache"].update_indexer(keys, 0)
    allowed = torch.zeros(batch, 1, rows, keys.shape[1], dtype=torch.bool)
    for b in range(batch):
        for row in range(rows):
            seen = given["attention_mask"][b, 0, row].nonzero().flatten().tolist()
            blocks = [seen[i : i + ratio] for i in range(0, len(seen) - ratio + 1, ratio)]
            at = cosines.shape[1] - rows + row
            query = torch.stack([rotated(head, cosines[b, at], sines[b, at]) for head in queries[b, row]])
            scores = []
            for block in blocks:
                key = index.k_layernorm(keys[b, block].mean(0))
                scores.append((query @ rotated(key, cosines[b, block[0]], sines[b, block[0]])).relu().sum().item())
            best = sorted(range(len(blocks)), key=lambda j: -scores[j])[: index.block_topk]
            for j in best:
                allowed[b, 0, row, blocks[j]] = True
            allowed[b, 0, row, seen[len(blocks) * ratio :]] = True
    return allowed


def rotated(head: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    result, half = head.clone(), TURNED // 2
    for i in range(half):
        result[i] = head[i] * cosine[i] - head[i + half] * sine[i]
        result[i + half] = head[i + half] * cosine[i + half] + head[i] * sine[i + half]
    return result


def draw(padding: list[int], rows: int, former: int, unused: int, ratio: int, seed: int = 0) -> Arguments:
    """An index and a call of it."""
    torch.manual_seed(seed)
    given, _ = next(iter(samples()))
    given["self"].compress_ratio = ratio
    total, batch = former + rows, len(padding)
    angles = torch.randn(batch, total, TURNED)
    cache = _Room(torch.randn(batch, former, WIDTH), unused) if former or unused else None
    return {
        **given,
        "hidden_states": torch.randn(batch, rows, HIDDEN),
        "position_embeddings": (angles.cos(), angles.sin()),
        "attention_mask": causal(padding, rows, former, unused),
        "cache": cache,
    }


class _Room(FormerKeys):
    """A static cache: rows that are not yet there hold nothing."""

    def __init__(self, keys: Tensor, unused: int) -> None:
        super().__init__(keys)
        self.unused = unused

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        keys = super().update_indexer(keys, layer_idx)
        return torch.cat([keys, torch.full((keys.shape[0], self.unused, WIDTH), torch.nan)], 1)


@settings(deadline=None, max_examples=40)
@given(
    padding=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    rows=st.integers(1, 20),
    former=st.sampled_from([0, 10]),
    unused=st.sampled_from([0, 7]),
    ratio=st.integers(1, 5),
    hidden=st.sets(st.integers(0, 29)),
    seed=st.integers(0, 9),
)
def test_as_row_after_row(padding, rows, former, unused, ratio, hidden, seed):
    """Behind padding, with keys in between that no row sees, as padding of a second turn is."""
    total = former + rows
    given = draw([min(p, total - 1) for p in padding], rows, former, unused, ratio, seed)
    given["attention_mask"][0, ..., [key for key in hidden if key < total]] = False
    assert torch.equal(block_index(given), chosen(given))


class TestMask:
    def test_order(self):
        mask = causal([3, 0], 4, former=2, unused=1)[:, 0].clone()
        mask[1, :, 2] = False  # padding of a second turn
        assert key_order(mask).tolist() == [[3, 4, 5, 0, 1, 2, 6], [0, 1, 5, 2, 3, 4, 6]]
        assert key_order(torch.zeros(1, 3, 4, dtype=torch.bool)).tolist() == [[0, 1, 2, 3]]

    @pytest.mark.parametrize("kind", ["window", "packed", "hole", "two beginnings"])
    def test_others_are_refused(self, kind: str):
        mask = causal([0, 0], 9)[:, 0].clone()
        row = torch.arange(9)
        if kind == "window":
            mask &= row.unsqueeze(1) - row < 4
        elif kind == "packed":
            mask[1, 5:, :5] = False
        elif kind == "hole":
            mask[0, 7, 3] = False
        else:
            mask[1, 4, 0] = False
        with pytest.raises(RuntimeError, match="this mask is another"):
            key_order(mask)


@pytest.fixture(name="modelling_file")
def _modelling_file() -> types.ModuleType:
    """Of versions of transformers whose index says which keys a row may see; earlier ones return a bias."""
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip("the index of this version of transformers returns a bias")
    return importlib.import_module("transformers.models.qwen4_exp.modeling_qwen4_exp")


@pytest.fixture(name="model")
def _model(modelling_file: types.ModuleType) -> PreTrainedModel:
    config = tiny_config("qwen4_exp_text")
    config.indexer_n_heads = HEADS  # of two heads, many blocks score nothing, and which of them is taken is anybody's
    config.num_hidden_layers, config.layer_types = 4, config.layer_types[-2:] * 2
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.heavy
def test_one_graph_for_every_length(model):
    """The same logits and states as the loop's, padded on the left, without a graph break; decoding too."""
    done = {each.function: each.operator for each in substitute_recurrences(model)}
    assert done["Qwen4ExpTextQSAIndexer.forward"] == "block_index"
    captured = Captured()
    compiled = torch.compile(model, backend=captured, fullgraph=True)
    with torch.no_grad():
        for rows in (70, 100, 85):
            ids, mask = torch.randint(0, 150, (2, rows)), torch.ones(2, rows, dtype=torch.int64)
            mask[1, :9] = 0
            expected, actual = (m(ids, attention_mask=mask, use_cache=True) for m in (model, compiled))
            close(actual.logits[mask.bool()], expected.logits[mask.bool()], 1e-4)
            for mine, theirs in zip(actual.cache.layers, expected.cache.layers, strict=True):
                if getattr(theirs, "is_indexer_initialized", False):
                    close(mine.indexer_keys, theirs.indexer_keys, 1e-4)
        assert len(captured.graphs) == 2
        more, mask = torch.randint(0, 150, (2, 1)), torch.cat([mask, mask[:, :1] * 0 + 1], 1)
        expected, actual = (
            m(more, attention_mask=mask, cache=past.cache).logits for m, past in ((model, expected), (compiled, actual))
        )
        close(actual, expected, 1e-4)


@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=pytest.mark.heavy)])
def test_filled(model, cache):
    """With true layer inputs a fill says what the model says, loop and all, in either cache."""
    ids, mask = torch.randint(0, 150, (2, 96)), torch.ones(2, 96, dtype=torch.int64)
    mask[0, :13] = 0
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    call |= {"cache_implementation": cache, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **call)
    options = {"route": "oracle", "split": 1, "tail": 20, "min_fill": 16, "inner": "eager", "strict": True}
    model.compile(backend="ridgefill", options=options)
    actual = model.generate(ids, **call)
    assert report(model).graphs[0].filled
    close(torch.stack(actual.logits), torch.stack(expected.logits), 1e-4)


def test_a_mask_of_ones_own_is_refused_when_it_comes(model):
    ids = torch.randint(0, 150, (1, 40))
    packed = causal([0], 40)
    packed[..., 20:, :20] = False
    compiled = torch.compile(model, backend="eager")
    substitute_recurrences(model)
    with torch.no_grad():
        masks = {"indexed_attention": packed, "linear_attention": None}
        assert model(ids, attention_mask=masks).logits.isfinite().all()
        with pytest.raises(RuntimeError, match="this mask is another"):
            compiled(ids, attention_mask=masks)


def test_another_choice_is_no_substitute(modelling_file):
    """A file that rotates blocks as their last key."""
    source = inspect.getsource(inspect.unwrap(modelling_file.Qwen4ExpTextQSAIndexer.forward))
    source = source[source.index("def forward") :]
    source = "from transformers.models.qwen4_exp.modeling_qwen4_exp import *\n" + (
        "from transformers.models.qwen4_exp.modeling_qwen4_exp import apply_rotary_pos_emb\n"
        "import math, torch\nCache = object\n\nclass Index:\n    " + source
    )
    (same,) = substitute_recurrences([planted(source)])
    assert same.operator == "block_index"
    (other,) = substitute_recurrences(
        [planted(source.replace("block_token_indices[:, 0]", "block_token_indices[:, -1]"))]
    )
    assert other.operator is None
    assert "computes something else" in other.reason
