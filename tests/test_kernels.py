"""Attention kernels against the float64 oracle: op x backend x variant x format x case.

The kernel's error may be twice what float32 numpy makes of the same rounded inputs, plus 1e-6
(contract 4.6); rounding the query itself is held to a cap per format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest

from minfer import cases, reference, registry
from minfer.errors import Refusal
from minfer.format import KvFormat, Region
from minfer.kernels_numba import _call, _heads, _panels, _query, _softmax
from minfer.kernels_numba._ir import address
from minfer.ops import DECODE, Variant
from minfer.window import PARTITION

OPS = ("attn_window", "attn_map")
CAP = {KvFormat.F32: 1e-5, KvFormat.F16: 5e-4, KvFormat.Q8_0: 2e-2}  # of max |v|


def matrix(of: Sequence[cases.Case]) -> list[Any]:
    """Every variant and format of every case that it takes."""
    return [
        pytest.param(v, fmt, case, id=f"{op}-cpu-{v.name}-{fmt}-{case.name}")
        for op in OPS
        for v in registry.variants(op, "cpu")
        for fmt in v.formats
        for case in of
        if case.mode.op == op and case.fits(fmt) and v.limits.why_not(case.shape) is None
    ]


def config(variant: Variant, **overrides: Any) -> dict[str, Any]:
    return {**variant.config(), "threads": 2, **overrides}


def launch(variant: Variant, inputs: cases.Inputs, **overrides: Any) -> Any:
    settings = config(variant, **overrides)
    tensors = inputs.tensors(settings.get("block_m", 1))
    return variant.launch(*tensors, **inputs.scalars, config=settings)


def find(op: str, name: str) -> Variant:
    return next(v for v in registry.variants(op, "cpu") if v.name == name)


def case_named(name: str) -> cases.Case:
    return next(case for case in cases.CASES if case.name == name)


def visible_max(inputs: cases.Inputs) -> float:
    values = reference.decode_rows(inputs.v.arrays[0], inputs.fmt, inputs.v.row_elems)
    return float(np.nanmax(np.abs(values)))


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN, so an element that is not written shows."""
    monkeypatch.setattr(
        _call.Call, "empty_out", lambda call: np.full(call.q.shape, np.nan, np.float32)
    )


def errors(variant: Variant, fmt: KvFormat, inputs: cases.Inputs, out: Any) -> tuple[Any, Any]:
    """The kernel's largest error against float64, and what float32 numpy makes of it."""
    rounded = reference.round_query(inputs.q, variant.numerics(fmt).query)
    runs: Any = inputs.window.array
    if inputs.op == "attn_window":
        runs = reference.runs_of(inputs.positions, runs)
    tensors = (inputs.k, inputs.v, inputs.positions, runs)
    exact = reference.attention(rounded, *tensors, **inputs.scalars)
    single = reference.attention(rounded, *tensors, **inputs.scalars, dtype=np.float32)
    return np.abs(out - exact).max(), np.abs(single - exact).max()


@pytest.mark.parametrize(("variant", "fmt", "case"), matrix(cases.CASES))
def test_attention_stays_within_the_error_of_float32(
    variant: Variant, fmt: KvFormat, case: cases.Case
) -> None:
    inputs = cases.make(case, fmt)
    out = launch(variant, inputs)
    assert out.dtype == np.float32 and out.shape == inputs.q.shape
    ours, single = errors(variant, fmt, inputs, out)
    assert ours <= 2 * single + 1e-6
    unrounded = getattr(reference, inputs.op)(*inputs.tensors(32), **inputs.scalars)
    assert np.abs(out - unrounded).max() <= CAP[fmt] * visible_max(inputs)


SIZED = [p for p in matrix(cases.SIZED_CASES) if p.values[0].name in ("split", "flash")]


@pytest.mark.parametrize(("variant", "fmt", "case"), SIZED)
def test_every_head_size_mode_and_width(variant: Variant, fmt: KvFormat, case: cases.Case) -> None:
    inputs = cases.make(case, fmt)
    ours, single = errors(variant, fmt, inputs, launch(variant, inputs))
    assert ours <= 2 * single + 1e-6


@pytest.mark.parametrize(("variant", "fmt", "case"), matrix(cases.LOUD_CASES))
def test_large_scores_stay_within_the_error_of_float32(
    variant: Variant, fmt: KvFormat, case: cases.Case
) -> None:
    inputs = cases.make(case, fmt)
    ours, single = errors(variant, fmt, inputs, launch(variant, inputs))
    assert ours <= 2 * single + 1e-6


