"""What the kernels of a configuration take of a GPU, as Triton's loader says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minfer.device import Device, DeviceKind


@contextmanager
def launched(device: Device) -> Iterator[dict[int, Any]]:
    """Collects the compiled kernels that are launched meanwhile, by their identity."""
    found: dict[int, Any] = {}
    if device.kind is not DeviceKind.CUDA or device.package().compute_capability() is None:
        yield found
        return
    from triton.compiler import CompiledKernel

    kind: Any = CompiledKernel
    before = kind.launch_metadata

    def launch_metadata(self: Any, *args: Any) -> Any:
        found[id(self)] = self
        return before(self, *args)

    kind.launch_metadata = launch_metadata  # what every launch asks for
    try:
        yield found
    finally:
        kind.launch_metadata = before


def taken(kernels: dict[int, Any]) -> dict[str, int]:
    """The most that one of the kernels takes; nothing where none was seen.

    shared: bytes of a program. registers: of a program's threads together. spills: of a thread.
    """
    held = [kernel for kernel in kernels.values() if hasattr(kernel, "n_regs")]
    if not held:  # none, or none that could be loaded
        return {}
    return {
        "shared": max(int(kernel.metadata.shared) for kernel in held),
        "registers": max(int(k.n_regs) * 32 * int(k.metadata.num_warps) for k in held),
        "spills": max(int(kernel.n_spills) for kernel in held),
    }
