"""What a launcher on Metal is given: planes are mlx arrays, small arrays lie in device memory."""

from __future__ import annotations

import numpy as np
import pytest
import under_test

mx = pytest.importorskip("mlx.core")

from minfer.errors import Refusal  # noqa: E402
from minfer.format import KvFormat, Region  # noqa: E402
from minfer.kernels_mlx import MetalKernel  # noqa: E402
from minfer.kernels_mlx._arguments import check_region  # noqa: E402

pytestmark = pytest.mark.skipif(under_test.device != "metal", reason="by --on metal")


def test_planes_of_another_library_are_refused() -> None:
    cells = np.zeros((4, 64), np.float32)
    check_region(Region(KvFormat.F32, "planes", 2, 32, (mx.array(cells),)), KvFormat.F32)
    with pytest.raises(Refusal, match=r"is contiguous float32 \[4, 64\], not ") as caught:
        check_region(Region(KvFormat.F32, "planes", 2, 32, (cells,)), KvFormat.F32)
    assert caught.value.rule == "3.5"


@pytest.mark.parametrize("n", [1, 7, 8, 9])
def test_arrays_of_any_size_lie_in_device_memory(n: int) -> None:
    """A helper that takes a device pointer would not compile over another address space."""
    total = MetalKernel(
        "total",
        ("x", "n"),
        ("out",),
        "if (thread_position_in_grid.x == 0) out[0] = sum(x, n);",
        "float sum(const device float* x, int n) {\n"
        "  float s = 0.0f;\n  for (int i = 0; i < n; i++) s += x[i];\n  return s;\n}\n",
    )
    with under_test.checked(True):
        (out,) = total(
            mx.arange(n, dtype=mx.float32), n, outputs=[((1,), mx.float32)], groups=(1, 1, 1),
            threads=32,
        )  # fmt: skip
    assert out.item() == n * (n - 1) / 2
