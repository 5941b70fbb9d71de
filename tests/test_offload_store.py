"""A store in stretches: one set of tables, each layer's cells on its device (contract 9.6)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import planes as planes_package
import pytest
from refusals import refused
from store_life import cells, steps, write
from stores import FORMATS, HEAD_DIM, N_HEAD, N_HEAD_KV, batch_rows, tokens

from minfer import KvStore, testing
from minfer.errors import Refusal
from minfer.testing.kv_store import KvStoreCache

PLANS = ["cpu:1,cpu:1", "cpu:1,PLANES:1", "PLANES:1,cpu:1"]


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, planes: str) -> str:
    return str(request.param).replace("PLANES", planes)


def make(device: str, cache_type: str = "f32", n_ctx: int = 64, **how: Any) -> KvStore:
    sizes = (2, n_ctx, N_HEAD_KV, HEAD_DIM)
    return KvStore(*sizes, cache_type=cache_type, device=device, threads=1, **how)


@pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "sanitized"])
@pytest.mark.parametrize("cache_type", FORMATS)
def test_every_operation_reaches_every_layer(plan: str, cache_type: str, sanitize: bool) -> None:
    ours, theirs = (make(device, cache_type, sanitize=sanitize) for device in (plan, "cpu"))
    assert [list(s.layers) for s in ours.stretches] == [[0], [1]] and len(theirs.stretches) == 1
    for name, change in steps(cache_type):
        for store in (ours, theirs):
            change(store)
        assert ours.digest() == theirs.digest(), name
        assert_equal(cells(ours), cells(theirs), name)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("cache_type", FORMATS)
def test_attention_has_the_bits_of_one_device(plan: str, cache_type: str, kind: str) -> None:
    outs = []
    for device in (plan, "cpu"):
        store = make(device, cache_type)
        for seq, cap in ((1, 12), (2, 9), (3, 12)):
            store.reserve(seq, cap)
        write(store, tokens((1, 0, 6), (2, 0, 3)))
        store.share_prefix(1, 3, 4)
        batch = tokens((1, 6, 2), (3, 4, 3), (2, 3, 1), kind=kind)
        with store.step(batch) as step:
            for layer in range(2):
                q, k, v = batch_rows(batch, 10 * layer)
                step.write(layer, k=k, v=v)
                outs.append([step.attend(layer, q=q, width=width) for width in (0, 3)])
        said = [step.receipts[layer].device for layer in range(2)]
        assert said == [s.device.name for s in store.stretches for _ in s.layers]
    for layer in range(2):
        assert_equal(outs[layer], outs[2 + layer], f"layer {layer}")


def assert_equal(ours: list[Any], theirs: list[Any], what: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), what


@pytest.mark.parametrize(
    ("cache_type", "sanitize", "examples"), [("f32", True, 40), ("q8_0", False, 40)]
)
def test_the_machine_of_the_store_finds_nothing(
    plan: str, cache_type: str, sanitize: bool, examples: int
) -> None:
    how: dict[str, Any] = {"cache_type": cache_type, "sanitize": sanitize, "threads": 1}
    case: Any = testing.machine(
        lambda: KvStoreCache(KvStore(2, 16, 3, 32, device=plan, **how)), examples=examples, steps=40
    )
    case("runTest").debug()


def test_one_generation_counts_the_arrays_of_all_layers(planes: str) -> None:
    store = make(f"cpu:1,{planes}:1", "q8_0")
    store.reserve(1, 4)
    write(store, tokens((1, 0, 2)))
    assert store.pool_generation == 1, "planes returns other arrays, the CPU does not"
    k, v = store.region(0)
    store.rebind(0, k, v)
    assert store.pool_generation == 1
    store.rebind(0, v, k)
    assert store.pool_generation == 2
    assert store.layout == "canonical,planes"


def test_the_sanitizer_traces_a_cell_on_the_device_of_its_layer(plan: str) -> None:
    store = make(plan, sanitize=True)
    store.reserve(1, 8)
    write(store, tokens((1, 0, 4)))
    region = store.region(1)[1]
    store.stretch_of(1).kernels.clear_cells(region, np.array([2], np.int32), np.nan)
    batch = tokens((1, 4, 1), kind="decode")
    with pytest.raises(Refusal, match="V cell 2") as caught, store.step(batch) as step:
        for layer in range(2):
            q, k, v = batch_rows(batch)
            step.write(layer, k=k, v=v)
            out = step.attend(layer, q=q)
            assert layer == 0 and np.isfinite(out).all()
    assert (caught.value.facts["layer"], caught.value.facts["cell"]) == (1, 2)
    assert store.written(1) == 4


def test_a_window_that_one_device_cannot_read_is_refused(
    planes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planes_package, "SUPPORTS_ATTN_SPAN", False)
    store = make(f"cpu:1,{planes}:1")
    for seq in (1, 2):
        store.reserve(seq, 8)
    write(store, tokens((1, 0, 3)))
    call = lambda: write(store, tokens((2, 0, 3)))  # noqa: E731
    refused(store, "2.6", call, f"the kernels of device {planes} read causal windows only")


@pytest.mark.parametrize("dead", [0, 1])
def test_a_device_that_answers_no_more_loses_the_store(
    monkeypatch: pytest.MonkeyPatch, dead: int
) -> None:
    store = make("cpu:1,cpu:1")
    store.reserve(1, 8)
    gone = ModuleType("gone")
    vars(gone).update(vars(store.kernels), to_host=lambda array: 1 / 0)
    monkeypatch.setitem(vars(store.stretches[dead]), "kernels", gone)
    with pytest.raises(RuntimeError), store.step(tokens((1, 0, 1))):
        raise RuntimeError("illegal address")
    with pytest.raises(Refusal, match=r"lost: RuntimeError.*another process"):
        store.written(1)


def test_imported_rows_are_checked_before_a_step_is_open(plan: str) -> None:
    store = make(plan)
    store.reserve(1, 8)
    good = np.ones((2, 3, N_HEAD_KV, HEAD_DIM), np.float32)
    for bad in (good[:1], good[:, :2], good.astype(np.float16), good[..., :8]):
        for pair in ((bad, good), (good, bad)):
            with pytest.raises(Refusal, match=r"^[kv] (has shape|holds float16)"):
                store.import_rows(1, *pair)
    assert store.written(1) == 0
    store.import_rows(1, good, 2 * good)
    assert store.export(1, 1, "v").tolist() == (2 * good[1]).tolist()


def test_a_layer_outside_has_no_stretch(plan: str) -> None:
    store = make(plan)
    store.reserve(1, 2)
    q = np.zeros((1, N_HEAD, HEAD_DIM), np.float32)
    for layer in (2, -1):
        with pytest.raises(Refusal, match="layer"), store.step(tokens((1, 0, 1))) as step:
            step.attend(layer, q=q)
