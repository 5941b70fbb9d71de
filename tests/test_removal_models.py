"""Removing positions of a model's sequence: V stays, K turns back by its layer's rope (5.7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from refusals import refused
from stores import turned
from tiny_models import write_tiny_gguf

from minfer import Engine
from minfer.format import BLOCK, Bytes, Floats, KvFormat
from minfer.ops import HALF, INTERLEAVED
from minfer.rope import Rope, Yarn

TOKENS = [int(t) for t in np.random.default_rng(9).integers(3, 289, 44)]
START, LENGTH = 9, 7
FIRST, SECOND, SEQ = 4, 6, 1  # two neighbours, and the one that loses rows
Doubles = NDArray[np.float64]

YARN = {
    "qwen2.rope.dimension_count": 24,
    "qwen2.rope.scaling.type": "yarn",
    "qwen2.rope.scaling.factor": 4.0,
    "qwen2.rope.scaling.original_context_length": 128,
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    INTERLEAVED: ("llama", {}, {}),
    "interleaved-part": ("llama", {}, {"llama.rope.dimension_count": 16}),
    HALF: ("qwen3", {}, {}),
    "half-part-yarn": ("qwen2", {}, YARN),
    "two-ropes": ("gemma3", {"n_layer": 7}, {"gemma3.rope.dimension_count": 20}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, sizes, metadata = MODELS[request.param]
    path = tmp_path_factory.mktemp("removal") / f"{request.param}.gguf"
    write_tiny_gguf(path, architecture=architecture, metadata=metadata, **sizes)
    return path


def load(path: Path, cache_type: str = "f32", **how: Any) -> Engine:
    return Engine.load(path, cache_type=cache_type, **{"n_ctx": 96, "threads": 1, **how})


def busy(path: Path, cache_type: str) -> Engine:
    """44 rows of `SEQ`, the last four decoded, between two other sequences."""
    engine = load(path, cache_type)
    for seq, cap in ((FIRST, 5), (SEQ, 48), (SECOND, 9)):
        engine.store.reserve(seq, cap)
    engine.prefill(TOKENS[:5], FIRST)
    engine.prefill(TOKENS[:9], SECOND)
    engine.prefill(TOKENS[:-4], SEQ)
    for token in TOKENS[-4:]:
        engine.decode(token, SEQ)
    return engine


def rows_of(engine: Engine, seq: int) -> list[tuple[Floats, Bytes]]:
    """By layer, K decoded and V as stored."""
    store = engine.store
    layers = range(store.n_layer)
    return [(store.export(seq, i, "k"), store.export_cells(seq, i, "v")) for i in layers]


def rotation_error(rows: Doubles) -> Doubles:
    """What a rotation in float32 may be off by: 1e-6 of the row's largest."""
    return 1e-6 * np.abs(rows).reshape(len(rows), -1).max(axis=1)[:, None, None]


def rounding_error(exact: Doubles, stored: Floats) -> Doubles:
    """Of one quantization of `exact` (contract 4.4), by element."""
    blocks = exact.reshape(-1, BLOCK)
    d = np.abs(blocks).max(axis=1, keepdims=True) / 127
    s = d.astype(np.float16).astype(np.float64)
    codes = np.rint(stored.reshape(-1, BLOCK) / s)
    return (0.50002 * d + np.abs(codes) * np.abs(s - d)).reshape(exact.shape)


def assert_removed(
    engine: Engine, seq: int, before: list[tuple[Floats, Bytes]], start: int, length: int
) -> None:
    """V and the K rows below are what they were; the K rows above are turned back."""
    end, pairing = start + length, engine.hp.architecture.rope_pairing
    for layer, (old, now) in enumerate(zip(before, rows_of(engine, seq), strict=True)):
        np.testing.assert_array_equal(now[1], np.delete(old[1], np.s_[start:end], axis=0))
        np.testing.assert_array_equal(now[0][:start], old[0][:start])
        moved, rope = now[0][start:], engine.hp.rope_of(layer)
        exact = turned(old[0][end:], rope, -length, pairing)
        bound = rotation_error(exact)
        if engine.store.fmt is KvFormat.Q8_0:
            bound = bound + rounding_error(exact, moved)
        assert (np.abs(moved - exact) <= bound).all(), f"layer {layer}"
        assert np.abs(moved - old[0][end:]).max() > 0.1 * np.abs(moved).max(), "it did turn"
        if engine.store.fmt is KvFormat.F32:
            kept = slice(rope.n_rot, None)
            np.testing.assert_array_equal(moved[..., kept], old[0][end:, :, kept])


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_later_keys_turn_back_and_values_stay(model: Path, cache_type: str) -> None:
    engine = busy(model, cache_type)
    before = {seq: rows_of(engine, seq) for seq in (FIRST, SECOND, SEQ)}
    engine.remove(SEQ, START, LENGTH)
    assert engine.store.written(SEQ) == len(TOKENS) - LENGTH
    engine.store.check()
    assert_removed(engine, SEQ, before[SEQ], START, LENGTH)
    for seq in (FIRST, SECOND):
        for old, now in zip(before[seq], rows_of(engine, seq), strict=True):
            np.testing.assert_array_equal(now[0], old[0])
            np.testing.assert_array_equal(now[1], old[1])


