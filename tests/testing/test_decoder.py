"""Random decoders are decoders, and what hypothesis prints of them runs."""

from __future__ import annotations

import torch
from hypothesis import given

from ridgefill_compile.testing import Decoder, DecoderConfig
from ridgefill_compile.testing.decoder import FillCase
from ridgefill_compile.testing.strategies import decoder_configs, fill_cases

NAMES = {"FillCase": FillCase, "DecoderConfig": DecoderConfig, "Decoder": Decoder}


@given(case=fill_cases(padded=False))
def test_rows_see_the_past_only(case):
    decoder, ids = case.decoder(), case.ids()
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % case.config.vocabulary
    with torch.no_grad():
        outputs, others = decoder(ids), decoder(other)
    torch.testing.assert_close(outputs[0][:, :-1], others[0][:, :-1])
    assert (outputs[0][:, -1] - others[0][:, -1]).abs().max() > 1e-3
    assert outputs[0].shape == (case.batch, case.rows, case.config.vocabulary)
    assert len(outputs[1]) == len(outputs[2]) == case.config.writing_layers


@given(case=fill_cases(padded=False))
def test_reading_in_two_parts_is_reading_at_once(case):
    decoder, ids = case.decoder(), case.ids()
    with torch.no_grad():
        logits, keys, values = decoder(ids, logits_to_keep=case.tail)
        _, old_keys, old_values = decoder(ids[:, : -case.tail])
        torch.testing.assert_close(
            decoder(ids[:, -case.tail :], past=(old_keys, old_values)),
            (logits, keys, values),
            atol=1e-4,
            rtol=1e-4,
        )


@given(case=fill_cases())
def test_left_padding_changes_nothing(case):
    decoder, ids = case.decoder(), case.ids()
    with torch.no_grad():
        padded = decoder(ids, case.padding())[0][:1, case.pads :]
        alone = decoder(ids[:1, case.pads :])[0]
    torch.testing.assert_close(padded, alone, atol=1e-4, rtol=1e-4)


@given(config=decoder_configs())
def test_every_matrix_matters(config):
    """Zeroing any matrix moves the outputs: a rewrite that drops one cannot pass."""
    decoder = Decoder(config).double()  # a decay's matrix may move little
    ids = torch.arange(9)[None] % config.vocabulary
    with torch.no_grad():
        expected = decoder(ids)
        for name, weight in decoder.named_parameters():
            if weight.dim() < 2:
                continue
            saved = weight.clone()
            weight.zero_()
            moved = [(new - old).abs().max() for new, old in zip(flat(decoder(ids)), flat(expected), strict=True)]
            assert max(moved) > 1e-6, name
            weight.copy_(saved)


@given(case=fill_cases())
def test_printed_case_runs(case):
    again = eval(repr(case), NAMES)
    assert again == case
    decoder = eval(repr(case.decoder()), NAMES)
    assert decoder.config == case.config


def test_decoder_is_the_same_at_each_call():
    case = FillCase(config=DecoderConfig(bias=True, norm="layer"))
    first, second = (case.decoder().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_what_differs_is_printed():
    config = DecoderConfig(residual="post", heads=2)
    assert repr(config) == "DecoderConfig(residual='post')"
    assert repr(FillCase(config=config, rows=9)) == "FillCase(rows=9, config=DecoderConfig(residual='post'))"


def flat(outputs: tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Logits, keys and values in one list."""
    return [outputs[0], *outputs[1], *outputs[2]]
