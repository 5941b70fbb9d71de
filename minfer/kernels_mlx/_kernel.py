"""Metal kernels as values: source text, argument names, and a call that launches.

MLX writes the signature around a source (`mx.fast.metal_kernel`). Inputs of fewer than 8 elements
would come in another address space, so they are padded; scalars come as references.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import mlx.core as mx

SIMD = 32  # threads of a simdgroup
LEAST = 8  # elements from which MLX hands an input over in device memory
THREADS = 256  # of a threadgroup where each works for itself; 1024 fit only if they hold little

# Contraction would give one expression other bits in another kernel (contract 6.3e).
PRELUDE = "#pragma METAL fp contract(off)\n"

Output = tuple[Sequence[int], Any]  # shape and dtype


def _metal_kernel() -> Callable[..., Any]:
    """MLX's maker of kernels; the simulator's where there is no Metal."""
    if mx.metal.is_available():
        return mx.fast.metal_kernel
    # `Device.unavailable` has looked for it
    return cast(Callable[..., Any], importlib.import_module("metalsim").metal_kernel)


@dataclass(frozen=True)
class MetalKernel:
    """One kernel. inputs, outputs: argument names in order. source: the body of the kernel.

    header: text of the functions that the source calls.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str = ""

    @cached_property
    def _made(self) -> Callable[..., Any]:
        made: Callable[..., Any] = _metal_kernel()(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=self.source,
            header=PRELUDE + self.header,
        )
        return made

    def __call__(
        self,
        *inputs: Any,
        outputs: Sequence[Output],
        groups: tuple[int, int, int],
        threads: int,
        **template: Any,
    ) -> list[mx.array]:
        """Launch `groups` threadgroups of `threads`; arrays of `outputs`, one each.

        inputs: arrays, or numbers. template: constants of the source, int, bool or dtype.
        """
        x, y, z = groups
        made: list[mx.array] = self._made(
            inputs=[_roomy(array) for array in inputs],
            template=list(template.items()),
            grid=(x * threads, y, z),
            threadgroup=(threads, 1, 1),
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )
        return made


def _roomy(array: Any) -> Any:
    """The same elements in an array of at least `LEAST`."""
    if not isinstance(array, mx.array) or array.size >= LEAST:
        return array
    return mx.concatenate([array.flatten(), mx.zeros(LEAST - array.size, array.dtype)])
