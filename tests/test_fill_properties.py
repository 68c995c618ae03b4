"""What fills must equal, for random decoders, splits, tails, batches and padding; on logits and every state write.

Each is held to another computation of the same thing: the exact model, the routed graph before elimination, or the
method written out on the plain module, layer by layer, by `by_definition`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from ridgefill_compile import calibrate
from ridgefill_compile.errors import RidgefillWarning
from ridgefill_compile.prompt import Prompt
from ridgefill_compile.report import report
from ridgefill_compile.selectors import LongerTail, Random, choose, parse_rows
from ridgefill_compile.testing import Decoder, DecoderConfig
from ridgefill_compile.testing.decoder import FillCase, Layer
from ridgefill_compile.testing.mixing import States
from ridgefill_compile.testing.strategies import decoder_configs, fill_cases
from ridgefill_compile.testing.variants import RandomMaps, Variants
from ridgefill_compile.zoo.calling import worst
from tests.decoders import enliven
from tests.toys import compiled, distance, results

CLOSE = 1e-4


def examples(share: float) -> settings:
    """A share of the profile's number of examples: each traces a model, once or several times."""
    return settings(max_examples=max(2, round(share * settings.default.max_examples)))


@st.composite
def cases(draw: st.DrawFn, /, plain: bool = False, **fixed: Any) -> FillCase:
    """Any decoder and prompt, any split, layer 0 included."""
    case: FillCase = draw(fill_cases(padded="pads" not in fixed, plain=plain))
    return dataclasses.replace(case, config=dataclasses.replace(case.config, **fixed.get("config", {})))


class Ways(Variants):
    """Answers a call in any of the ways that its prompt's graph was rewritten in: set `way` before the call."""

    way: str = "exact"

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        super().__call__(module, example_inputs)
        assert not self.refusals, self.refusals
        graphs = dict(self.graphs)
        return lambda *inputs: graphs[self.way](*inputs)

    def answers(self, fast: Callable[..., Any], *args: Any, **arguments: Any) -> dict[str, list[Tensor]]:
        """Logits and states of a call, in every way."""
        found = {}
        for way in ("exact", *self.ways):
            self.way = way
            with torch.no_grad():
                found[way] = list(results(fast(*args, **arguments)).values())
        return found


def by_definition(
    case: FillCase, decoder: Decoder, ids: Tensor, keep: int, route: str, maps: RandomMaps | None = None
) -> list[Tensor]:
    """The method on the plain module: late layers read predictions on the prefix, but for rows that are selected, and
    only those and tail rows go on.
    """
    exact = None
    if case.selected or case.first_rows:
        prompt = Prompt(case.batch, case.rows, case.rows - case.tail, ids.device, valid=case.padding())
        exact = choose(prompt, parse_rows(case.selected), case.first_rows)
    blocks: Any = decoder.blocks
    kept: list[States] = []
    with torch.no_grad():
        x, sight = decoder.begin(ids, case.padding(), 0)
        for index, block in enumerate(blocks):
            shares = index >= decoder.config.writing_layers
            lent = kept[decoder.config.source_layer] if shares else None
            if index == case.split:
                prefix = block.reads(x)[:, : -case.tail]
            predicted = prefix if index >= case.split and not shares else None
            if maps is not None and predicted is not None and index > case.split:
                predicted = prefix @ maps.matrix(index).T + maps.offset(index)
            if exact is not None and predicted is not None:
                at = exact.unsqueeze(-1).expand(-1, -1, predicted.shape[-1])
                predicted = predicted.scatter(1, at, block.reads(x).gather(1, at))
            mixed, states = block(x, sight, None, lent, predicted)
            if not shares:
                kept.append(states)
            if route == "none" and index >= case.split:
                alone, _ = block(x[:, -case.tail :], sight.alone(case.tail))
                mixed = torch.cat([mixed[:, : -case.tail], alone], dim=1)
            x = mixed
        logits = decoder.end(x, keep)
    return list(results((logits, [one for one, _ in kept], [other for _, other in kept])).values())


def check(case: FillCase, ways: Ways, found: Mapping[str, Sequence[Tensor]], ids: Tensor, keep: int) -> None:
    """Every way is what it must equal."""
    decoder = case.decoder()
    assert ways.located is not None
    assert len(ways.located.layers) == case.config.writing_layers
    maps = RandomMaps(ways.located, case.split)
    with torch.no_grad():
        exact = list(results(decoder(ids, case.padding(), logits_to_keep=keep)).values())
    assert worst(exact, found["exact"]) < CLOSE
    assert worst(exact, found["oracle"]) < CLOSE
    assert worst(found["routed"], found["eliminated"]) < CLOSE
    if not all(isinstance(each, Random | LongerTail) for each in parse_rows(case.selected)):
        return  # which rows they are, the graph knows
    assert worst(by_definition(case, decoder, ids, keep, "ridge", maps), found["eliminated"]) < CLOSE
    if "identity" in found:
        assert worst(by_definition(case, decoder, ids, keep, "identity"), found["identity"]) < CLOSE


def attention_tells_padding(case: FillCase) -> bool:
    """Whether some layer below the split has attention, or the one at the split has it in one call."""
    attends = [layer for layer in range(case.split + 1) if not case.config.is_recurrent(layer)]
    return bool(attends) and (attends[0] < case.split or case.config.attention != "eager")


