"""Attention kernels against the float64 oracle: op x variant x format x case.

How far an answer may be off, `attention_oracle.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import under_test
from attention_oracle import assert_within_budget, cap, exact, visible_max
from under_test import (
    attend,
    case_named,
    compiled_only,
    config_of,
    find,
    given,
    interpreted,
    launch,
    package,
    short,
    takes,
    variants,
)

from minfer import cases, reference, registry
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops import DECODE, PREFILL, Variant

OPS = ("attn_window", "attn_map")
SIZED = () if interpreted() else cases.SIZED_CASES
NAMES = [v.name for v in variants("attn_map")]


def matrix(of: Sequence[cases.Case], *names: str) -> list[Any]:
    """Every variant, or those named, and format of every case that it takes."""
    return [
        pytest.param(v, fmt, case, id=f"{op}-{under_test.device}-{v.name}-{fmt}-{case.name}")
        for op in OPS
        for v in variants(op)
        for fmt in v.formats
        for case in of
        if case.mode.op == op and case.fits(fmt) and takes(v, case, fmt)
        if (not names or v.name in names) and under_test.affordable(v, case)
    ]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN, so an element that is not written shows; MLX makes them itself."""
    call = under_test.module("_call").Call
    if not hasattr(call, "empty_out"):
        return
    empty_out = call.empty_out

    def poisoned(self: Any) -> Any:
        out = empty_out(self)
        out[...] = float("nan")
        return out

    monkeypatch.setattr(call, "empty_out", poisoned)


@pytest.mark.parametrize(("variant", "fmt", "case"), matrix(cases.CASES))
def test_attention_stays_within_the_error_of_float32(
    variant: Variant, fmt: KvFormat, case: cases.Case
) -> None:
    inputs = cases.make(case, fmt)
    out = attend(variant, inputs)
    assert out.dtype == np.float32 and out.shape == inputs.q.shape
    assert_within_budget(variant, fmt, inputs, out)
    assert np.abs(out - exact(inputs)).max() <= cap(variant, fmt) * visible_max(inputs)


@pytest.mark.parametrize(("variant", "fmt", "case"), matrix(SIZED, "split", "ring", "flash"))
def test_every_head_size_mode_and_width(variant: Variant, fmt: KvFormat, case: cases.Case) -> None:
    inputs = cases.make(case, fmt)
    assert_within_budget(variant, fmt, inputs, attend(variant, inputs))


@pytest.mark.parametrize(("variant", "fmt", "case"), matrix(cases.LOUD_CASES))
def test_large_scores_stay_within_the_error_of_float32(
    variant: Variant, fmt: KvFormat, case: cases.Case
) -> None:
    inputs = cases.make(case, fmt)
    assert_within_budget(variant, fmt, inputs, attend(variant, inputs))


NUMERIC = [
    pytest.param(v, fmt, {name: value}, id=f"{v.name}-{fmt}-{name}-{value}")
    for v in variants("attn_map")
    for fmt in v.formats
    for name, tunable in v.space.items()
    for value in (tunable.values if tunable.numeric else ())
    if not (interpreted() and name == "warps")  # which an interpreter has none of
]


@pytest.mark.parametrize(("variant", "fmt", "values"), NUMERIC)
def test_every_numeric_value_stays_within_the_error_of_float32(
    variant: Variant, fmt: KvFormat, values: dict[str, Any]
) -> None:
    """Over borders of tiles, partitions and runs, once for each kind that the variant takes."""
    for kind, rows in ((DECODE, (270, 1)), (PREFILL, (40, 3))):
        if kind in (variant.limits.kinds or (PREFILL,)):
            case = cases.Case("tuned", kind, (2, 1), 64, (rows,), cases.RUNS, pieces=3)
            inputs = cases.make(case, fmt)
            assert_within_budget(variant, fmt, inputs, attend(variant, inputs, **values))


@compiled_only()
@pytest.mark.parametrize("name", ["rows", "flash"])
def test_long_heads_lose_no_bits_to_one_long_chain(name: str) -> None:
    variant = find("attn_window", name)
    if not takes(variant, case_named("prompt-256"), KvFormat.F32):
        pytest.skip(f"{name} takes no f32 heads of 256 here")
    for seed in range(8):
        case = replace(case_named("prompt-256"), name=f"prompt-256-{seed}")
        inputs = cases.make(case, KvFormat.F32)
        assert_within_budget(variant, KvFormat.F32, inputs, attend(variant, inputs))