def test_the_models_differ_where_it_matters(tmp_path: Path) -> None:
    ropes = {}
    for name, (architecture, sizes, metadata) in MODELS.items():
        write_tiny_gguf(tmp_path / "m.gguf", architecture=architecture, metadata=metadata, **sizes)
        hp = load(tmp_path / "m.gguf").hp
        ropes[name] = [hp.rope_of(layer) for layer in range(hp.n_layer)]
        assert hp.architecture.rope_pairing == (INTERLEAVED if architecture == "llama" else HALF)
    assert ropes["interleaved-part"] == [Rope(16, 1e4)] * 2
    assert ropes["two-ropes"] == [Rope(20, 1e4)] * 5 + [Rope(20, 1e6), Rope(20, 1e4)]
    assert isinstance(ropes["half-part-yarn"][0].scaling, Yarn)
    assert ropes["half-part-yarn"][0].temperature > 1.1


def test_keys_of_the_first_layer_are_those_of_a_prompt_without_the_removed(model: Path) -> None:
    """They depend on the token and its position alone."""
    engine, fresh = busy(model, "f32"), load(model)
    engine.remove(SEQ, START, LENGTH)
    fresh.store.reserve(0, 48)
    fresh.prefill(TOKENS[:START] + TOKENS[START + LENGTH :])
    for which in "kv":
        ours, theirs = engine.store.export(SEQ, 0, which), fresh.store.export(0, 0, which)
        largest = np.abs(theirs).reshape(len(theirs), -1).max(axis=1)[:, None, None]
        assert (np.abs(ours - theirs) <= 1e-5 * largest).all()
    last = engine.store.n_layer - 1
    ours, theirs = engine.store.export(SEQ, last), fresh.store.export(0, last)
    assert np.abs(ours - theirs).max() > 1e-3 * np.abs(theirs).max(), "the text stays in the others"


def test_what_follows_reads_the_rows_as_they_lie_now(model: Path) -> None:
    """The next logits are bitwise those of a store that was given the same rows."""
    engine, fresh = busy(model, "f32"), load(model)
    engine.remove(SEQ, START, LENGTH)
    fresh.store.reserve(0, 48)
    k, v = (
        np.stack([engine.store.export(SEQ, layer, which) for layer in range(engine.hp.n_layer)])
        for which in "kv"
    )
    fresh.store.import_rows(0, k, v)
    for token in (7, 201):
        np.testing.assert_array_equal(engine.decode(token, SEQ), fresh.decode(token, 0))
    prompt = TOKENS[:5]
    np.testing.assert_array_equal(engine.prefill(prompt, SEQ), fresh.prefill(prompt, 0))


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_a_shift_removes_from_the_start(model: Path, cache_type: str) -> None:
    shifted, removed = busy(model, cache_type), busy(model, cache_type)
    before = rows_of(shifted, SEQ)
    shifted.shift(SEQ, 6)
    removed.remove(SEQ, 0, 6)
    assert_removed(shifted, SEQ, before, 0, 6)
    np.testing.assert_array_equal(shifted.decode(5, SEQ), removed.decode(5, SEQ))


def test_an_f16_cache_refuses(tiny_gguf: Path) -> None:
    for cache_type in ("f32", "f16", "q8_0"):
        engine = busy(tiny_gguf, cache_type)
        for call in (lambda: engine.remove(SEQ, START, LENGTH), lambda: engine.shift(SEQ, 2)):  # noqa: B023
            if cache_type == "f16":
                refused(engine.store, "5.7", call, "f16", "truncate")
            else:
                call()
        rows = len(TOKENS) - (0 if cache_type == "f16" else LENGTH + 2)
        assert engine.store.written(SEQ) == rows
        assert np.isfinite(engine.decode(7, SEQ)).all()


@pytest.mark.model
@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_smollm2_goes_on_after_a_removal(smollm2: Path, cache_type: str) -> None:
    engine = Engine.load(smollm2, cache_type=cache_type, weights="f16", n_ctx=160, threads=2)
    text = "The old lighthouse keeper climbed the stairs. He lit the lamp and watched the ships."
    tokens = engine.encode(text)
    made = list(engine.generate(tokens, 8))
    before, written = rows_of(engine, 0), engine.store.written(0)
    engine.remove(0, 3, 5)
    assert_removed(engine, 0, before, 3, 5)
    before = rows_of(engine, 0)
    engine.shift(0, 4)
    assert_removed(engine, 0, before, 0, 4)
    assert engine.store.written(0) == written - 9
    assert len(list(engine.generate(made[-1:], 8))) > 0  # it refuses logits that are not finite