@examples(0.25)
@given(case=cases(), data=st.data())
def test_every_way_is_what_it_is_defined_to_be(case: FillCase, data: st.DataObject) -> None:
    assume(case.pads == 0 or not (case.first_rows or case.selected) or attention_tells_padding(case))
    keep = data.draw(st.integers(1, case.tail), label="logits_to_keep")
    ways = Ways(split=case.split, tail=case.tail, selectors=parse_rows(case.selected), first_rows=case.first_rows)
    ways.ways = {**ways.ways, "identity": ("identity", True)}
    torch._dynamo.reset()
    fast = torch.compile(case.decoder(), backend=ways)
    check(case, ways, ways.answers(fast, case.ids(), case.padding(), logits_to_keep=keep), case.ids(), keep)


@examples(0.1)
@given(case=cases(pads=0), data=st.data())
def test_at_any_length(case: FillCase, data: st.DataObject) -> None:
    """Traced with symbolic rows, run on others: twice the rows, and hardly more than the tail."""
    ways = Ways(split=case.split, tail=case.tail, selectors=parse_rows(case.selected), first_rows=case.first_rows)
    torch._dynamo.reset()
    fast = torch.compile(case.decoder(), backend=ways)
    for rows in (case.rows, data.draw(st.integers(case.tail + max(1, case.first_rows), 2 * case.rows), label="rows")):
        other = dataclasses.replace(case, rows=rows)
        ids = other.ids()
        torch._dynamo.maybe_mark_dynamic(ids, 1)
        check(other, ways, ways.answers(fast, ids, None, logits_to_keep=1), ids, 1)


@examples(0.2)
@given(case=cases(plain=True, pads=0, config={"attention": "causal", "window": None}))
def test_no_fill_is_a_tail_that_sees_itself_only(case: FillCase) -> None:
    if case.config.positions == "alibi":
        case = dataclasses.replace(case, config=dataclasses.replace(case.config, positions="rotary"))
    case = dataclasses.replace(case, selected=None, first_rows=0)
    ways = Ways(split=case.split, tail=case.tail, ways={"none": ("none", True)})
    torch._dynamo.reset()
    fast = torch.compile(case.decoder(), backend=ways)
    found = ways.answers(fast, case.ids(), None, logits_to_keep=1)
    assert worst(by_definition(case, case.decoder(), case.ids(), 1, "none"), found["none"]) < CLOSE


@examples(0.1)
@given(case=cases(), more=st.integers(0, 3))
def test_all_rows_exact_is_the_exact_model(case: FillCase, more: int) -> None:
    """A tail as long as the prompt, and a split behind the last layer."""
    decoder = case.decoder()
    with torch.no_grad():
        exact = decoder(case.ids(), case.padding(), logits_to_keep=1)
    options = {"route": "identity", "split": case.split, "tail": case.rows + more, "min_fill": 1, "inner": "eager"}
    torch._dynamo.reset()
    call = compiled(decoder, options)
    assert distance(call(case.ids(), case.padding(), logits_to_keep=1), exact) == 0.0
    call = compiled(decoder, options | {"tail": case.tail, "split": case.config.layers})
    with pytest.warns(RidgefillWarning, match="leaves no late layer"):
        assert distance(call(case.ids(), case.padding(), logits_to_keep=1), exact) == 0.0
    assert not any(graph.filled for graph in report(decoder).graphs)


class LinearLayer(Layer):
    """A layer whose output is affine in its input: no norms, a linear MLP, and attention whose result is dropped.

    Its keys and values are written all the same.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.norms = nn.ModuleList(nn.Identity() for _ in self.norms)
        self.mlp = nn.Linear(config.width, config.width)


class LinearWorld(Decoder):
    """A decoder whose layers from `split` up to the last but one are linear: what the last one reads is affine in the
    split state, so that a fitted map is no approximation. The last layer is an ordinary one.
    """

    def __init__(self, config: DecoderConfig, split: int) -> None:
        torch.manual_seed(config.seed)
        super().__init__(config)
        blocks: Any = self.blocks
        for index in range(split, config.layers - 1):
            blocks[index] = LinearLayer(config)
        enliven(self, config.seed)
        with torch.no_grad():
            for block in blocks[split:-1]:
                for parameter in block.attention.output.parameters():
                    parameter.zero_()


@examples(0.1)
@given(config=decoder_configs(plain=True), data=st.data())
def test_where_late_layers_are_linear_a_fitted_map_loses_nothing(config: DecoderConfig, data: st.DataObject) -> None:
    config = dataclasses.replace(config, layers=data.draw(st.integers(3, 5), label="layers"))
    split = data.draw(st.integers(1, config.layers - 2), label="split")
    world = LinearWorld(config, split)
    rows, tail = 96, 8

    def ids(batch: int, seed: int) -> Tensor:
        return FillCase(batch=batch, rows=rows, config=config).ids(seed)

    torch._dynamo.reset()
    maps = calibrate(
        world, [ids(6, 1)], splits=split, window=rows, stride=1, penalties=[1e-10], dtype="float32", progress=False
    )
    assert all(figures["cosine"] > 0.9999 for figures in maps.held_out.values())
    options = {"tail": tail, "min_fill": 1, "inner": "eager", "strict": True}
    with torch.no_grad():
        exact = list(results(world(ids(1, 2), logits_to_keep=1)).values())
    ridge = compiled(world, options | {"maps": maps})(ids(1, 2), logits_to_keep=1)
    identity = compiled(world, options | {"route": "identity", "split": split})(ids(1, 2), logits_to_keep=1)
    assert worst(exact, list(results(ridge).values())) < 5e-3
    assert worst(exact, list(results(identity).values())) > 0.02
