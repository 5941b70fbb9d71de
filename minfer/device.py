"""Devices and the kernel package each one uses, imported by name on first use."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from minfer import memory, settings
from minfer.errors import Refusal

LEAST_CAPABILITY = (8, 0)  # of an NVIDIA GPU: bfloat16 and asynchronous copies


class DeviceKind(enum.Enum):
    """Kinds of device. The value is the backend id of session files: appended, never renumbered."""

    CPU = 0
    METAL = 1
    CUDA = 2

    @property
    def label(self) -> str:
        return self.name.lower()


def no_mac() -> str | None:
    """Why the metal device cannot be used here, None if it can."""
    try:
        import mlx.core as mx
    except ImportError as error:
        return f"cannot load mlx ({error}); on Linux: pip install 'mlx[cpu]'"
    if mx.metal.is_available():
        return None
    if not settings.flag("MINFER_METAL_SIM"):
        return (
            "needs a Mac with Metal; in a source checkout MINFER_METAL_SIM=1 PYTHONPATH=tests runs "
            "its kernels in the simulator"
        )
    if importlib.util.find_spec("metalsim") is None:
        return "needs the simulator, which lies in tests/ of a source checkout: PYTHONPATH=tests"
    why: str | None = importlib.import_module("metalsim").unavailable()
    return None if why is None else f"needs the simulator: {why}"


def no_gpu() -> str | None:
    """Why the current GPU cannot be used, None if it can or if Triton interprets."""
    if settings.flag("TRITON_INTERPRET"):
        return None
    import torch

    way_out = "use --device cpu, or TRITON_INTERPRET=1 to check small cases of kernels on the CPU"
    if not torch.cuda.is_available():
        seen = "sees none" if torch.version.cuda else f"{torch.__version__} is built without CUDA"
        return f"needs an NVIDIA GPU, and torch {seen}; {way_out}"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        have, least = (".".join(map(str, c)) for c in (capability, LEAST_CAPABILITY))
        name = torch.cuda.get_device_name()
        return f"needs compute capability {least} and the {name} has {have}; {way_out}"
    return None


@dataclass(frozen=True)
class Backend:
    """The kernel package of a kind of device, and the libraries it is written in.

    extra: what installs them. lacks: what else is missing here, None for nothing.
    """

    package: str
    libraries: tuple[str, ...]
    extra: str
    lacks: Callable[[], str | None] = lambda: None


BACKENDS = {
    DeviceKind.CPU: Backend("minfer.kernels_numba", ("numba",), "cpu"),
    DeviceKind.METAL: Backend("minfer.kernels_mlx", ("mlx",), "metal", no_mac),
    DeviceKind.CUDA: Backend("minfer.kernels_triton", ("torch", "triton"), "cuda", no_gpu),
}


@dataclass(frozen=True)
class Device:
    """One device, as asked for: `cpu`, `metal` or `cuda`."""

    kind: DeviceKind

    @classmethod
    def parse(cls, text: str | Device) -> Device:
        """`cpu`, `metal` or `cuda`; anything else is refused."""
        if isinstance(text, Device):
            return text
        for kind in DeviceKind:
            if kind.label == text:
                return cls(kind)
        known = ", ".join(kind.label for kind in DeviceKind)
        raise Refusal("0.3", f"device {text!r} is none of {known}", {"device": text})

    @property
    def name(self) -> str:
        return self.kind.label

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.kind]

    def unavailable(self) -> str | None:
        """Why this device cannot be used here, with the way out; None if it can."""
        backend = self.backend
        if importlib.util.find_spec(backend.package) is None:
            return f"device {self.name} has no kernels in this version of minfer; use --device cpu"
        for library in backend.libraries:
            if importlib.util.find_spec(library) is None:
                return (
                    f"device {self.name} needs {library}, which is not installed: "
                    f"pip install 'minfer[{backend.extra}]'"
                )
        missing = backend.lacks()
        return None if missing is None else f"device {self.name} {missing}"

    def package(self) -> ModuleType:
        """The kernel package of this device, imported now."""
        reason = self.unavailable()
        if reason is not None:
            raise Refusal("0.3", reason, {"device": self.name})
        return importlib.import_module(self.backend.package)

    @property
    def has_own_memory(self) -> bool:
        """Whether arrays on this device lie in a GPU's memory rather than the host's."""
        return self.package().compute_capability() is not None

    def free_bytes(self) -> int | None:
        """Bytes that arrays on this device can still take; None where nobody knows."""
        return memory.gpu_free_bytes() if self.has_own_memory else memory.free_bytes()

    def __str__(self) -> str:
        return self.name


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # absent on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
