"""The CPU's attention to the bit: q8_0 scores, and the tree that joins partitions."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from under_test import attend, case_named, config_of, find, same_bits

from minfer import cases, reference
from minfer.format import KvFormat
from minfer.kernels_numba import _heads, _panels, _query, _softmax
from minfer.kernels_numba._ir import address
from minfer.ops import DECODE
from minfer.window import PARTITION

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
            **inputs.scalars, config=config_of(find("attn_map", name)),
        )
        for name in ("split", "flash")
    ]  # fmt: skip
    assert same_bits(*outs)


def test_a_region_that_is_read_only_is_read() -> None:
    inputs = cases.make(case_named("drafts"), KvFormat.F32)
    variant = find("attn_map", "split")
    inputs.k.arrays[0].flags.writeable = False
    out = variant.launch(*inputs.tensors(1), **inputs.scalars, config=config_of(variant))
    assert np.array_equal(out, attend(variant, inputs))
