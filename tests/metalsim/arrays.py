"""mx arrays as memory that a kernel may touch, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from metalsim import buffers
from metalsim.buffers import Guarded, Memory
from metalsim.tracing import mx


def _view(array: Any) -> np.ndarray[Any, Any]:
    """The memory of an mx array as numpy sees it; numpy has no bfloat16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def input_view(array: Any, row_contiguous: bool) -> np.ndarray[Any, Any]:
    """The memory of an input; it is copied first where a kernel wants rows and it has none."""
    view = _view(array)
    if row_contiguous and not view.flags.c_contiguous:
        return _view(mx.contiguous(array))
    return view


# What MLX hands over beside an input, where the kernel's source names it.
FACTS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "shape": lambda view: np.array(view.shape, np.int32),
    "strides": lambda view: np.array([s // view.itemsize for s in view.strides], np.int64),
    "ndim": lambda view: np.array([view.ndim], np.int32),
}


class Output:
    """Memory for one output, filled with `start` or else poisoned.

    share: where it is large, the memory is MLX's own; it is guarded otherwise.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, start: float | None, share: bool
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.initialised = start is not None
        self.count = int(np.prod(shape, dtype=np.int64))
        nbytes = self.count * dtype.size
        self._array = mx.zeros(shape, dtype) if share and nbytes >= buffers.LARGE else None
        if self._array is None:
            guarded = Guarded(nbytes)
            self.bytes = guarded.view()
            self.memory = Memory(guarded.address, guarded.address, nbytes, guarded)
        else:
            mx.eval(self._array)
            self.bytes = _view(self._array).reshape(-1).view(np.uint8)
            address = self.bytes.ctypes.data
            self.memory = Memory(address, address, nbytes)
        if start is None:
            self.bytes[:] = 0xFF
        else:
            one = _view(mx.array([start]).astype(dtype)).view(f"V{dtype.size}")
            self.bytes.view(one.dtype)[:] = one

    def array(self) -> Any:
        """The output as an mx array."""
        if self._array is not None:
            return self._array
        if self.dtype == mx.bfloat16:
            return mx.array(self.bytes.view(np.uint16).reshape(self.shape)).view(mx.bfloat16)
        kind = str(self.dtype).removeprefix("mlx.core.").rstrip("_")
        return mx.array(self.bytes.view(kind).reshape(self.shape))