@pytest.mark.parametrize("name", ["rows", "flash"])
def test_long_heads_lose_no_bits_to_one_long_chain(name: str) -> None:
    variant = find("attn_window", name)
    for seed in range(8):
        case = replace(case_named("prompt-256"), name=f"prompt-256-{seed}")
        inputs = cases.make(case, KvFormat.F32)
        ours, single = errors(variant, KvFormat.F32, inputs, launch(variant, inputs))
        assert ours <= 2 * single + 1e-6


def test_every_case_of_the_matrix_meets_its_default_variant() -> None:
    for case in cases.CASES:
        for fmt in KvFormat:
            if not case.fits(fmt):
                continue
            chosen = registry.select(case.mode.op, device="cpu", fmt=fmt, shape=case.shape)
            assert chosen.variant.name == ("split" if case.kind == DECODE else "flash")


def test_odd_head_dims_run_through_rows() -> None:
    for head_dim in (1, 3, 40, 65):
        case = cases.Case("odd", "prefill", (4, 2), head_dim, ((300, 3),), cases.RUNS, pieces=3)
        assert registry.select("attn_map", shape=case.shape).variant.name == "rows"
        for fmt in (KvFormat.F32, KvFormat.F16):
            inputs = cases.make(case, fmt)
            out = launch(find("attn_map", "rows"), inputs)
            exact = reference.attn_map(*inputs.tensors(1), **inputs.scalars)
            assert np.abs(out - exact).max() <= 1e-5


@pytest.mark.parametrize("fmt", KvFormat, ids=str)
@pytest.mark.parametrize("name", ["rows", "split"])
def test_a_damaged_row_that_is_seen_shows_in_the_output(name: str, fmt: KvFormat) -> None:
    inputs = cases.make(case_named("drafts"), fmt)
    runs = inputs.window.array
    assert runs is not None
    cell = int(runs[0, 0, 0])  # the first sequence's first key
    for region in (inputs.k, inputs.v):
        kept = region.arrays[0][cell].copy()
        bad = np.full((1, region.row_elems), np.nan, np.float32)
        region.arrays[0][cell] = reference.encode_rows(bad, fmt)[0]
        out = launch(find("attn_map", name), inputs)
        region.arrays[0][cell] = kept
        assert np.isnan(out[:3]).all() and np.isfinite(out[3:]).all()


@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_a_damaged_row_shows_in_prefill_for_queries_that_see_it(fmt: KvFormat) -> None:
    inputs = cases.make(case_named("batch"), fmt)
    runs = inputs.window.array
    assert runs is not None
    cell = int(runs[10, 0, 0])
    bad = np.full((1, inputs.k.row_elems), np.nan, np.float32)
    inputs.k.arrays[0][cell] = reference.encode_rows(bad, fmt)[0]
    out = launch(find("attn_map", "flash"), inputs)
    assert np.isnan(out[:33]).all() and np.isfinite(out[33:]).all()


@pytest.mark.parametrize("name", ["rows", "split", "flash"])
def test_cells_beyond_two_gigabytes_are_reached(name: str) -> None:
    case = case_named("sliding" if name != "flash" else "chunk-sliding")
    inputs = cases.make(case, KvFormat.F32)
    row_bytes = inputs.k.arrays[0].shape[1]
    shift = (1 << 31) // row_bytes + 7

    def far(region: Region) -> Region:
        n_cells, _ = region.arrays[0].shape
        cells = np.zeros((n_cells + shift, row_bytes), np.uint8)  # untouched pages cost nothing
        cells[shift:] = region.arrays[0]
        return Region(region.fmt, region.layout, region.n_head_kv, region.head_dim, (cells,))

    runs = inputs.window.array
    assert runs is not None
    moved = runs + np.where(runs[..., 1:] > 0, np.array([shift, 0], np.int32), 0).astype(np.int32)
    near = launch(find("attn_map", name), inputs)
    q, k, v, positions, _, tiles = inputs.tensors(32)
    launcher = find("attn_map", name)
    out = launcher.launch(
        q, far(k), far(v), positions, moved, tiles, **inputs.scalars, config=config(launcher)
    )
    assert np.array_equal(out, near)


# -- q8_0 scores to the bit (contract 4.5) --------------------------------------------------------

D = 96


def q8_rows(rng: np.random.Generator, n: int) -> Any:
    rows = rng.standard_normal((n, D)) * rng.uniform(1e-3, 1e3, (n, 1))
    return rows.astype(np.float32)


