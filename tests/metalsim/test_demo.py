"""Demo kernels against float64, fast and checked."""

from __future__ import annotations

import pytest

mx = pytest.importorskip("mlx.core")

import numpy as np  # noqa: E402

from metalsim import Mode, demo, running  # noqa: E402

DEMOS = [
    demo.axpy(mx.float16, 3e-7),
    demo.axpy(mx.bfloat16, 3e-7),
    demo.softmax(),
    demo.decode(0, 512),
    demo.decode(37, 300),
    demo.quantize(),
    demo.matmul(),
]


@pytest.mark.parametrize("mode", Mode, ids=lambda m: m.value)
@pytest.mark.parametrize("case", DEMOS, ids=lambda d: d.name)
def test_demo_kernels_agree_with_float64(case: demo.Demo, mode: Mode) -> None:
    with running(mode):
        out = case.run()[0]
    assert out.shape == next(iter(case.outputs.values()))[0]
    np.testing.assert_allclose(demo.float64(out), case.answer(), rtol=0, atol=case.tolerance)


@pytest.mark.parametrize("case", DEMOS, ids=lambda d: d.name)
def test_the_two_modes_give_the_same_bits(case: demo.Demo) -> None:
    fast = case.run()
    with running(Mode.CHECKED, seed=5, preempt_every=3):
        checked = case.run()
    for a, b in zip(fast, checked, strict=True):
        assert a.dtype == b.dtype
        assert mx.array_equal(a, b).item()


def test_quantize_scales_are_rounded_once() -> None:
    case = demo.quantize()
    scale = np.array(case.run()[1])
    rows = np.array(case.inputs["x"]).reshape(-1, 32)
    expected = (np.abs(rows).max(1) / np.float32(127)).astype(np.float16)
    np.testing.assert_array_equal(scale, expected)