@compiled_only()
@pytest.mark.skipif(under_test.device == "cpu", reason="compares with the CPU")
@pytest.mark.parametrize("fmt", KvFormat, ids=str)
@pytest.mark.parametrize("name", ["drafts", "sliding", "gemma3", "batch", "chunk-sliding"])
def test_answers_are_those_of_the_cpu(name: str, fmt: KvFormat) -> None:
    """As near as the roundings that both declare allow."""
    pytest.importorskip("numba")
    case = case_named(name)
    inputs, how = cases.make(case, fmt), {"fmt": fmt, "shape": case.shape}
    ours, theirs = (
        registry.select(inputs.op, device=device, **how) for device in (under_test.device, "cpu")
    )
    tensors = inputs.tensors(theirs.block_m)
    wanted = theirs.launch(*tensors, **inputs.scalars, config=theirs.config)
    allowed = cap(ours.variant, fmt) + cap(theirs.variant, fmt)
    difference = np.abs(attend(ours.variant, inputs) - wanted).max()
    assert difference <= allowed * visible_max(inputs)


def test_every_case_of_the_matrix_meets_its_default_variant() -> None:
    meant = {DECODE: ("split", "ring"), PREFILL: ("flash",)}
    for case in cases.CASES:
        for fmt in KvFormat:
            if not case.fits(fmt):
                continue
            how: dict[str, Any] = {"device": under_test.device, "fmt": fmt, "shape": case.shape}
            chosen = registry.select(case.mode.op, **how).variant
            if case.kind == PREFILL and not takes(find(case.mode.op, "flash"), case, fmt):
                assert chosen.name == "rows"
            else:
                assert chosen.name in meant[case.kind]


@pytest.mark.parametrize("head_dim", [1, 3, 42, 65])
def test_odd_head_dims_run_through_rows(head_dim: int) -> None:
    some = ((40, 1),) if interpreted() else ((300, 3),)
    case = cases.Case("odd", "prefill", (4, 2), head_dim, some, cases.RUNS, pieces=3)
    chosen = registry.select("attn_map", device=under_test.device, shape=case.shape).variant
    assert chosen.name == "rows"
    for fmt in (KvFormat.F32, KvFormat.F16):
        inputs = cases.make(case, fmt)
        assert np.abs(attend(chosen, inputs) - exact(inputs)).max() <= 1e-5


DECODERS = [
    (name, fmt) for name in NAMES if name in ("rows", "split", "ring")
    for fmt in find("attn_map", name).formats
]  # fmt: skip


@pytest.mark.parametrize(("name", "fmt"), DECODERS, ids=str)
def test_a_damaged_row_that_is_seen_shows_in_the_output(name: str, fmt: KvFormat) -> None:
    inputs = cases.make(short("drafts"), fmt)
    runs, mine = inputs.window.array, inputs.groups[0]
    assert runs is not None
    cell = int(runs[0, 0, 0])  # the first sequence's first key
    for region in (inputs.k, inputs.v):
        kept = region.arrays[0][cell].copy()
        bad = np.full((1, region.row_elems), np.nan, np.float32)
        region.arrays[0][cell] = reference.encode_rows(bad, fmt)[0]
        out = attend(find("attn_map", name), inputs)
        region.arrays[0][cell] = kept
        assert np.isnan(out[:mine]).all() and np.isfinite(out[mine:]).all()


@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_a_damaged_row_shows_in_prefill_for_queries_that_see_it(fmt: KvFormat) -> None:
    inputs = cases.make(short("batch"), fmt)
    runs, mine = inputs.window.array, inputs.groups[0]
    assert runs is not None
    cell = int(runs[mine - 1, 0, 0])
    bad = np.full((1, inputs.k.row_elems), np.nan, np.float32)
    inputs.k.arrays[0][cell] = reference.encode_rows(bad, fmt)[0]
    out = attend(find("attn_map", "flash"), inputs)
    assert np.isnan(out[:mine]).all() and np.isfinite(out[mine:]).all()


NATIVE = [
    (name, fmt) for name in NAMES if name != "scratch" for fmt in find("attn_map", name).formats
]
# MLX writes zeros to every page that it allocates: gigabytes, so one format has to do there
FAR = [("split", KvFormat.Q8_0)] if under_test.device == "metal" else NATIVE


@compiled_only()
@pytest.mark.parametrize(("name", "fmt"), FAR, ids=str)
def test_cells_beyond_two_gigabytes_are_reached(name: str, fmt: KvFormat) -> None:
    case = case_named("chunk-sliding" if name == "flash" else "sliding")
    inputs, variant = cases.make(case, fmt), find("attn_map", name)
    sizes = (inputs.k.n_head_kv, inputs.k.head_dim)
    shift = (1 << 31) // inputs.k.row_elems + 7  # in bytes, whatever the format
    held = np.arange(inputs.k.n_cells, dtype=np.int32)
    far = [
        package().write_cells(region, held + shift, given_cells.arrays[0])
        for region, given_cells in zip(
            package().empty_regions(2, fmt, len(held) + shift, *sizes),
            (inputs.k, inputs.v),
            strict=True,
        )
    ]
    config = config_of(variant)
    q, _, _, positions, runs, tiles = inputs.tensors(config.get("block_m", 1))
    moved = runs + np.where(runs[..., 1:] > 0, np.array([shift, 0], np.int32), 0).astype(np.int32)
    q, positions, moved, tiles = (given(array) for array in (q, positions, moved, tiles))
    out = variant.launch(q, *far, positions, moved, tiles, **inputs.scalars, config=config)
    assert np.array_equal(package().to_host(out), attend(variant, inputs))