def expected_scores(queries: Any, keys: Any) -> Any:
    """float32 [n_queries, n_keys] by the bit oracle."""
    q_cells, k_cells = (reference.quantize_q8_0(rows) for rows in (queries, keys))
    repeated = [
        reference.dot_q8_0(np.repeat(q_cells[i : i + 1], len(keys), 0), k_cells, n=D)
        for i in range(len(queries))
    ]
    return np.stack(repeated)


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_split_scores_have_the_bits_of_dot_q8_0(heads: int) -> None:
    rng = np.random.default_rng(heads)
    queries, keys = q8_rows(rng, heads), q8_rows(rng, 16)
    packed = _query.pack_queries(queries[:, None], KvFormat.Q8_0)
    cells = reference.quantize_q8_0(keys)
    out = np.full((heads, PARTITION), np.nan, np.float32)
    scores = _heads.scores(KvFormat.Q8_0)

    @numba.njit
    def run(heads, k, stride, q, out):  # type: ignore[no-untyped-def]
        scores(heads, address(k), stride, address(q), 96, address(out), 0)

    run(heads, cells, cells.shape[1], packed, out)
    assert np.array_equal(out[:, :16], expected_scores(queries, keys))


def test_flash_scores_have_the_bits_of_dot_q8_0() -> None:
    rng = np.random.default_rng(0)
    queries, keys = q8_rows(rng, _panels.ROWS), q8_rows(rng, 32)
    packed = _query.pack_queries(queries[:, None], KvFormat.Q8_0)
    cells = reference.quantize_q8_0(keys)
    panel = np.empty(_panels.panel_bytes(KvFormat.Q8_0, D), np.uint8)
    out = np.full((_panels.ROWS, PARTITION), np.nan, np.float32)
    pack, score = _panels.pack_keys(KvFormat.Q8_0), _panels.score_panel(KvFormat.Q8_0)

    @numba.njit
    def run(k, stride, q, q_stride, panel, out):  # type: ignore[no-untyped-def]
        for tile in range(2):
            pack(address(k) + 16 * tile * stride, stride, address(panel) + 64 * tile, 96)
        score(address(q), q_stride, 96, address(panel), address(out))

    run(cells, cells.shape[1], packed, packed.shape[1], panel, out)
    assert np.array_equal(out[:, :32], expected_scores(queries, keys))


# -- partitions and their tree (contract 6.3c) ----------------------------------------------------


FACTOR = np.float32(0.3)


def joined(states: Any, acc: Any, first: int, begin: int, size: int) -> int | None:
    """Join partitions of the aligned group [begin, begin + size); row that holds the result."""
    last = first + len(states) - 1
    if begin > last or begin + size <= first:
        return None
    if size == 1:
        return begin - first
    half = size // 2
    a, b = (joined(states, acc, first, at, half) for at in (begin, begin + half))
    if a is not None and b is not None:
        _softmax.join(states[a, 0], acc[a, 0], states[b, 0], acc[b, 0], FACTOR)
    return b if a is None else a


@pytest.mark.parametrize(("first", "n"), [(0, 1), (0, 5), (1, 1), (1, 2), (3, 7), (6, 11), (15, 2)])
def test_partitions_join_in_one_tree_over_aligned_groups(first: int, n: int) -> None:
    rng = np.random.default_rng(n)
    states = rng.uniform(0.5, 3, (n, 1, 2)).astype(np.float32)
    acc = rng.standard_normal((n, 1, 24)).astype(np.float32)
    expected_states, expected = states.copy(), acc.copy()
    assert joined(expected_states, expected, first, 0, 32) == 0
    _softmax.join_partitions(states, acc, 0, first, first + n - 1, FACTOR)
    assert np.array_equal(states[0], expected_states[0])
    assert np.array_equal(acc[0], expected[0])


@pytest.mark.parametrize(("first", "n", "width"), [(0, 300, 0), (1270, 40, 0), (2550, 30, 700)])
def test_split_and_flash_agree_to_the_bit_on_q8_0(first: int, n: int, width: int) -> None:
    """Their q8_0 scores have equal bits, so equal partitions and trees give equal rows."""
    case = cases.Case("both", DECODE, (6, 2), 64, ((first, n),), cases.RUNS, 4, width=width)
    inputs = cases.make(case, KvFormat.Q8_0)
    _, k, v, *_ = inputs.tensors(1)
    tiles = np.array([[0, n - 13], [n - 13, 13]], np.int32)
    outs = [
        find("attn_map", name).launch(
            inputs.q, k, v, inputs.positions, inputs.window.array, tiles,
            **inputs.scalars, config=config(find("attn_map", name)),
        )
        for name in ("split", "flash")
    ]  # fmt: skip
    assert np.array_equal(outs[0].view(np.int32), outs[1].view(np.int32))


# -- refusals -------------------------------------------------------------------------------------


def refused(rule: str, op: str, name: str, *tensors: Any, **scalars: Any) -> str:
    variant = find(op, name)
    with pytest.raises(Refusal) as caught:
        variant.launch(*tensors, **scalars, config=config(variant))
    assert caught.value.rule == rule
    return caught.value.message


