"""What MLX itself makes of a call of a custom kernel, on a machine without Metal.

Inside `mx.export_function` MLX records custom kernels instead of running them. The record holds
the MSL text it would compile on a Mac, the grid, and the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

try:
    import mlx.core as mx
except ImportError:  # tests that need it skip
    mx = None
else:
    MLX_METAL_KERNEL = mx.fast.metal_kernel  # the real one, whoever takes its place later


@dataclass(frozen=True)
class Launch:
    """One call of a kernel as MLX would hand it to Metal."""

    name: str  # of the Metal function
    text: str  # MSL, without MLX's own prelude
    grid: tuple[int, ...]  # threads
    threadgroup: tuple[int, ...]
    inputs: tuple[Any, ...]  # mx arrays, Python scalars made into arrays by MLX
    outputs: tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype
    row_contiguous: bool  # inputs that are not row-contiguous are copied first


def trace(kernel: Callable[..., Any], inputs: Sequence[Any], options: dict[str, Any]) -> Launch:
    """The launch of MLX's `kernel`; what MLX refuses is raised as MLX raises it."""
    events: list[dict[str, Any]] = []
    arrays = [x for x in inputs if isinstance(x, mx.array)]

    def call(*stand_ins: Any) -> Any:
        rest = iter(stand_ins)
        given = [next(rest) if isinstance(x, mx.array) else x for x in inputs]
        return kernel(inputs=given, **options)

    mx.export_function(events.append, call, *arrays)
    known: dict[str, Any] = {}
    for event in events:
        if event["type"] == "inputs":
            known.update(zip((i[0] for i in event["inputs"]), arrays, strict=True))
        elif event["type"] == "constants":
            known.update(event["constants"])
    (found,) = (e for e in events if e.get("name") == "CustomKernel")
    # name, text, grid, threadgroup, which facts each input hands over, row-contiguous, ...
    name, text, *sizes, _, row_contiguous = found["arguments"][:10]
    return Launch(
        name,
        text,
        tuple(sizes[:3]),
        tuple(sizes[3:]),
        tuple(known[i[0]] for i in found["inputs"]),
        tuple((tuple(shape), dtype) for _, shape, dtype in found["outputs"]),
        bool(row_contiguous),
    )
