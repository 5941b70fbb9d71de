"""What kernels run on and are made with."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType

from minfer.device import Device, DeviceKind

INTERPRETER, SIMULATOR = "triton-interpreter", "metal-simulator"
SIMULATED = (INTERPRETER, SIMULATOR)  # no hardware, so no time means anything


def device_kind(device: Device) -> str:
    """One word for what kernels of `device` run on here: `nvidia-h200`, `amd-epyc-9b45-2-cores`.

    One of `SIMULATED` where that is no hardware.
    """
    return _known(device, device.backend.package)


@cache
def _known(device: Device, package: str) -> str:
    return _kind(device, device.package())


def _kind(device: Device, package: ModuleType) -> str:
    if device.kind is DeviceKind.CPU:
        # of the machine: how many of them a process may use changes no bits (contract 6.1)
        return _word(f"{cpu_name()} {os.cpu_count() or 1} cores")
    if device.kind is DeviceKind.CUDA:
        if package.compute_capability() is None:
            return INTERPRETER
        import torch

        return _word(torch.cuda.get_device_name())
    import mlx.core as mx

    return _word(str(mx.device_info()["device_name"])) if mx.metal.is_available() else SIMULATOR


def _word(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def cpu_name() -> str:
    """The model name of the first core."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def made_with(device: Device) -> Mapping[str, str]:
    """Versions of libraries, and the instructions or the GPU: what bits depend on beside text."""
    return _facts(device.package())


@cache
def _facts(package: ModuleType) -> Mapping[str, str]:
    import numpy

    told = package.environment()
    facts = {name: told[name] for name in package.NUMERIC if name in told}
    return MappingProxyType({"numpy": numpy.__version__, **facts})
