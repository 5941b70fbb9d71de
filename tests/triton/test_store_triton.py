"""A cell store on a GPU or interpreted: its tables and its bytes are those of one on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from refusals import refused  # noqa: E402
from stores import FORMATS, HEAD_DIM, N_HEAD, N_HEAD_KV, batch_rows, tokens  # noqa: E402

from minfer import Batch, KvStore, Rope, Span, attention, dequantize, quantize  # noqa: E402
from minfer.errors import Refusal  # noqa: E402
from minfer.kernels_triton._arguments import home, interpreted  # noqa: E402

GPU = torch.cuda.is_available() and not interpreted()
pytestmark = pytest.mark.skipif(not (GPU or interpreted()), reason="needs a GPU")
N_LAYER = 2


def stores(cache_type: str, **how: Any) -> list[KvStore]:
    """One on cuda, one on the CPU."""
    sizes = (N_LAYER, 64, N_HEAD_KV, HEAD_DIM)
    return [KvStore(*sizes, cache_type=cache_type, device=d, **how) for d in ("cuda", "cpu")]


def write(store: KvStore, batch: Batch) -> None:
    with store.step(batch) as step:
        for layer in range(N_LAYER):
            _, k, v = batch_rows(batch, 10 * layer)
            step.write(layer, k=k, v=v)


def cells(store: KvStore) -> list[Any]:
    """Every cell of every region, canonical, and what every sequence exports."""
    everything = np.arange(store.n_ctx, dtype=np.int32)
    found = [
        store.kernels.read_cells(region, everything)
        for layer in range(N_LAYER)
        for region in store.region(layer)
    ]
    for seq in store.sequences():
        for which in "kv":
            found += [store.export_cells(seq, 1, which), store.export(seq, 1, which)]
    return found


def steps(cache_type: str) -> list[tuple[str, Callable[[KvStore], object]]]:
    """What happens to a store, in order."""
    rows = np.random.default_rng(5).standard_normal((2, N_LAYER, 3, N_HEAD_KV, HEAD_DIM))
    k, v = rows.astype(np.float32)
    rope = Rope(HEAD_DIM, 1e4)
    done: list[tuple[str, Callable[[KvStore], object]]] = [
        ("reserve", lambda s: [s.reserve(seq, cap) for seq, cap in ((3, 5), (7, 4), (1, 12))]),
        ("prompt", lambda s: write(s, tokens((3, 0, 5), (1, 0, 7)))),
        ("release", lambda s: s.release(7)),
        ("decode", lambda s: write(s, tokens((1, 7, 1), kind="decode"))),
        ("share", lambda s: (s.reserve(2, 11), s.share_prefix(1, 2, 4))),
        ("copy on write", lambda s: write(s, tokens((1, 2, 3), (2, 4, 2)))),
        ("import", lambda s: s.import_rows(2, k, v)),
        ("defrag", lambda s: s.defrag()),
        ("copy", lambda s: (s.reserve(9, 6), s.copy_prefix(2, 9, 6))),
        ("truncate", lambda s: s.truncate(9, 2)),
        ("over", lambda s: write(s, tokens((9, 1, 3)))),
    ]
    if cache_type != "f16":
        done.append(("remove", lambda s: s.remove(2, 5, 2, rope=rope)))
    return done


@pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "sanitized"])
@pytest.mark.parametrize("cache_type", FORMATS)
def test_a_store_exports_the_bytes_of_one_on_the_cpu(cache_type: str, sanitize: bool) -> None:
    ours, theirs = stores(cache_type, sanitize=sanitize)
    assert ours.layout == "planes" and theirs.layout == "canonical"
    for name, change in steps(cache_type):
        for store in (ours, theirs):
            change(store)
        assert ours.digest() == theirs.digest(), name
        for a, b in zip(cells(ours), cells(theirs), strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), name
    assert ours.pool_generation == 0, "every op works in place"


def test_rows_and_answers_may_be_tensors() -> None:
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
    assert all(isinstance(out, torch.Tensor) and out.device == home() for out in outs[:2])
    assert np.array_equal(outs[0].cpu().numpy(), outs[1].cpu().numpy())
    assert np.abs(outs[0].cpu().numpy() - outs[2]).max() < 1e-5


def test_rows_of_another_kind_are_refused() -> None:
    store, _ = stores("f32")
    batch = tokens((1, 0, 4))
    _, k, v = batch_rows(batch)
    store.reserve(1, 6)
    for rule, bad, words in (
        ("4.2", torch.zeros(4, N_HEAD_KV, HEAD_DIM, dtype=torch.float16), "k holds float16"),
        ("10", torch.zeros(3, N_HEAD_KV, HEAD_DIM), "k has shape [3, 2, 32]; wanted is [4, 2, 32]"),
        ("10", k.tolist(), "k is a list; give a numpy array or a torch.Tensor"),
    ):
        with pytest.raises(Refusal) as caught, store.step(batch) as step:
            step.write(0, k=bad, v=v)
        assert caught.value.rule == rule and words in caught.value.message
        assert store.written(1) == 0


def test_kernels_without_a_store_take_and_give_tensors() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    on_cpu = quantize(rows)
    for given in (rows, torch.from_numpy(rows).to(home())):
        packed = quantize(given, device="cuda")
        assert isinstance(packed, torch.Tensor) and packed.device == home()
        assert packed.cpu().numpy().tobytes() == on_cpu.tobytes()
        back = dequantize(packed, 64, device="cuda")
        assert np.array_equal(back.cpu().numpy(), dequantize(on_cpu, 64))
    store, other = stores("f16")
    for each in (store, other):
        each.reserve(1, 8)
        write(each, tokens((1, 0, 5)))
    q = np.random.default_rng(1).standard_normal((2, N_HEAD, HEAD_DIM)).astype(np.float32)
    window = np.array([[0, 4], [0, 5]], np.int32)
    wanted = attention(q, *other.region(0), Span(window))
    given = torch.from_numpy(q).to(home())
    for at in (window, torch.from_numpy(window).to(home())):
        out = attention(given, *store.region(0), Span(at), device="cuda")
        assert isinstance(out, torch.Tensor)
        assert np.abs(out.cpu().numpy() - wanted).max() < 4 * 2**-11 * np.abs(wanted).max()
    beyond = torch.tensor([[0, 4], [0, 65]], dtype=torch.int32)
    call = lambda: attention(given, *store.region(0), Span(beyond), device="cuda")  # noqa: E731
    refused(None, "2.5", call, "outside cells [0, 64)")
