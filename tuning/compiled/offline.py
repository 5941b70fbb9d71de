"""Launches that only compile: no list of signatures, the launchers themselves are driven.

A driver that knows nothing but its target takes the GPU's place, and a launch stops once its kernel
is compiled, by the ptxas that comes with Triton. So types, alignment and configurations are those
of a real launch over tensors in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MULTIPROCESSORS = 132  # of the GPU that launchers believe in: how far they split work


class Target:
    """What Triton asks a driver for when it compiles: one device for each architecture."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.arch = arch
        self.target: Any = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        """Compiled kernels are kept by device."""
        return self.arch

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


def kernel_package() -> Any:
    """`minfer.kernels_triton`, told of a GPU before a module asks for it."""
    import minfer.kernels_triton as package
    import minfer.kernels_triton._arguments as arguments

    arguments.multiprocessors = lambda: MULTIPROCESSORS
    return package


@contextmanager
def compiling(arch: int) -> Iterator[list[tuple[str, Any]]]:
    """Inside, launches only compile for sm_`arch`; the list gets each name and compiled kernel.

    The driver stays as it is afterwards: such a process does nothing else.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    seen: list[tuple[str, Any]] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **how)
        seen.append((self.fn.__name__, kernel))
        return kernel

    driver.set_active(Target(arch))
    JITFunction.run = compile_only
    try:
        yield seen
    finally:
        JITFunction.run = launch
