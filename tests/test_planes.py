"""The second arrangement of q8_0: what leaves it is canonical, and answers have the CPU's bits."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planes import LAYOUT, arranged, canonical, clear_cells, empty_regions, read_cells, write_cells
from stores import FORMATS, HEAD_DIM, N_HEAD_KV, batch_rows, tokens

from minfer import Batch, Engine, KvStore, cases, registry
from minfer import kernels_numba as cpu
from minfer.errors import Refusal
from minfer.format import KvFormat, Region

N_LAYER = 2
EVERY = np.arange(11, dtype=np.int32)


def store_on(device: str, cache_type: str, n_ctx: int = 40) -> KvStore:
    """Sequences 3, 1 and 2, with four free cells between the first two."""
    store = KvStore(
        N_LAYER, n_ctx, N_HEAD_KV, HEAD_DIM, cache_type=cache_type, device=device, threads=1
    )
    for seq, cap in ((3, 5), (7, 4), (1, 12), (2, 11)):
        store.reserve(seq, cap)
    store.release(7)
    return store


def step_through(store: KvStore, batch: Batch, salt: int) -> list[Any]:
    """Every layer written with rows of its own and attended to, twice."""
    outs = []
    with store.step(batch) as step:
        for layer in range(store.n_layer):
            q, k, v = batch_rows(batch, salt + 10 * layer)
            step.write(layer, k=k, v=v)
            outs += [step.attend(layer, q=q), step.attend(layer, q=q, width=3)]
    return outs


def cells_of(store: KvStore) -> list[Any]:
    """Every cell of every region, canonical, and the readable rows of every sequence."""
    kernels, everything = store.device.package(), np.arange(store.n_ctx, dtype=np.int32)
    regions = [region for layer in range(store.n_layer) for region in store.region(layer)]
    of = [(s, layer, which) for s in (1, 2, 3) for layer in range(store.n_layer) for which in "kv"]
    return [
        *(kernels.read_cells(region, everything) for region in regions),
        *(store.export_cells(*one) for one in of),
        *(store.export(*one).view(np.uint32) for one in of),
    ]


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


@pytest.mark.parametrize("cache_type", FORMATS)
def test_a_store_answers_with_the_bits_of_the_cpu(planes: str, cache_type: str) -> None:
    ours, theirs = store_on(planes, cache_type), store_on("cpu", cache_type)
    assert ours.layout == ours.region(0)[0].layout == LAYOUT
    for salt, batch in enumerate((
        tokens((3, 0, 5)),  # causal
        tokens((1, 0, 7), (2, 0, 2)),
        tokens((2, 2, 1), (1, 7, 3), kind="decode"),
        tokens((1, 2, 4)),  # over what is written
    )):  # fmt: skip
        outs = [step_through(store, batch, salt) for store in (ours, theirs)]
        assert_equal(*outs)
        assert np.isfinite(outs[0][0]).all() and np.abs(outs[0][0]).max() > 0.1
        assert ours.digest() == theirs.digest()
        assert_equal(cells_of(ours), cells_of(theirs))
    k, v = np.random.default_rng(0).standard_normal((2, N_LAYER, 3, N_HEAD_KV, HEAD_DIM))
    for store in (ours, theirs):
        store.release(3)
        store.truncate(2, 1)
        store.reserve(3, 4)
        store.import_rows(3, k.astype(np.float32), v.astype(np.float32))
    assert_equal(cells_of(ours), cells_of(theirs))


def test_planes_are_codes_and_scales(planes: str) -> None:
    for region in store_on(planes, "q8_0").region(1):
        codes, scales = region.arrays
        assert (codes.dtype, codes.shape) == (np.int8, (40, 64))
        assert (scales.dtype, scales.shape) == (np.float16, (40, 2))
    rows = np.zeros((1, 2, 32), np.float32)
    rows[0, 0, 3], rows[0, 1, 31] = 127, -254
    region = empty_regions(1, KvFormat.Q8_0, 3, 2, 32)[0]
    write = registry.select("store_cells", device=planes, fmt="q8_0", config={"threads": 1})
    stored = write.launch(region, rows, [2], fmt=KvFormat.Q8_0, config=write.config)
    codes, scales = stored.arrays
    assert scales.tolist() == [[0, 0], [0, 0], [1, 2]]
    assert np.flatnonzero(codes).tolist() == [128 + 3, 128 + 63]
    assert (codes[2, 3], codes[2, 63]) == (127, -127)
    assert not region.arrays[0].any(), "an op leaves the region it was given alone"


ATTENTION = [
    pytest.param(v.name, fmt, case, id=f"{v.name}-{fmt}-{case.name}")
    for case in cases.CASES
    for v in registry.variants(case.mode.op)
    for fmt in v.formats
    if case.name in ("drafts", "sliding", "batch", "batch-span", "prompt-sliding", "one-cell")
    if case.fits(fmt) and v.limits.why_not(case.shape) is None
]


@pytest.mark.parametrize(("variant", "fmt", "case"), ATTENTION)
def test_attention_has_the_bits_of_the_cpu(
    planes: str, variant: str, fmt: KvFormat, case: cases.Case
) -> None:
    inputs, outs = cases.make(case, fmt), []
    for device, k, v in (
        ("cpu", inputs.k, inputs.v),
        (planes, arranged(inputs.k), arranged(inputs.v)),
    ):
        how = {"device": device, "fmt": fmt, "shape": case.shape, "variant": variant}
        choice = registry.select(inputs.op, **how, config={"threads": 2})
        assert choice.receipt.device == device
        q, _, _, *rest = inputs.tensors(choice.block_m)
        outs.append(choice.launch(q, k, v, *rest, **inputs.scalars, config=choice.config))
    assert np.array_equal(*(out.view(np.uint32) for out in outs))


@pytest.mark.parametrize("fmt", KvFormat, ids=str)
@pytest.mark.parametrize("case", cases.MOVE_CASES, ids=lambda case: case.name)
def test_planes_move_as_cells_do(planes: str, fmt: KvFormat, case: cases.MoveCase) -> None:
    plain = cases.any_bytes(fmt, case.n_cells, 1, 96)
    plain.arrays[0][:, 102:] = 0 if fmt is KvFormat.Q8_0 else plain.arrays[0][:, 102:]
    region = arranged(deepcopy(plain))
    before = canonical(region).arrays[0]
    assert (before == plain.arrays[0]).all()
    choices = [registry.select("move_cells", device=device) for device in (planes, "cpu")]
    moved, wanted = (
        choice.launch(r, case.array, config=choice.config)
        for choice, r in zip(choices, (region, plain), strict=True)
    )
    assert choices[0].variant.name == "planes" and moved.layout == LAYOUT
    at = np.arange(case.n_cells)
    assert (read_cells(moved, at) == wanted.arrays[0]).all()
    assert (canonical(region).arrays[0] == before).all()


@pytest.mark.parametrize("case", cases.TURN_CASES, ids=lambda case: case.name)
def test_planes_turn_as_cells_do(planes: str, case: cases.TurnCase) -> None:
    plain, cells, cos, sin = cases.turn_inputs(case)
    region = arranged(deepcopy(plain))
    turned, wanted = (
        choice.launch(r, cells, cos, sin, pairing=case.pairing, config=choice.config)
        for choice, r in (
            (registry.select("map_q8_0_cells", device=planes), region),
            (registry.select("map_q8_0_cells"), plain),
        )
    )
    assert (canonical(turned).arrays[0] == wanted.arrays[0]).all()


@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_poison_and_cleared_cells_read_back_canonical(planes: str, fmt: KvFormat) -> None:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((11, 1, 96)) * 10.0 ** rng.uniform(-8, 8, (11, 1, 1))).astype(
        np.float32
    )
    rows[2, 0, 40], rows[3, 0, 95], rows[4], rows[5, 0, :32] = np.nan, -np.inf, 3e38, 1e-7
    ours = empty_regions(2, fmt, 11, 1, 96, fill=float("nan"))[1]
    theirs = cpu.empty_region(fmt, 11, 1, 96, fill=float("nan"))
    assert (read_cells(ours, EVERY) == cpu.read_cells(theirs, EVERY)).all()
    for device in (planes, "cpu"):
        write = registry.select("store_cells", device=device, fmt=fmt)
        if device == planes:
            ours = write.launch(ours, rows[:9], EVERY[:9], fmt=fmt, config=write.config)
        else:
            theirs = write.launch(theirs, rows[:9], EVERY[:9], fmt=fmt, config=write.config)
    assert (read_cells(ours, EVERY) == cpu.read_cells(theirs, EVERY)).all()
    for cells, fill in (([1, 7], float("nan")), ([10, 3], 0.0)):
        clear_cells(ours, np.array(cells), fill)
        cpu.clear_cells(theirs, np.array(cells), fill)
        assert (read_cells(ours, EVERY) == cpu.read_cells(theirs, EVERY)).all()
    shuffled = EVERY[::-1].copy()
    write_cells(ours, shuffled, cpu.read_cells(theirs, EVERY))
    assert (read_cells(ours, shuffled) == cpu.read_cells(theirs, EVERY)).all()


def test_what_the_cpu_refuses_is_refused_and_changes_nothing(planes: str) -> None:
    region = empty_regions(1, KvFormat.Q8_0, 4, 1, 32, fill=float("nan"))[0]
    before = [plane.tobytes() for plane in region.arrays]
    table, rows = np.ones((1, 16), np.float32), np.zeros((1, 1, 32), np.float32)

    def op(name: str, *tensors: Any, **how: Any) -> Any:
        choice = registry.select(name, device=planes, fmt="q8_0")
        return lambda: choice.launch(region, *tensors, **how, config=choice.config)

    for rule, call in (
        ("5.6", op("move_cells", np.array([[0, 1, 1], [1, 3, 2]]))),
        ("2.5", op("store_cells", rows, np.array([4]), fmt=KvFormat.Q8_0)),
        ("3.2", op("store_cells", rows, np.array([1]), fmt=KvFormat.F16)),
        ("5.7", op("map_q8_0_cells", np.array([1, 1]), table, table, pairing="half")),
        ("2.5", lambda: read_cells(region, np.array([4]))),
        ("2.5", lambda: clear_cells(region, np.array([-1]))),
        ("5.10", lambda: clear_cells(region, np.array([1]), 1.0)),
        ("3.5", lambda: write_cells(region, np.array([1]), np.zeros((1, 34), np.uint8))),
    ):
        with pytest.raises(Refusal) as caught:
            call()
        assert caught.value.rule == rule
    assert [plane.tobytes() for plane in region.arrays] == before


@pytest.mark.parametrize("cache_type", FORMATS)
def test_a_model_has_the_bits_of_the_cpu(planes: str, cache_type: str, tiny_gguf: Path) -> None:
    said = []
    for device in (planes, "cpu"):
        engine = Engine.load(tiny_gguf, cache_type=cache_type, device=device, n_ctx=64)
        engine.store.reserve(0, 16)
        assert engine.store.region(0)[0].layout == ("planes" if device == planes else cpu.LAYOUT)
        said.append(
            [
                engine.forward(Batch([0] * n, range(t, t + n), kind, list(range(1, n + 1))))
                for t, n, kind in ((0, 6, "prefill"), (6, 2, "decode"), (8, 1, "decode"))
            ]
        )
    assert_equal(*said)


def test_regions_of_another_layout_are_no_regions_of_this_package() -> None:
    plain = Region(KvFormat.F32, cpu.LAYOUT, 1, 1, (np.zeros((1, 4), np.uint8),))
    for convert, given in ((canonical, plain), (arranged, arranged(plain))):
        with pytest.raises(AssertionError):
            convert(given)
