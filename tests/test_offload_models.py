"""Models in stretches: the bits of one device, and what the graph of a plan looks like (9.6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import planes as planes_package
import pytest
from stores import FORMATS
from tiny_models import ARCHITECTURES, write_tiny_gguf

from minfer import Batch, Engine
from minfer.errors import Refusal
from minfer.graph.choices import Choices
from minfer.models import graphs
from minfer.registry import Choice

N_LAYER = 4
PLANS = ["cpu:1,cpu:3", "cpu:1,PLANES:2,cpu:1", "PLANES:2,cpu:2"]
TOKENS = [int(t) for t in np.random.default_rng(4).integers(3, 289, 60)]


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, planes: str) -> str:
    return str(request.param).replace("PLANES", planes)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers; those of Gemma 3 turn by two ropes in turn."""
    path, name = tmp_path_factory.mktemp("plan") / "m.gguf", request.param
    every_second = {"gemma3.attention.sliding_window_pattern": 2}
    write_tiny_gguf(
        path, n_layer=N_LAYER, architecture=name, metadata=every_second if name == "gemma3" else {}
    )
    return path


def load(path: Path, device: str, cache_type: str = "f32", **how: Any) -> Engine:
    return Engine.load(path, device=device, cache_type=cache_type, n_ctx=128, threads=1, **how)


def life(engine: Engine, tokens: Sequence[int]) -> Iterator[Any]:
    """Logits of prompts, decoding, drafts, forks, both copies on write, defrag and removal."""
    store = engine.store
    for seq, cap in ((7, 6), (1, 40)):
        store.reserve(seq, cap)
    yield engine.prefill(tokens[:20], 1, chunk=8)
    for token in tokens[:3]:
        yield engine.decode(token, 1)
    at = range(store.written(1), store.written(1) + 3)
    yield engine.forward(Batch([1] * 3, at, "decode", tokens[30:33]))
    store.reserve(2, 30)
    store.share_prefix(1, 2, 16)
    yield engine.prefill(tokens[40:45], 2)
    yield engine.forward(Batch([2, 1], [store.written(2), store.written(1)], "decode", [8, 9]))
    yield engine.forward(Batch([2] * 4, range(12, 16), "prefill", tokens[50:54]), n_out=4)
    yield engine.forward(Batch([1], [9], "decode", tokens[54:55]))  # the donor
    store.release(7)
    store.defrag()
    yield engine.decode(11, 1)
    if str(store.fmt) != "f16":
        store.reserve(3, 20)
        yield engine.prefill(tokens[:16], 3)
        engine.remove(3, 4, 5)
    for seq in store.sequences():
        yield engine.decode(12, seq)
    assert store.stats().copy_on_writes and store.stats().cells_moved


def cells(engine: Engine) -> list[Any]:
    store = engine.store
    return [
        store.export_cells(seq, layer, which)
        for seq in store.sequences()
        for layer in range(store.n_layer)
        for which in "kv"
    ]


