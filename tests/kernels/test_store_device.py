"""A cell store on an accelerator: its tables and its bytes are those of one on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import under_test
from refusals import refused
from store_life import N_LAYER, cells, steps, write
from stores import FORMATS, HEAD_DIM, N_HEAD, N_HEAD_KV, batch_rows, tokens

from minfer import KvStore, Span, attention, dequantize, quantize
from minfer.errors import Refusal

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(under_test.device == "cpu", reason="compares with the CPU")


def stores(cache_type: str, place: str = "{}", **how: Any) -> list[KvStore]:
    """One on the device under test, or a plan with it, and one on the CPU."""
    sizes, ours = (N_LAYER, 64, N_HEAD_KV, HEAD_DIM), place.format(under_test.device)
    return [KvStore(*sizes, cache_type=cache_type, device=d, **how) for d in (ours, "cpu")]


@pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "sanitized"])
@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize(
    ("place", "layout"),
    [("{}", "planes"), ("cpu:1,{}:1", "canonical,planes"), ("{}:1,cpu:1", "planes,canonical")],
)
def test_a_store_exports_the_bytes_of_one_on_the_cpu(
    cache_type: str, sanitize: bool, place: str, layout: str
) -> None:
    ours, theirs = stores(cache_type, place, sanitize=sanitize)
    assert ours.layout == layout and theirs.layout == "canonical"
    for name, change in steps(cache_type):
        for store in (ours, theirs):
            change(store)
        assert ours.digest() == theirs.digest(), name
        for a, b in zip(cells(ours), cells(theirs), strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), name
    assert ours.pool_generation == 0, "every op works in place"


def test_rows_and_answers_may_be_arrays_of_the_device() -> None:
    ours, theirs = stores("f32")
    batch = tokens((1, 0, 4))
    q, k, v = batch_rows(batch)
    outs = []
    for store in (ours, theirs):
        store.reserve(1, 6)
        with store.step(batch) as step:
            for layer in range(N_LAYER):
                given = [store.kernels.from_host(x) if layer else x for x in (q, k, v)]
                step.write(layer, k=given[1], v=given[2])
                outs.append(step.attend(layer, q=given[0]))
    assert all(isinstance(out, ours.kernels.array_type()) for out in outs[:2])
    on_host = [np.array(ours.kernels.to_host(out)) for out in outs[:2]]
    assert np.array_equal(*on_host)
    assert np.abs(on_host[0] - outs[2]).max() < 1e-5


def test_rows_of_another_kind_are_refused() -> None:
    store, _ = stores("f32")
    batch, place = tokens((1, 0, 4)), store.kernels.from_host
    _, k, v = batch_rows(batch)
    store.reserve(1, 6)
    for rule, bad, words in (
        ("4.2", place(np.zeros((4, N_HEAD_KV, HEAD_DIM), np.float16)), "k holds float16"),
        ("10", place(k[:3]), "k has shape [3, 2, 32]; wanted is [4, 2, 32]"),
        ("10", k.tolist(), "k is a list; give a numpy array or "),
    ):
        with pytest.raises(Refusal) as caught, store.step(batch) as step:
            step.write(0, k=bad, v=v)
        assert caught.value.rule == rule and words in caught.value.message
        assert store.written(1) == 0


def test_kernels_without_a_store_take_and_give_arrays_of_the_device() -> None:
    device, kernels = under_test.device, under_test.package()
    rows = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    on_cpu = quantize(rows)
    for given in (rows, kernels.from_host(rows)):
        packed = quantize(given, device=device)
        assert isinstance(packed, kernels.array_type())
        assert kernels.to_host(packed).tobytes() == on_cpu.tobytes()
        back = dequantize(packed, 64, device=device)
        assert np.array_equal(kernels.to_host(back), dequantize(on_cpu, 64))
    store, other = stores("f16")
    for each in (store, other):
        each.reserve(1, 8)
        write(each, tokens((1, 0, 5)))
    q = np.random.default_rng(1).standard_normal((2, N_HEAD, HEAD_DIM)).astype(np.float32)
    window = np.array([[0, 4], [0, 5]], np.int32)
    wanted = attention(q, *other.region(0), Span(window))
    given = kernels.from_host(q)
    for at in (window, kernels.from_host(window)):
        out = attention(given, *store.region(0), Span(at), device=device)
        assert isinstance(out, kernels.array_type())
        assert np.abs(kernels.to_host(out) - wanted).max() < 4 * 2**-11 * np.abs(wanted).max()
    beyond = kernels.from_host(np.array([[0, 4], [0, 65]], np.int32))
    call = lambda: attention(given, *store.region(0), Span(beyond), device=device)  # noqa: E731
    refused(None, "2.5", call, "outside cells [0, 64)")
