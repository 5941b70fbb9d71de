"""A planted fault: a small kernel and the words of its error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from metalsim import MetalError, Mode, metal_kernel, running

START = (
    "uint t = thread_index_in_threadgroup, g = thread_position_in_grid.x,"
    " lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;\n"
    "threadgroup float s[256];\n"
)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
ONES = mx.ones(256)


@dataclass(frozen=True)
class Case:
    """A kernel of one input `x` and one output `out`; `words` of its error, none if it is right."""

    title: str
    source: str
    words: str | None  # None: the kernel is correct
    line: str | None = None  # the text of the source line that the error shows
    grid: int = 256
    threadgroup: int = 256
    shape: tuple[int, ...] = (256,)
    x: Any = ONES
    dtype: Any = mx.float32
    header: str = ""
    mode: Mode = Mode.CHECKED
    timeout_ms: int = 60_000
    init_value: float | None = None
    maker: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("out",)

    def run(self) -> Any:
        kernel = metal_kernel("k", ["x"], self.outputs, self.source, self.header, **self.maker)
        with running(self.mode, timeout_ms=self.timeout_ms):
            return kernel(
                inputs=[self.x],
                grid=(self.grid, 1, 1),
                threadgroup=(self.threadgroup, 1, 1),
                output_shapes=[self.shape] * len(self.outputs),
                output_dtypes=[self.dtype] * len(self.outputs),
                init_value=self.init_value,
            )[-1]


def check(case: Case) -> None:
    """Runs the case; the error must say `words` and show `line`."""
    if case.words is None:
        case.run()
        return
    with pytest.raises(MetalError) as caught:
        case.run()
    message = str(caught.value)
    assert case.words in message, message
    if case.line is not None:
        assert case.line in message.partition("\n")[2], message
