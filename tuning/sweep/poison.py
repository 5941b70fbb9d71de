"""Memory that nobody has written yet holds no answer: it is filled while answers are checked."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minfer.device import Device, DeviceKind

PERTURB = -6  # glibc's M_PERTURB: what is allocated is filled with the complement of a byte
FILL = 1  # of its complement float32 is -1.7e38 and float16 NaN


@contextmanager
def poisoned(device: Device) -> Iterator[None]:
    """New arrays of the device's package hold nonsense, and so does freed memory on the CPU.

    Without glibc, and on a Mac's GPU, nothing is filled: there only the change between versions
    shows an answer that was not written.
    """
    if device.kind is DeviceKind.CUDA:
        import torch

        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what `empty` gives
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.use_deterministic_algorithms(before)
        return
    _perturb(FILL)
    try:
        yield
    finally:
        _perturb(0)


def _perturb(byte: int) -> None:
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(PERTURB, byte)
