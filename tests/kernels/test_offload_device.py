"""Models of which some layers lie on an accelerator and some on the CPU (contract 9.6)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import under_test
from test_engine_device import BOUNDS, FORMATS, PROMPT
from tiny_models import write_tiny_gguf

from minfer import Batch, Engine, KvStore
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import Region
from minfer.graph.nodes import Node
from minfer.graph.run import execute, fill_batch_inputs, output_rows

pytest.importorskip("numba")
pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(under_test.device == "cpu", reason="compares with the CPU")
PLANS = [f"cpu:1,{under_test.device}:1", f"{under_test.device}:1,cpu:1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers; the embedding is the output head, too."""
    path = tmp_path_factory.mktemp("plan") / "m.gguf"
    write_tiny_gguf(path, tied=True)
    return path


def load(path: Path, device: str, cache_type: str = "f32") -> Engine:
    engine = Engine.load(path, device=device, cache_type=cache_type, n_ctx=48)
    engine.store.reserve(0, 20)
    return engine


@pytest.mark.parametrize("cache_type", FORMATS)
def test_logits_are_near_those_of_the_cpu(tiny: Path, cache_type: str) -> None:
    rows = {}
    for device in ("cpu", *PLANS):
        engine = load(tiny, device, cache_type)
        rows[device] = np.stack([engine.prefill(PROMPT), engine.decode(10)])
    for device in PLANS:
        away = np.abs(rows[device] - rows["cpu"]).max()
        assert away <= BOUNDS[cache_type] * np.abs(rows["cpu"]).max(), device


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("device", PLANS)
def test_every_node_reads_arrays_of_its_own_device(tiny: Path, device: str, kind: str) -> None:
    """Those before the rows cross of the first device, those after it of the second."""
    engine = load(tiny, device)
    batch = Batch([0] * 3, range(3), kind, PROMPT[:3])
    rows = output_rows(batch, 1)
    here, second = (stretch.kernels for stretch in engine.store.stretches)
    with engine.store.step(batch) as step:
        graph, nodes = engine._graphs.of(step.inputs, len(rows)), []
        for node in graph.nodes:
            crosses = node.op == "cross"
            nodes.append(node if crosses else reading(node, here.array_type()))
            here = second if crosses else here
        inputs = fill_batch_inputs(graph, step.inputs, batch.tokens or (), rows, 48)
        placed = engine._graphs._runner._placed(inputs)
        out = execute(replace(graph, nodes=tuple(nodes)), placed, step)
    assert here is second and isinstance(out, second.array_type())


def reading(node: Node, kind: type) -> Node:
    """The node, which asserts that all arrays that it reads are of a kind."""

    def launch(*inputs: Any, **scalars: Any) -> Any:
        for value in inputs:
            arrays = value.arrays if isinstance(value, Region) else (value,)
            assert {type(array) for array in arrays} <= {kind, type(None)}, node.op
        return node.launch(*inputs, **scalars)

    return replace(node, launch=launch)


@pytest.mark.parametrize("device", PLANS)
def test_rows_for_several_devices_come_from_the_host(device: str) -> None:
    store = KvStore(2, 8, 2, 32, cache_type="f32", device=device)
    store.reserve(1, 4)
    rows = np.random.default_rng(3).standard_normal((2, 3, 2, 32)).astype(np.float32)
    away = Device.parse(under_test.device).package().from_host(rows)
    before = store.digest(), store.generation
    for pair in ((away, rows), (rows, away), (away, away)):
        with pytest.raises(Refusal, match=r"[kv] is a .*; give a numpy array \("):
            store.import_rows(1, *pair)
    assert (store.digest(), store.generation) == before
    store.import_rows(1, rows, -rows)
    for layer in range(2):
        assert np.array_equal(store.export(1, layer, "v"), -rows[layer])


@pytest.mark.parametrize("device", PLANS)
def test_the_sanitizer_names_the_kernel_of_the_layer(tiny: Path, device: str) -> None:
    engine = Engine.load(tiny, device=device, cache_type="f32", n_ctx=8, sanitize=True)
    store, kernels = engine.store, engine.store.stretch_of(1).kernels
    store.reserve(0, 6)
    engine.prefill(PROMPT[:2])
    kernels.clear_cells(store.region(1)[0], np.array([1], np.int32), np.nan)
    with pytest.raises(Refusal, match=r"attention of layer 1 .*K cell 1") as caught:
        engine.decode(9)
    assert caught.value.facts["file"].startswith(kernels.__name__.replace(".", "/"))


def test_the_command_line_takes_such_a_plan(tiny: Path, call: Any) -> None:
    words = ("run", tiny, "-p", "cat", "-n", 2, "--n-ctx", 16, "--receipt")
    plain, planned = (call(*words, "--device", device) for device in ("cpu", PLANS[0]))
    assert (planned.code, planned.out) == (0, plain.out) and plain.out
    for name in ("cpu", under_test.device):
        assert f"embed_rows on {name}" in planned.err
    done = call(*words, "--device", f"cpu:2,{under_test.device}:1")
    assert done.code == 2 and "places 3 layers, and there are 2" in done.err
