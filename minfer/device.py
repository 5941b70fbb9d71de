"""Devices and the kernel package each one uses, imported by name on first use."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from types import ModuleType

from minfer import settings
from minfer.errors import Refusal


class DeviceKind(enum.Enum):
    """Kinds of device. The value is the backend id of session files: appended, never renumbered."""

    CPU = 0
    METAL = 1
    CUDA = 2

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Backend:
    """The kernel package of a kind of device, and the library it is written in."""

    package: str
    library: str
    extra: str


BACKENDS = {
    DeviceKind.CPU: Backend("minfer.kernels_numba", "numba", "cpu"),
    DeviceKind.METAL: Backend("minfer.kernels_mlx", "mlx", "metal"),
    DeviceKind.CUDA: Backend("minfer.kernels_triton", "triton", "cuda"),
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
        if importlib.util.find_spec(backend.library) is None:
            return (
                f"device {self.name} needs {backend.library}, which is not installed: "
                f"pip install 'minfer[{backend.extra}]'"
            )
        needs_mac = self.kind is DeviceKind.METAL and not settings.flag("MINFER_METAL_SIM")
        if needs_mac and sys.platform != "darwin":
            return "device metal needs a Mac; MINFER_METAL_SIM=1 runs its kernels in the simulator"
        return None

    def package(self) -> ModuleType:
        """The kernel package of this device, imported now."""
        reason = self.unavailable()
        if reason is not None:
            raise Refusal("0.3", reason, {"device": self.name})
        return importlib.import_module(self.backend.package)

    def __str__(self) -> str:
        return self.name


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # absent on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
