"""What the machine can do at most, measured: bytes and multiply-adds a second, by device."""

from __future__ import annotations

import time
from collections.abc import Callable

from minfer.device import DeviceKind
from tuning.sweep.ready import Setting

READ_ROTATIONS = 2  # the read rate is that of twice as many bytes as cold inputs have
TRIALS = 5
SIDE = 4096  # of square matrices


def rates(setting: Setting) -> dict[str, float]:
    """read, fma and int8 a second; nothing where kernels run in a simulator or interpreter."""
    size = READ_ROTATIONS * setting.rotate
    if setting.device.kind is DeviceKind.CPU:
        from tuning.columns import machine

        return machine.rates(setting.threads, size, TRIALS)
    if setting.device.kind is DeviceKind.CUDA:
        if setting.device.package().compute_capability() is None:
            return {}
        from tuning.columns import machine_cuda

        return machine_cuda.rates(size)
    return _metal_rates(size)


def _metal_rates(size: int) -> dict[str, float]:
    """read: of a copy, bytes read and written; fma: of a product of f16 matrices."""
    import mlx.core as mx

    if not mx.metal.is_available():
        return {}
    source, side = mx.ones((size // 4,)), mx.ones((SIDE, SIDE), mx.float16)
    copying = _best(lambda: mx.eval(source + 1))
    fma = SIDE**3 / _best(lambda: mx.eval(side @ side))
    return {"read": 2 * source.nbytes / copying, "fma": fma, "int8": fma}


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls."""
    seconds = []
    for _ in range(TRIALS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
