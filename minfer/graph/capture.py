"""Recording launches with CUDA graphs (contract 7.4). Torch is imported when a recorder is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from minfer.format import Floats, Int32
from minfer.graph.nodes import Input

ALIGNED = 64  # int32 numbers: a buffer starts at 256 bytes, as an array of its own would


def recorder(kernels: ModuleType) -> CudaRecorder | None:
    """A recorder for the current GPU; None where kernels run without one."""
    return None if kernels.compute_capability() is None else CudaRecorder()


def places(inputs: Mapping[Input, Int32 | None]) -> tuple[dict[Input, slice], int]:
    """Where each input lies in one buffer, and the size of that, in int32 numbers."""
    found, end = {}, 0
    for name, array in inputs.items():
        if array is not None:
            found[name] = slice(end, end + array.size)
            end += -(-array.size // ALIGNED) * ALIGNED
    return found, end


class CudaBuffers:
    """Inputs side by side in one buffer on the device, filled by one copy from pinned memory."""

    def __init__(self, inputs: Mapping[Input, Int32 | None]) -> None:
        import torch

        found, size = places(inputs)
        self._pinned = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._device = torch.zeros(size, dtype=torch.int32, device="cuda")
        cuda: Any = torch.cuda  # its own hints are partial
        self._copied = cuda.Event()
        host = self._pinned.numpy()
        shapes = {name: array.shape for name, array in inputs.items() if array is not None}
        self._host = {name: host[found[name]].reshape(shape) for name, shape in shapes.items()}
        self.arrays = {
            name: self._device[found[name]].view(shapes[name]) if name in found else None
            for name in inputs
        }

    def fill(self, inputs: Mapping[Input, Any]) -> None:
        """Copy the numbers; what the copy before this one still reads is not overwritten."""
        self._copied.synchronize()
        for name, view in self._host.items():
            view[...] = inputs[name]
        self._device.copy_(self._pinned, non_blocking=True)
        self._copied.record()


class CudaRecording:
    """A captured graph and its output rows, copied to pinned memory after each replay."""

    def __init__(self, captured: Any, rows: Any) -> None:
        import torch

        self._captured, self._rows = captured, rows
        self._pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)

    def replay(self) -> Floats:
        """Run the launches and wait for them; a fault of a kernel comes out here."""
        import torch

        self._captured.replay()
        self._pinned.copy_(self._rows, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        rows: Floats = self._pinned.numpy().copy()
        return rows


class CudaRecorder:
    """Captures on a stream of its own; all captures of one engine share a pool of memory.

    They may: one runs at a time, and its output is copied before the next one runs.
    """

    def __init__(self) -> None:
        import torch

        cuda: Any = torch.cuda  # its own hints are partial
        self._stream = cuda.Stream()
        self._pool = cuda.graph_pool_handle()

    def buffers(self, inputs: Mapping[Input, Int32 | None]) -> CudaBuffers:
        return CudaBuffers(inputs)

    def record(self, launch: Callable[[], Any]) -> CudaRecording:
        """Every kernel that `launch` launches must be compiled already."""
        import torch

        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            captured, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            rows = launch()
        return CudaRecording(captured, rows)
