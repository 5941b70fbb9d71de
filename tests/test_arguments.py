"""What launchers take: the type and shape they say, refused otherwise and never cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minfer import kernels_numba as backend
from minfer.errors import Refusal
from minfer.format import KvFormat, Region
from minfer.kernels_numba._arguments import floats, int32s, read_only
from minfer.kernels_numba.cells import qkv_rope_store_rows, store_cells_rows
from minfer.kernels_numba.dense import add_rows, embed_rows, rms_norm_rows, rope_rows, silu_mul_rows
from minfer.kernels_numba.matmul import matmul_blocks, matmul_tiles
from minfer.kernels_numba.matvec import matvec_blocks, matvec_lanes
from minfer.kernels_numba.q8_0 import (
    dequantize_q8_0_blocks,
    dot_q8_0_blocks,
    quantize_q8_0_blocks,
)
from minfer.kv.store import KvStore

ONE = {"threads": 1}
ROWS = np.ones((2, 32), np.float32)


def said(rule: str, call: Callable[[], object]) -> str:
    with pytest.raises(Refusal) as caught:
        call()
    assert caught.value.rule == rule
    return caught.value.message


def test_whole_numbers_keep_their_value_or_are_refused() -> None:
    for given in ([3, 1], np.array([3, 1], np.int64), np.array([3, 1], np.uint8)):
        found = int32s(given, "cells")
        assert found.dtype == np.int32 and found.tolist() == [3, 1] and found.flags.carray
    assert int32s([], "cells").tolist() == []
    same = np.array([5], np.int32)
    assert int32s(same, "cells") is same
    assert "float64" in said("10", lambda: int32s(np.array([1.9]), "cells"))
    assert "bool" in said("10", lambda: int32s(np.array([True]), "cells"))
    assert "1 dimensions" in said("10", lambda: int32s(np.zeros((1, 1), np.int32), "cells"))
    for value in (2**31, 2**32 + 1, -(2**31) - 1):
        assert f"{value} in cells" in said("10", lambda: int32s(np.array([value]), "cells"))  # noqa: B023
    assert int32s(np.array([-(2**31), 2**31 - 1]), "cells").tolist() == [-(2**31), 2**31 - 1]


def test_float32_is_taken_as_it_is_and_nothing_else() -> None:
    assert floats(ROWS, "x", 2) is ROWS
    spread, frozen = np.ones((2, 64), np.float32)[:, ::2], ROWS.copy()
    frozen.flags.writeable = False
    for given in (spread, frozen):
        found = floats(given, "x", 2)
        assert found.flags.carray and (found == given).all()
    weight = read_only(ROWS, "weight", 2)
    assert not weight.flags.writeable and ROWS.flags.writeable and np.shares_memory(weight, ROWS)
    for dtype in (np.float64, np.float16, np.int32):
        assert np.dtype(dtype).name in said("4.2", lambda: floats(ROWS.astype(dtype), "x", 2))  # noqa: B023
    assert "float64" in said("4.2", lambda: floats([[1.0]], "x", 2))
    assert "2 dimensions" in said("10", lambda: floats(ROWS[0], "x", 2))


def wide(array: Any) -> Any:
    return array.astype(np.float64)


TABLE, AT = np.ones((2, 4), np.float32), np.zeros(2, np.int32)
FAR = AT.astype(np.int64) + 2**32
HEADS = np.ones((2, 1, 8), np.float32)
F32, F16, Q8_0 = KvFormat
CODES = np.zeros((2, 36), np.uint8)
CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "quantize, float64": ("4.2", lambda: quantize_q8_0_blocks(wide(ROWS), config=ONE)),
    "quantize, one row": ("10", lambda: quantize_q8_0_blocks(ROWS[0], config=ONE)),
    "dequantize, a list": ("3.4", lambda: dequantize_q8_0_blocks([[0] * 36], n=32, config=ONE)),  # type: ignore[arg-type]
    "dequantize, half n": ("3.3", lambda: dequantize_q8_0_blocks(ROWS, n=1.5, config=ONE)),  # type: ignore[arg-type]
    "dot, float32": ("3.4", lambda: dot_q8_0_blocks(ROWS, ROWS, n=32, config=ONE)),  # type: ignore[arg-type]
    "matvec, float64": ("4.2", lambda: matvec_lanes(ROWS, wide(ROWS), fmt=F32, config=ONE)),
    "matmul, float64 weight": ("4.2", lambda: matmul_tiles(wide(ROWS), ROWS, fmt=F32, config=ONE)),
    "matvec, f32 as f16": ("4.2", lambda: matvec_lanes(ROWS, ROWS, fmt=F16, config=ONE)),
    "matmul, f32 as q8_0": ("4.2", lambda: matmul_blocks(ROWS, ROWS, fmt=Q8_0, config=ONE)),
    "matvec, padded blocks": ("3.3", lambda: matvec_blocks(CODES, ROWS, fmt=Q8_0, config=ONE)),
    "matvec, one row": ("10", lambda: matvec_lanes(ROWS[0], ROWS, fmt=F32, config=ONE)),
    "rms_norm, float64": ("4.2", lambda: rms_norm_rows(wide(ROWS), ROWS[0], eps=1, config=ONE)),
    "rms_norm, wide weight": ("10", lambda: rms_norm_rows(ROWS, TABLE[0], eps=1, config=ONE)),
    "silu_mul, float64": ("4.2", lambda: silu_mul_rows(ROWS, wide(ROWS), config=ONE)),
    "add, integers": ("4.2", lambda: add_rows(ROWS, ROWS.astype(int), config=ONE)),  # type: ignore[arg-type]
    "embed, float tokens": ("10", lambda: embed_rows(ROWS, np.array([0.5]), fmt=F32, config=ONE)),  # type: ignore[arg-type]
    "rope, float positions": (
        "10",
        lambda: rope_rows(HEADS, AT + 0.5, TABLE, TABLE, pairing="half", config=ONE),  # type: ignore[arg-type]
    ),
    "rope, large positions": (
        "10",
        lambda: rope_rows(HEADS, FAR, TABLE, TABLE, pairing="half", config=ONE),
    ),
    "threads, a float": ("0.3", lambda: silu_mul_rows(ROWS, ROWS, config={"threads": 1.5})),
}


@pytest.mark.parametrize(("rule", "call"), CALLS.values(), ids=CALLS.keys())
def test_launchers_refuse_what_they_would_have_to_cast(
    rule: str, call: Callable[[], object]
) -> None:
    assert said(rule, call)


def test_cells_and_rows_that_do_not_fit_change_no_byte() -> None:
    region = backend.empty_region(KvFormat.F32, 4, 1, 32)
    rows = np.ones((1, 1, 32), np.float32)

    def store(rows: Any, cell: Any) -> Callable[[], object]:
        cells = np.array([cell])
        return lambda: store_cells_rows(region, rows, cells, fmt=KvFormat.F32, config=ONE)

    assert "float64" in said("10", store(rows, 1.9))
    assert "4294967297" in said("10", store(rows, 2**32 + 1))
    assert "float64" in said("4.2", store(wide(rows), 1))
    assert "int64" in said("4.2", store(rows.astype(np.int64), 1))
    for call in (backend.read_cells, backend.decode_cells, backend.clear_cells):
        assert "4294967297" in said("10", lambda: call(region, np.array([2**32 + 1])))  # noqa: B023
    assert not region.arrays[0].any()


def test_regions_that_cannot_be_written_or_are_not_what_they_say_are_refused() -> None:
    rows, at = np.ones((1, 1, 32), np.float32), np.zeros(1, np.int32)
    cells = np.zeros((4, 128), np.uint8)
    cells.flags.writeable = False
    for array, rule, word in (
        (cells, "10", "read-only"),
        (np.zeros((4, 64), np.uint8), "3.5", "[4, 64]"),
        (np.zeros((4, 256), np.uint8)[:, ::2], "3.5", "contiguous"),
    ):
        region = Region(KvFormat.F32, backend.LAYOUT, 1, 32, (array,))
        message = said(
            rule,
            lambda: store_cells_rows(region, rows, at, fmt=KvFormat.F32, config=ONE),  # noqa: B023
        )
        assert word in message


def test_rope_and_store_refuses_regions_of_different_heads() -> None:
    k, v = backend.empty_region(KvFormat.F32, 4, 1, 8), backend.empty_region(KvFormat.F32, 4, 2, 8)
    rows = (HEADS, HEADS, np.ones((2, 2, 8), np.float32))
    message = said(
        "10",
        lambda: qkv_rope_store_rows(
            *rows, k, v, AT, AT, TABLE, TABLE, fmt=KvFormat.F32, pairing="half", config=ONE
        ),
    )
    assert message == "K has 1 heads of 8, V has 2 of 8"
    assert not k.arrays[0].any() and not v.arrays[0].any()


@pytest.mark.parametrize("sanitize", ["0", "1", "", 0, 1, [], float("nan")])
def test_the_sanitizer_is_on_or_off(sanitize: object) -> None:
    """A setting's text is no answer: "0" would be true."""
    with pytest.raises(Refusal, match="True, False or None") as refused:
        KvStore(1, 8, 1, 32, cache_type="f32", sanitize=sanitize)  # type: ignore[arg-type]
    assert refused.value.rule == "10"
    assert KvStore(1, 8, 1, 32, sanitize=np.True_).sanitize is True  # type: ignore[arg-type]
