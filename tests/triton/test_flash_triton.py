"""`flash` in Triton: bits that depend on a row alone, and its own borders.

Runs on a GPU, or with TRITON_INTERPRET=1 on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from minfer import cases, reference
from minfer.errors import Refusal
from minfer.format import Floats, KvFormat, Region
from minfer.window import CellSpan, Runs, Span, Window, runs_array, span_array, tiles

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from minfer import kernels_triton  # noqa: E402
from minfer.kernels_triton import _flash  # noqa: E402
from minfer.kernels_triton._arguments import interpreted  # noqa: E402
from minfer.kernels_triton._call import prepare, tiles_of  # noqa: E402
from minfer.kernels_triton._tunables import FLASH_LIMITS  # noqa: E402

if not (interpreted() or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

BLOCK_M = 128
FORMATS = list(KvFormat)
BLOCKS = _flash.Blocks(rows=64, block_n=32, warps=8, stages=2)


class Prompt(NamedTuple):
    """Rows of one sequence, all of which are queries."""

    q: Floats
    k: Floats
    v: Floats


def prompt(n: int, heads: tuple[int, int], head_dim: int) -> Prompt:
    case = cases.Case(f"prompt-{n}-{heads}-{head_dim}", "prefill", heads, head_dim, ((0, n),))
    (own,) = cases.rows(np.random.default_rng(n), case)
    return Prompt(own.q, own.k, own.v)


def planes(region: Region) -> Region:
    """A canonical region as the package holds it."""
    sizes = (region.n_cells, region.n_head_kv, region.head_dim)
    empty = kernels_triton.empty_region(region.fmt, *sizes)
    return kernels_triton.write_cells(
        empty, np.arange(region.n_cells, dtype=np.int32), region.arrays[0]
    )


def attend(
    inputs: cases.Inputs, blocks: _flash.Blocks | None = None, block_m: int = BLOCK_M
) -> Floats:
    q, k, v, positions, window, cut = inputs.tensors(block_m)
    call = prepare(inputs.op, q, planes(k), planes(v), positions, window, **inputs.scalars)
    at_home = tiles_of(call, cut, block_m)
    if blocks is None:
        out = _flash.attend_flash(call, at_home, {"block_m": block_m})
    else:
        out = _flash.launch_flash(call, at_home, block_m, blocks)
    return kernels_triton.to_host(out)


def placed(
    own: Prompt,
    fmt: KvFormat,
    spans: Sequence[CellSpan],
    window: Window,
    chunk: slice,
    width: int = 0,
) -> cases.Inputs:
    """Queries `chunk` of a prompt that lies in `spans`; other cells hold NaN, later rows too."""
    parts = [CellSpan(p, c, min(n, chunk.stop - p)) for p, c, n in spans if p < chunk.stop]
    n_cells = max(cell + n for _, cell, n in spans) + 3
    k, v = (cases.region(fmt, [rows], [parts], n_cells) for rows in (own.k, own.v))
    return cases.Inputs(
        q=own.q[chunk],
        k=k,
        v=v,
        positions=np.arange(chunk.start, chunk.stop, dtype=np.int32),
        window=window,
        groups=(chunk.stop - chunk.start,),
        fmt=fmt,
        scale=own.q.shape[2] ** -0.5,
        width=width,
        kind="prefill",
    )


def in_mode(
    own: Prompt, fmt: KvFormat, mode: str, chunk: slice, width: int = 0, clip: int = 0
) -> cases.Inputs:
    """The same rows from cell 0 on, moved up, or in four runs with odd borders."""
    n = len(own.k)
    if mode == "causal":
        return placed(
            own, fmt, [CellSpan(0, 0, n)], cases.windows(cases.CAUSAL, [], [], 0), chunk, width
        )
    if mode == "span":
        spans = [CellSpan(0, 7, n)]
        return placed(
            own, fmt, spans, Span(span_array([(spans, range(n)[chunk])], clip)), chunk, width
        )
    a, b, c = 1, 1 + n // 3, n - 13
    spans = [
        CellSpan(0, n + 20, a),
        CellSpan(a, 5, b - a),
        CellSpan(b, n + 33, c - b),
        CellSpan(c, 2 * n + 40, n - c),
    ]
    return placed(own, fmt, spans, Runs(runs_array([(spans, range(n)[chunk])], clip)), chunk, width)


def half_decoded(region: Region) -> Region:
    """The region as f32 cells, every q8_0 value rounded to float16."""
    cells = region.arrays[0]
    rows = reference.decode_rows(cells, region.fmt, region.row_elems)
    if region.fmt is KvFormat.Q8_0:
        rows = rows.astype(np.float16).astype(np.float32)
    arrays = (reference.encode_rows(rows, KvFormat.F32),)
    return Region(KvFormat.F32, "canonical", region.n_head_kv, region.head_dim, arrays)


def check(inputs: cases.Inputs, out: Floats) -> None:
    """Within rounding: of float32 for f32 cells, of weights to float16 for the others."""
    runs: Any = inputs.window.array
    if inputs.op == "attn_window":
        runs = reference.runs_of(inputs.positions, runs)
    k, v = half_decoded(inputs.k), half_decoded(inputs.v)
    q = inputs.q
    if inputs.fmt is not KvFormat.F32:
        q = q.astype(np.float16).astype(np.float32)
    arguments = (q, k, v, inputs.positions, runs)
    scalars = {**inputs.scalars, "fmt": KvFormat.F32}
    exact = reference.attention(*arguments, **scalars)
    error = np.abs(out - exact).max()
    single = np.abs(reference.attention(*arguments, **scalars, dtype=np.float32) - exact).max()
    largest = np.nanmax(np.abs(v.arrays[0].view(np.float32)))
    rounding = 0.0 if inputs.fmt is KvFormat.F32 else 2.0**-11 * float(largest)
    assert error <= 2 * single + 1e-6 + rounding


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("mode", ["causal", "span", "runs"])
def test_a_chunk_has_the_bits_of_the_whole_prompt(fmt: KvFormat, mode: str) -> None:
    own = prompt(150, (6, 2), 64)
    whole = attend(in_mode(own, fmt, mode, slice(0, 150)), BLOCKS)
    check(in_mode(own, fmt, mode, slice(0, 150)), whole)
    for begin, end in ((0, 37), (37, 38), (38, 64), (64, 150), (11, 149)):
        part = attend(in_mode(own, fmt, mode, slice(begin, end)), BLOCKS)
        assert np.array_equal(part, whole[begin:end])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("width", [0, 5, 40])
def test_bits_are_those_of_every_mode(fmt: KvFormat, width: int) -> None:
    own, chunk = prompt(150, (4, 1), 32), slice(60, 150)
    causal = attend(in_mode(own, fmt, "causal", chunk, width), BLOCKS)
    check(in_mode(own, fmt, "causal", chunk, width), causal)
    for mode in ("span", "runs"):
        for clip in {0, width}:
            inputs = in_mode(own, fmt, mode, chunk, width, clip)
            assert np.array_equal(attend(inputs, BLOCKS), causal)
            if clip:
                unsaid = replace(inputs, width=0)
                assert np.array_equal(attend(unsaid, BLOCKS), causal)


@pytest.mark.parametrize("fmt", FORMATS)
def test_place_in_a_tile_does_not_change_bits(fmt: KvFormat) -> None:
    inputs = in_mode(prompt(90, (4, 2), 64), fmt, "runs", slice(20, 90), 33)
    bits = attend(inputs, BLOCKS)
    for block_m in (1, 7, 16, 50, 256):
        assert np.array_equal(attend(inputs, BLOCKS, block_m), bits)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_head_size(fmt: KvFormat, head_dim: int) -> None:
    if fmt is KvFormat.Q8_0 and head_dim % 32:
        pytest.skip("q8_0 heads are whole blocks")
    if fmt is KvFormat.F32 and head_dim > FLASH_LIMITS.max_head_dim_f32:
        pytest.skip("longer heads over f32 cells are for rows")
    inputs = in_mode(prompt(140, (2, 1), head_dim), fmt, "runs", slice(100, 140))
    check(inputs, attend(inputs))


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 32])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_group_size(fmt: KvFormat, group: int) -> None:
    inputs = in_mode(prompt(80, (2 * group, 2), 32), fmt, "span", slice(50, 80), 17)
    check(inputs, attend(inputs))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_sequence_has_the_bits_it_has_alone(fmt: KvFormat) -> None:
    heads, alone = (3, 1), []
    sequences = ((0, 33), (70, 20), (7, 1))
    case = cases.Case("flash-batch", "prefill", heads, 64, sequences, cases.RUNS, pieces=3)
    inputs = cases.make(case, fmt)
    bits = attend(inputs)
    check(inputs, bits)
    start = 0
    for n in inputs.groups:
        own = slice(start, start + n)
        alone.append(
            attend(
                replace(
                    inputs,
                    q=inputs.q[own],
                    positions=inputs.positions[own],
                    window=Runs(inputs.window.array[own]),
                    groups=(n,),
                )
            )
        )
        start += n
    assert np.array_equal(np.concatenate(alone), bits)
    assert (tiles(inputs.groups, BLOCK_M)[-1] == 0).all()  # a tile without rows was in the batch


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_scale_of_zero_weighs_all_keys_alike(fmt: KvFormat) -> None:
    inputs = replace(in_mode(prompt(40, (2, 2), 32), fmt, "causal", slice(0, 40)), scale=0.0)
    out = attend(inputs)
    check(inputs, out)
    own = reference.decode_rows(inputs.v.arrays[0][:1], fmt, inputs.v.row_elems)
    assert np.allclose(out[0].ravel(), own[0], atol=1e-3)


def test_no_query_gives_no_rows() -> None:
    inputs = in_mode(prompt(9, (2, 1), 32), KvFormat.F16, "causal", slice(0, 9))
    call = prepare(
        inputs.op, inputs.q[:0], planes(inputs.k), planes(inputs.v), inputs.positions[:0], None,
        **inputs.scalars,
    )  # fmt: skip
    no_tiles = kernels_triton.from_host(np.zeros((0, 2), np.int32))
    assert _flash.attend_flash(call, no_tiles, {"block_m": 32}).shape == (0, 2, 32)


def test_a_tile_larger_than_block_m_is_refused() -> None:
    inputs = cases.make(next(c for c in cases.CASES if c.name == "prompt"), KvFormat.F32)
    q, k, v, positions, window, _ = inputs.tensors(BLOCK_M)
    call = prepare(inputs.op, q, planes(k), planes(v), positions, window, **inputs.scalars)
    whole = np.array([[0, len(q)]], np.int32)
    assert tiles_of(call, whole, len(q)).tolist() == whole.tolist()
    with pytest.raises(Refusal, match="70 queries is larger than block_m 64") as caught:
        tiles_of(call, whole, 64)
    assert caught.value.rule == "2.7"