def assert_equal(ours: Engine, theirs: Engine, tokens: Sequence[int] = TOKENS) -> None:
    """Bit for bit, after everything that can happen to their rows."""
    for a, b in zip(life(ours, tokens), life(theirs, tokens), strict=True):
        assert a.dtype == b.dtype == np.float32 and np.isfinite(a).all()
        np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))
    for a, b in zip(cells(ours), cells(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("cache_type", FORMATS)
def test_logits_have_the_bits_of_one_device(model: Path, plan: str, cache_type: str) -> None:
    assert_equal(load(model, plan, cache_type), load(model, "cpu", cache_type))


def test_under_the_sanitizer_too(model: Path, plan: str) -> None:
    assert_equal(load(model, plan, "q8_0", sanitize=True), load(model, "cpu", "q8_0"))


@pytest.mark.model
@pytest.mark.parametrize("cache_type", FORMATS)
def test_smollm2_has_the_bits_of_one_device(smollm2: Path, cache_type: str) -> None:
    engines = [
        Engine.load(smollm2, device=device, cache_type=cache_type, n_ctx=128)
        for device in ("cpu:15,cpu:15", "cpu")
    ]
    text = "The old lighthouse keeper climbed the stairs every evening, and lit the lamp. "
    assert_equal(*engines, (engines[0].encode(text) * 4)[:60])


# --- the graph ------------------------------------------------------------------------------------


def decoded(engine: Engine) -> Any:
    """The graph of a decoded token."""
    engine.store.reserve(0, 60)
    engine.prefill([5, 6], 0)
    engine.decode(7)
    return next(graph for graph in engine._graphs if graph.params.kind == "decode")


def test_rows_cross_once_where_a_stretch_begins(model: Path, plan: str) -> None:
    engine = load(model, plan)
    graph = decoded(engine)
    begins = [stretch.layers.start for stretch in engine.store.stretches[1:]]
    assert graph.params.stretches == engine.store.stretches
    crossings = [at for at, node in enumerate(graph.nodes) if node.op == "cross"]
    for at, layer in zip(crossings, begins, strict=True):
        following = [n.stores for n in graph.nodes[at:] if n.stores is not None]
        assert following[0] == layer
        assert graph.nodes[at].frees == graph.nodes[at].inputs, "the rows are read no more"
    single = decoded(load(model, "cpu"))
    assert [n.op for n in graph.nodes if n.op != "cross"] == [n.op for n in single.nodes]


def test_inputs_are_filled_for_every_stretch_that_reads_them(model: Path, planes: str) -> None:
    found = {}
    for at in decoded(load(model, f"cpu:1,{planes}:2,cpu:1")).inputs:
        found.setdefault(at.name, []).append(at.stretch)
    every = [0, 1, 2]
    assert found == {
        "tokens": [0],
        "out_rows": [2],
        **dict.fromkeys(("positions", "cells", "window", "tiles"), every),
    }
    assert {at.stretch for at in decoded(load(model, "cpu:4")).inputs} == {0}


def test_tiles_are_cut_for_the_variant_of_each_stretch(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Choices.choose

    def lower(choices: Choices, op: str, stretch: int = 0, *how: Any) -> Choice:
        """Attention of the second stretch takes four queries a tile."""
        choice = choose(choices, op, stretch, *how)
        if stretch != 1 or "block_m" not in choice.config:
            return choice
        return replace(choice, config=MappingProxyType({**choice.config, "block_m": 4}))

    plain = load(model, "cpu")
    plain.store.reserve(0, 60)
    expected = plain.prefill(TOKENS[:40])
    monkeypatch.setattr(Choices, "choose", lower)
    engine, heights = load(model, "cpu:2,cpu:2"), []
    engine.store.reserve(0, 60)
    run = graphs.ModelGraphs.run

    def look(self: Any, graph: Any, inputs: Any, step: Any) -> Any:
        heights.append([int(inputs["tiles", stretch][:, 1].max()) for stretch in (0, 1)])
        return run(self, graph, inputs, step)

    monkeypatch.setattr(graphs.ModelGraphs, "run", look)
    np.testing.assert_array_equal(engine.prefill(TOKENS[:40]), expected)
    assert heights[0] == [32, 4]
    engine.decode(5)
    assert heights[-1] == [1, 1]


def test_receipts_name_the_device_of_every_op(model: Path, planes: str) -> None:
    engine = load(model, f"cpu:3,{planes}:1")
    decoded(engine)
    on = {
        device: {r.op for r in engine.receipts() if r.device == device}
        for device in ("cpu", planes)
    }
    assert {"attn_window", "qkv_rope_store", "rms_norm", "matvec"} <= on["cpu"] & on[planes]
    assert "embed" in on["cpu"] & on[planes], "tokens on the first, output rows on the last"
    assert any(f"attn_window_flash on {planes}" in str(r) for r in engine.receipts())
    alone = load(model, f"{planes}:4")
    decoded(alone)
    assert {r.device for r in alone.receipts()} == {planes}


def test_logits_come_to_the_host_from_the_last_device(
    model: Path, planes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[Any] = []

    def to_host(array: Any) -> Any:
        brought.append(array.shape)
        return np.asarray(array)

    monkeypatch.setattr(planes_package, "to_host", to_host)
    for device, wanted in ((f"{planes}:2,cpu:2", (3, 64)), (f"cpu:2,{planes}:2", (1, 289))):
        engine = load(model, device, sanitize=False)
        engine.store.reserve(0, 4)
        brought.clear()
        engine.prefill([5, 6, 7])
        assert brought == [wanted], device


def test_a_stretch_holds_the_rotary_tables_of_its_layers(model: Path) -> None:
    engine = load(model, "cpu:1,cpu:2,cpu:1")
    hp = engine.hp
    wanted = [{hp.rope_of(layer) for layer in layers} for layers in ([0], [1, 2], [3])]
    assert [set(tables) for tables in engine._graphs._tables] == wanted
    assert len(wanted[1]) == len(hp.ropes)


@pytest.mark.parametrize(
    ("device", "records"), [("cpu:2,cpu:2", False), ("cpu:4", True), ("cpu", True)]
)
def test_a_plan_of_one_stretch_alone_is_replayed(
    model: Path, monkeypatch: pytest.MonkeyPatch, device: str, records: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(graphs, "recorder", asked.append)
    load(model, device)
    load(model, device, replay=False)
    assert len(asked) == records


def test_a_cell_that_is_not_finite_is_traced_to_its_device(model: Path, planes: str) -> None:
    engine = load(model, f"cpu:2,{planes}:2", sanitize=True)
    store = engine.store
    store.reserve(0, 20)
    engine.prefill(TOKENS[:6])
    region = store.region(2)[1]
    store.stretch_of(2).kernels.clear_cells(region, np.array([5], np.int32), np.nan)
    with pytest.raises(Refusal, match=r"attention of layer 2 .*V cell 5") as caught:
        engine.decode(9)
    assert (caught.value.facts["layer"], store.written(0)) == (2, 6)
