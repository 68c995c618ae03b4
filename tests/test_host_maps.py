"""Maps in host memory: the fill is what it is with maps on the device, and maps are fetched one layer ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ridgefill_compile import host_maps
from ridgefill_compile.errors import OptionError
from ridgefill_compile.maps import RidgeMaps
from ridgefill_compile.options import Options
from ridgefill_compile.testing import DecoderConfig
from tests.test_projections import RIDGE, fill, maps_of_the_prompt
from tests.toys import TAIL, compiled, plain, pretrained, prompt, random_maps, results

CUDA = torch.cuda.is_available()


def answer(model: Any, maps: RidgeMaps, **options: Any) -> dict[str, Tensor]:
    torch._dynamo.reset()
    return results(compiled(model, RIDGE | {"maps": maps} | options)(prompt(), logits_to_keep=TAIL))


def maps_of(model: Any) -> RidgeMaps:
    return random_maps(DecoderConfig.width, of=model)


@pytest.mark.parametrize(
    ("dtype", "inner"),
    [
        ("float32", "eager"),
        ("bfloat16", "eager"),
        ("int8", "inductor"),
        pytest.param("float32", "inductor", marks=pytest.mark.heavy),
    ],
)
def test_a_fill_with_streamed_maps_is_the_same(dtype: str, inner: str) -> None:
    model = plain()
    maps = maps_of(model).to(dtype)
    streamed, held = (answer(model, maps, inner=inner, stream_maps=stream) for stream in (True, False))
    torch.testing.assert_close(streamed, held, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_maps_of_projections_are_streamed_cut_by_cut(dtype: str) -> None:
    model = pretrained("llama", layers=3)
    maps = RidgeMaps([maps_of_the_prompt(model)], layer_count=3).to(dtype)
    logits = [fill(model, maps, check_weights=False, stream_maps=stream).logits for stream in (False, True)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)


def test_corrected_and_with_selected_rows() -> None:
    model = plain()
    options = {"rows": "attention:0.1", "value_rescale": 8}
    streamed, held = (answer(model, maps_of(model), stream_maps=stream, **options) for stream in (True, False))
    torch.testing.assert_close(streamed, held, rtol=1e-5, atol=1e-5)


def test_only_a_route_with_maps_streams_them() -> None:
    with pytest.raises(OptionError, match="'stream_maps' is about maps, and route 'identity' reads none"):
        Options.parse({"route": "identity", "split": 1, "stream_maps": True})


def test_the_next_map_sets_out_before_this_one_is_waited_for() -> None:
    told: list[str] = []
    device = torch.device("cuda")
    stored = [torch.zeros(1) for _ in range(3)]
    names = {tensor.data_ptr(): str(i) for i, tensor in enumerate(stored)}

    def started(tensor: Tensor, where: Any) -> tuple[Any, str, Any]:
        told.append(f"copy {names[tensor.data_ptr()]}")
        return mock.Mock(record_stream=lambda stream: told.append("kept for it")), names[tensor.data_ptr()], now

    underway: dict[Any, Any] = {}
    now = mock.Mock(wait_event=lambda event: told.append(f"wait {event}"))
    with (
        mock.patch.object(host_maps, "_started", started),
        mock.patch.object(host_maps, "_underway", underway),
        mock.patch("torch.cuda.current_stream", return_value=now),
    ):
        for _ in range(2):
            for i, tensor in enumerate(stored):
                ahead = stored[i + 1] if i < 2 else tensor
                host_maps.from_host._init_fn(tensor, ahead, SimpleNamespace(device=device))
            assert not underway
        assert told == 2 * ["copy 0", "copy 1", "wait 0", "copy 2", "wait 1", "wait 2"]
        told.clear()
        host_maps.from_host._init_fn(stored[1], stored[2], SimpleNamespace(device=device))
    with mock.patch.object(host_maps, "_started", started), mock.patch.object(host_maps, "_underway", underway):
        # Broken off behind map 1, and called again on another stream: map 2 was copied for the first.
        other = mock.Mock(wait_event=lambda event: told.append(f"wait {event}"))
        with mock.patch("torch.cuda.current_stream", return_value=other):
            host_maps.from_host._init_fn(stored[2], stored[2], SimpleNamespace(device=device))
    assert told == ["copy 1", "copy 2", "wait 1", "wait 2", "kept for it"]


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_on_a_gpu() -> None:
    model = plain().to("cuda")
    found = []
    for stream in (True, False):
        torch._dynamo.reset()
        fast = compiled(model, RIDGE | {"maps": maps_of(model), "inner": "inductor", "stream_maps": stream})
        found.append(results(fast(prompt().cuda(), logits_to_keep=TAIL)))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