@pytest.mark.parametrize(("name", "fmt"), NATIVE, ids=str)
def test_arrays_on_the_host_of_other_whole_numbers_and_strides_give_the_same_bits(
    name: str, fmt: KvFormat
) -> None:
    inputs = cases.make(short("batch" if name == "flash" else "drafts"), fmt)
    variant = find("attn_map", name)
    config = config_of(variant)
    q, k, v, positions, runs, tiles = inputs.tensors(config.get("block_m", 1))
    wide = np.full((*q.shape[:2], 2 * q.shape[2]), np.nan, np.float32)
    wide[..., ::2] = q
    positions.flags.writeable = runs.flags.writeable = False
    tensors = (wide[..., ::2], k, v, positions.astype(np.int64), runs, tiles)
    out = launch(variant, *tensors, **inputs.scalars, config=config, host=True)
    assert np.array_equal(out, attend(variant, inputs))


# -- refusals -------------------------------------------------------------------------------------


def refused(rule: str, op: str, name: str, *tensors: Any, **scalars: Any) -> str:
    with pytest.raises(Refusal) as caught:
        launch(find(op, name), *tensors, **scalars, host=True)
    assert caught.value.rule == rule, caught.value
    return caught.value.message


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_do_not_fit_are_refused(name: str) -> None:
    fmt = find("attn_map", name).formats[0]
    inputs = cases.make(case_named("batch"), fmt)
    q, k, v, positions, runs, tiles = inputs.tensors(32)
    how = inputs.scalars

    def said(rule: str, *tensors: Any, **changes: Any) -> str:
        return refused(rule, "attn_map", name, *tensors, **{**how, **changes})

    assert "float64" in said("4.2", q.astype(np.float64), k, v, positions, runs, tiles)
    assert "7 query heads" in said("2.8", q[:, :7], k, v, positions, runs, tiles)
    assert "[n_q, n_head, 64]" in said("10", q[:, :, :32], k, v, positions, runs, tiles)
    other = next(other for other in KvFormat if other is not fmt)
    assert str(other) in said("3.2", q, k, v, positions, runs, tiles, fmt=other)
    for width in (-1, 2.5, 2**32 + 3):
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
    assert "runs" in refused("2.2", "attn_window", name, q, k, v, positions, runs, tiles, **how)


@pytest.mark.parametrize("name", NAMES)
def test_a_region_that_is_not_what_its_sizes_say_is_refused(name: str) -> None:
    variant = find("attn_map", name)
    inputs = cases.make(case_named("batch"), variant.formats[0])
    q, k, v, positions, runs, tiles = inputs.tensors(32)
    whole = given(k)
    narrow = replace(whole, arrays=(whole.arrays[0][:, :8], *whole.arrays[1:]))
    with pytest.raises(Refusal, match="2 heads of 64") as caught:
        variant.launch(
            q, narrow, given(v), positions, runs, tiles,
            **inputs.scalars, config=config_of(variant),
        )  # fmt: skip
    assert caught.value.rule == "3.5"


@pytest.mark.parametrize("name", NAMES)
def test_a_head_dim_that_its_limits_leave_out_is_refused(name: str) -> None:
    variant = find("attn_window", name)
    case = cases.Case("odd", PREFILL, (2, 1), 40, ((3, 2),), cases.CAUSAL)
    kind = (variant.limits.kinds or (PREFILL,))[0]
    if takes(variant, replace(case, kind=kind)) or KvFormat.F32 not in variant.formats:
        pytest.skip(f"{name} takes head_dim 40, or no f32 cells")
    inputs = cases.make(case, KvFormat.F32)
    said = refused("10", "attn_window", name, *inputs.tensors(32), **inputs.scalars)
    assert "head_dim 40" in said and "rows" in said


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
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_call_returns_an_empty_array(op: str, name: str) -> None:
    variant = find(op, name)
    inputs = cases.make(case_named("batch"), variant.formats[-1])
    q, k, v, positions, runs, tiles = inputs.tensors(32)
    indirection = runs[:0] if op == "attn_map" else None
    tensors = (q[:0], k, v, positions[:0], indirection, tiles[:0])
    for host in (False, True):
        assert launch(variant, *tensors, host=host, **inputs.scalars).shape == (0, 8, 64)