@pytest.mark.parametrize("name", ["rows", "split", "flash", "scratch"])
def test_calls_that_do_not_fit_are_refused(name: str) -> None:
    inputs = cases.make(case_named("batch"), KvFormat.F32)
    q, k, v, positions, runs, tiles = inputs.tensors(32)
    how = inputs.scalars

    def said(rule: str, *tensors: Any, **changes: Any) -> str:
        return refused(rule, "attn_map", name, *tensors, **{**how, **changes})

    assert "float64" in said("4.2", q.astype(np.float64), k, v, positions, runs, tiles)
    assert "7 query heads" in said("2.8", q[:, :7], k, v, positions, runs, tiles)
    assert "[n_q, n_head, 64]" in said("10", q[:, :, :32], k, v, positions, runs, tiles)
    assert "f16" in said("3.2", q, k, v, positions, runs, tiles, fmt=KvFormat.F16)
    for width in (-1, 2.5):
        assert str(width) in said("2.4", q, k, v, positions, runs, tiles, width=width)
    for scale in (float("nan"), 2e38, "x"):
        assert repr(scale) in said("10", q, k, v, positions, runs, tiles, scale=scale)
    assert "53" in said("2.5", q[:53], k, v, positions, runs[:53], tiles)
    assert "float32" in said("10", q, k, v, positions.astype(np.float32), runs, tiles)
    late = positions.astype(np.int64) + 2**32
    assert str(late.min()) in said("10", q, k, v, late, runs, tiles)
    assert "float64" in said("10", q, k, v, positions, runs + 0.0, tiles)
    assert "424" in said("2.2", q, k, v, positions, runs[:53], tiles)
    assert "attn_window" in said("2.2", q, k, v, positions, runs[:, 0], tiles)
    beyond = runs.copy()
    beyond[5, 0, 0] = k.n_cells
    assert "query 5" in said("2.5", q, k, v, positions, beyond, tiles)
    narrow = Region(k.fmt, k.layout, k.n_head_kv, k.head_dim, (k.arrays[0][:, :8],))
    assert "512" in said("3.5", q, narrow, v, positions, runs, tiles)
    assert "runs" in refused("2.2", "attn_window", name, q, k, v, positions, runs, tiles, **how)


@pytest.mark.parametrize("name", ["split", "flash", "scratch"])
def test_a_head_dim_between_vectors_is_refused(name: str) -> None:
    case = cases.Case("odd", "prefill", (2, 1), 40, ((3, 2),), cases.CAUSAL)
    inputs = cases.make(case, KvFormat.F32)
    said = refused("10", "attn_window", name, *inputs.tensors(32), **inputs.scalars)
    assert "40" in said and "16" in said


def test_tiles_that_do_not_hold_one_sequence_are_refused() -> None:
    inputs = cases.make(case_named("batch"), KvFormat.F32)
    q, k, v, positions, runs, _ = inputs.tensors(32)

    def said(tiles: list[tuple[int, int]]) -> str:
        table = np.array(tiles, np.int32)
        tensors = (q, k, v, positions, runs, table)
        return refused("2.7", "attn_map", "flash", *tensors, **inputs.scalars)

    assert "54" in said([(0, 33), (33, 20)])
    assert "54" in said([(0, 33), (32, 21)])
    assert "query 33" in said([(0, 54)])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["rows", "split", "flash", "scratch"])
def test_an_empty_call_returns_an_empty_array(op: str, name: str) -> None:
    inputs = cases.make(case_named("batch"), KvFormat.F32)
    q, k, v, positions, runs, tiles = inputs.tensors(32)
    indirection = runs[:0] if op == "attn_map" else None
    variant = find(op, name)
    out = variant.launch(
        q[:0], k, v, positions[:0], indirection, tiles[:0], **inputs.scalars, config=config(variant)
    )
    assert out.shape == (0, 8, 64)


def test_arrays_that_are_not_contiguous_or_read_only_work() -> None:
    inputs = cases.make(case_named("drafts"), KvFormat.F32)
    q, k, v, positions, runs, tiles = inputs.tensors(1)
    wide = np.full((*q.shape[:2], 2 * q.shape[2]), np.nan, np.float32)
    wide[..., ::2] = q
    positions.flags.writeable = runs.flags.writeable = False
    k.arrays[0].flags.writeable = False
    variant = find("attn_map", "split")
    base = launch(variant, inputs)
    out = variant.launch(
        wide[..., ::2], k, v, positions.astype(np.int64), runs, tiles,
        **inputs.scalars, config=config(variant),
    )  # fmt: skip
    assert np.array_equal(out, base)
