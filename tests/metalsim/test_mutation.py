"""Deleted barriers are noticed, in the demo kernels and in MLX's own attention kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

import numpy as np  # noqa: E402

from metalsim import (  # noqa: E402
    Mode,
    barriers,
    demo,
    edited,
    launches,
    metal_kernel,
    running,
    unnoticed,
    without,
)

HEADS, CELLS, DIM = 4, 96, 64
SDPA = Path(mx.__file__).with_name("include").joinpath("mlx/backend/metal/kernels/sdpa_vector.h")
CALL = """
sdpa_vector<T, 64>(q, k, v, out, gqa, n, head_stride, cell_stride, head_stride, cell_stride, scale,
    no_mask, (const device T*)nullptr, gqa, n, n, (const device T*)nullptr, heads,
    threadgroup_position_in_grid, threadgroups_per_grid, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);
"""


def sdpa_header() -> str:
    """MLX's kernel, its function constants (masks, causality, sinks) off."""
    text = re.sub(
        r"constant (\w+) (\w+) \[\[function_constant\(\d+\)\]\];",
        r"constant \1 \2 = 0;",
        SDPA.read_text(),
    )
    return text[: text.rindex("template", 0, text.index("sdpa_vector_2pass_1"))]


def sdpa(q: Any, k: Any, v: Any) -> Any:
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "gqa": 1,
        "n": CELLS,
        "head_stride": mx.array(CELLS * DIM, mx.uint64),
        "cell_stride": mx.array(DIM, mx.uint64),
        "scale": DIM**-0.5,
        "no_mask": mx.zeros(16, mx.bool_),
        "heads": HEADS,
    }
    kernel = metal_kernel("sdpa", list(inputs), ["out"], CALL, sdpa_header())
    return kernel(
        inputs=list(inputs.values()),
        template=[("T", q.dtype)],
        grid=(HEADS * 1024, 1, 1),
        threadgroup=(1024, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
    )[0]


def qkv(dtype: Any) -> list[Any]:
    shapes = (HEADS, DIM), (HEADS, CELLS, DIM), (HEADS, CELLS, DIM)
    return [demo.normal(shape, dtype, 11 + i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("mode", Mode, ids=lambda m: m.value)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(mx.float32, 1e-6), (mx.float16, 2e-4), (mx.bfloat16, 2e-3)]
)
def test_sdpa_vector_of_mlx(dtype: Any, tolerance: float, mode: Mode) -> None:
    q, k, v = qkv(dtype)
    with running(mode):
        out = sdpa(q, k, v)
    scores = np.einsum("hd,hcd->hc", demo.float64(q), demo.float64(k)) * DIM**-0.5
    e = np.exp(scores - scores.max(1, keepdims=True))
    expected = np.einsum("hc,hcd->hd", e / e.sum(1, keepdims=True), demo.float64(v))
    np.testing.assert_allclose(demo.float64(out), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("run", "count"),
    [
        (demo.softmax(2, 300).run, 3),
        (demo.decode(0, 64, cells=64).run, 1),
        (demo.matmul(16).run, 2),
        (lambda: sdpa(*qkv(mx.float32)), 3),
    ],
    ids=["softmax", "decode", "matmul", "sdpa_vector"],
)
def test_every_deleted_barrier_is_noticed(run: Any, count: int) -> None:
    with launches() as seen:
        run()
    assert [len(barriers(text)) for _, text in seen] == [count]
    assert unnoticed(run) == []


def test_a_barrier_that_nothing_needs_is_reported() -> None:
    source = """
      uint i = thread_position_in_grid.x;
      // threadgroup_barrier(mem_flags::mem_threadgroup); is a comment
      float v = x[i];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[i] = v;
    """
    needless = metal_kernel("needless", ["x"], ["out"], source)

    def run(kernel: Any = needless) -> Any:
        return kernel(
            inputs=[mx.ones(64)],
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
        )

    # A fault of another kernel, which checks would find, does not count for this one.
    racing = "threadgroup float s[1];\ns[0] = 1;\nout[thread_position_in_grid.x] = x[0];"
    other = metal_kernel("racing", ["x"], ["out"], racing)

    def both() -> Any:
        return run(), run(other)

    (missed,) = unnoticed(both)
    assert missed.kernel == "needless"
    assert missed.text == "threadgroup_barrier(mem_flags::mem_threadgroup);"
    with launches() as seen:
        run()
    assert seen[0].text.split("\n")[missed.line - 1].strip() == missed.text


def test_without_keeps_the_line_numbers() -> None:
    text = "a;\nthreadgroup_barrier(\n  mem_flags::mem_device);\nb;"
    (span,) = barriers(text)
    assert without(text, span) == "a;\n;\n\nb;"


def test_an_edit_changes_what_runs() -> None:
    case = demo.axpy(mx.float16, 0)
    with edited(lambda name, text: text.replace("+ y[i]", "+ 0 * y[i]")):
        out = case.run()[0]
    np.testing.assert_allclose(demo.float64(out), demo.float64(case.inputs["x"]) * 1.5)
