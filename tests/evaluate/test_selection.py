"""The rows that selectors choose, against their definition on the model's true attention."""

from functools import partial

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from ridgefill_compile.errors import OptionError
from ridgefill_compile.evaluate.arms import filling, last_logits
from ridgefill_compile.evaluate.selection import selection
from ridgefill_compile.prompt import LayerAttention, Prompt
from ridgefill_compile.selectors import Attention, Pooled, choose
from tests.evaluate.tiny import tiny_maps, tiny_model

ROWS, TAIL, SPLIT = 320, 32, 2


def true_attention(model, ids, layer):
    """[heads, rows, rows] of one layer, from the model's own parts."""
    with torch.no_grad():
        states = model.model(ids, output_hidden_states=True).hidden_states[layer]
        block = model.model.layers[layer]
        inside, states = block.self_attn, block.input_layernorm(states)
        shape = (1, ids.shape[1], -1, inside.head_dim)
        query, key = (project(states).view(shape).transpose(1, 2) for project in (inside.q_proj, inside.k_proj))
        cos, sin = model.model.rotary_emb(states, torch.arange(ids.shape[1])[None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        scores = query @ repeat_kv(key, inside.num_key_value_groups).transpose(-1, -2) * inside.scaling
        return scores[0].masked_fill(torch.ones(shape[1], shape[1]).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.mark.parametrize("before", [0, 24])
def test_rows_are_those_that_the_true_attention_ranks_highest(before):
    model, ids = tiny_model(), torch.randint(0, 64, (1, ROWS))
    select = selection(model, SPLIT, TAIL, {"read": [Attention(0.1, readers=16, before=before)], "end": "tail:0.1"})
    found = select(ids)
    read = sum(true_attention(model, ids, layer).sum(0) for layer in range(SPLIT))
    scores = read[ROWS - 16 - before : ROWS - before, : ROWS - TAIL].sum(0)
    assert found["read"].tolist() == sorted(scores.topk(29).indices.tolist())
    assert found["end"].tolist() == list(range(ROWS - TAIL - 29, ROWS - TAIL))


def test_another_prompt_has_rows_of_its_own():
    select = selection(tiny_model(), SPLIT, TAIL, {"pooled": "pooled:0.1"})
    first, other = (torch.randint(0, 64, (1, ROWS)) for _ in range(2))
    found = select(first)["pooled"]
    assert not torch.equal(found, select(other)["pooled"])
    assert torch.equal(found, select(first)["pooled"])


def test_a_fill_after_a_selection_is_untouched():
    model, ids = tiny_model(), torch.randint(0, 64, (1, ROWS))
    options = {"maps": tiny_maps(), "tail": TAIL, "inner": "eager", "strict": True, "rows": "pooled:0.1"}
    before = last_logits(filling(model, options), ids, 4)
    selection(model, SPLIT, TAIL, {"pooled": "pooled:0.1"})(ids)
    assert torch.equal(last_logits(filling(model, options), ids, 4), before)


def test_what_is_no_selector_is_refused_at_once():
    with pytest.raises(OptionError, match="no selector"):
        selection(tiny_model(), SPLIT, TAIL, {"a": "poled:0.1"})


@pytest.mark.parametrize("selector", [Attention, partial(Pooled, pool=3)])
def test_rows_left_out_at_the_end_do_not_choose(selector):
    weights = torch.rand(1, 2, 40, 40)
    chosen = []
    for noise in (0.0, 100.0):
        weights[:, :, -8:] += noise * torch.rand(1, 2, 8, 40)
        layer = LayerAttention(3, None, None, None, False, None, weights_of=weights.clone())
        prompt = Prompt(1, 40, 30, torch.device("cpu"), attention=(layer,))
        chosen.append({before: choose(prompt, [selector(0.3, readers=8, before=before)]) for before in (0, 8)})
    assert torch.equal(chosen[0][8], chosen[1][8])
    assert not torch.equal(chosen[0][0], chosen[1][0])
