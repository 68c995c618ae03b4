"""Random decoders and routings, as strategies of hypothesis: both shrink to the plain ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from ridgefill_compile.testing.config import DecoderConfig, Routing
from ridgefill_compile.testing.decoder import Decoder, FillCase

LEAST_LAYERS = 2
_BLIND = ("random:0.5", "tail:0.34", "random:1.0", "random:0.2+random:0.3:1")
_SEEING = ("pooled:0.5", "attention:0.2+random:0.3", "question_blind:0.34", "mixed:0.6+tail:0.4")
_FLAGS = ("bias", "fused", "qk_norm", "gated", "flat", "rows_first", "tied", "unrotated")


@st.composite
def decoder_configs(draw: DrawFn, plain: bool = False) -> DecoderConfig:
    """Any decoder. Sizes are small and overlap, so that equal sizes with different meanings are common.

    Args:
        draw: given by hypothesis.
        plain: attention and one MLP in every layer, on one residual stream, and nothing shared.
    """
    # What is drawn and not used keeps the plain decoder the shortest draw of all, which is what examples shrink to.
    attention: Any = draw(st.sampled_from(["causal", "sdpa", "grouped", "eager"]))
    masked = attention != "causal"
    places = ["rotary", "partial", "learned", "none"] + ["alibi"] * masked
    window, softcap = draw(st.none() | st.integers(2, 8)), draw(st.none() | st.sampled_from([1.0, 4.0]))
    kv_heads = draw(st.integers(1, 3))
    layers = draw(st.integers(LEAST_LAYERS, 4))
    flags: dict[str, Any] = {name: draw(st.booleans()) for name in _FLAGS}
    return DecoderConfig(
        layers=layers,
        width=draw(st.integers(6, 24)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8, 12])),
        inner=draw(st.integers(6, 24)),
        vocabulary=draw(st.integers(8, 24)),
        residual=draw(st.sampled_from(["pre", "post", "branch", "sandwich", "parallel"])),
        norm=draw(st.sampled_from(["rms", "layer", "spelt"])),
        positions=draw(st.sampled_from(places)),
        attention=attention,
        window=window if masked else None,
        softcap=softcap if attention == "eager" else None,
        seed=draw(st.integers(0, 3)),
        **flags,
        **({} if plain else _parts(draw, layers)),
    )


def _parts(draw: DrawFn, layers: int) -> dict[str, Any]:
    """What some decoders have and most have not; one or two of them at a time."""
    choices: dict[str, SearchStrategy[dict[str, Any]]] = {
        "nothing": st.just({}),
        "experts": st.builds(lambda n, grouped: {"experts": n, "grouped": grouped}, st.integers(2, 4), st.booleans()),
        "recurrence": st.builds(lambda kind: {"recurrence": kind}, st.sampled_from(["linear", "delta"])),
        "shared": st.builds(lambda n: {"shared": n}, st.integers(0, max(0, layers - 2))),
        "latent": st.builds(lambda width: {"latent": width}, st.sampled_from([4, 6, 8, 12])),
        "streams": st.builds(lambda n: {"streams": n}, st.integers(2, 3)),
        "per_layer": st.builds(lambda width: {"per_layer": width}, st.sampled_from([2, 4, 6])),
    }
    found: dict[str, Any] = {}
    for _ in range(2):
        found |= draw(choices[draw(st.sampled_from(list(choices)))])
    return found


@st.composite
def decoders(draw: DrawFn, plain: bool = False) -> Decoder:
    """Random decoders; see `DecoderConfig` for what they may have. Called with `routing.inputs(decoder.config)`.

    Args:
        draw: given by hypothesis.
        plain: attention and one MLP in every layer, on one residual stream, and nothing shared.
    """
    return Decoder(draw(decoder_configs(plain=plain)))


@st.composite
def routings(draw: DrawFn, decoder: Decoder | DecoderConfig | None = None, padded: bool = True) -> Routing:
    """Random prompts and what to fill of them.

    Args:
        draw: given by hypothesis.
        decoder: it is for this one: half of the prompts are as long as one of its sizes, and the split is any of its
            layers. None: it is for any of `decoders()`.
        padded: with left padding, at times.
    """
    config = decoder.config if isinstance(decoder, Decoder) else decoder
    batch = draw(st.integers(1, 3))
    any_rows = st.integers(3, 24)
    if config is not None:
        any_rows = (any_rows | st.sampled_from(_colliding(config, batch))).filter(
            lambda n: _told_apart(config, batch, n)
        )
    rows = draw(any_rows)
    tail = draw(st.integers(1, rows - 1))
    split = draw(st.integers(0, (LEAST_LAYERS if config is None else config.writing_layers) - 1))
    seeing = any(config is None or not config.is_recurrent(layer) for layer in range(split))
    return Routing(
        batch=batch,
        rows=rows,
        tail=tail,
        split=split,
        pads=draw(st.integers(0, rows - 1)) if padded else 0,
        route=draw(st.sampled_from(["ridge", "identity"])),
        selected=draw(st.none() | st.sampled_from(_BLIND + _SEEING * seeing)),
        first_rows=draw(st.just(0) | st.integers(1, min(3, rows - tail))),
    )


def _colliding(config: DecoderConfig, batch: int) -> list[int]:
    """Row counts that are one of the decoder's sizes, or make batch * rows one."""
    heads = config.heads, config.kv_heads, config.heads // config.kv_heads
    widths = config.width, config.inner, config.vocabulary, config.head_dim, config.heads * config.head_dim
    shares = [width // batch for width in widths if width % batch == 0]
    others = config.layers, config.latent or 0, config.experts, config.per_layer, config.streams
    return sorted({size for size in (*heads, *widths, *shares, *others) if size >= 3})


def _told_apart(config: DecoderConfig, batch: int, rows: int) -> bool:
    """Whether no size of a recurrence's states is a multiple of the row count: such a state is refused, since it may be
    one entry a row of something else.
    """
    if config.recurrence is None:
        return True
    channels = (2 * config.kv_heads + config.heads) * config.head_dim
    return not any(size % rows == 0 for size in (batch, channels, config.heads, config.head_dim))


@st.composite
def fill_cases(draw: DrawFn, padded: bool = True, plain: bool = False) -> FillCase:
    """Any decoder with any routing of it."""
    config = draw(decoder_configs(plain=plain))
    routing = draw(routings(config, padded=padded))
    return FillCase(**vars(routing), config=config)
