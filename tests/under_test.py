"""The kernel package under test: the CPU's, or another device's by `pytest --on DEVICE`.

Cases and oracles are numpy arrays and canonical regions. `launch` carries them to the package and
its answer back, so that one test serves every package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from minfer import cases, registry
from minfer.cases import carrying
from minfer.device import Device
from minfer.format import KvFormat, Region
from minfer.ops import Variant

device = "cpu"  # conftest sets it before it imports a test module
THREADS = 2  # of every launch, where a variant has threads
INTERPRETED_STEPS = 20  # of a program over some keys, each about 10 ms
CHECKED_SCORES = 20_000  # of an attention call that the Metal simulator still checks
CHECKED_ELEMENTS = 1 << 16  # of the arrays of any other call that it checks


def simulated() -> bool:
    """Whether Metal kernels run in the simulator, on the CPU."""
    if device != "metal" or importlib.util.find_spec("mlx") is None:
        return False
    import mlx.core as mx

    return not mx.metal.is_available()


def checked(small: bool) -> AbstractContextManager[None]:
    """In the simulator, small calls run with every access and every order of threads checked."""
    if not (small and simulated()):
        return nullcontext()
    simulator = importlib.import_module("metalsim")
    checking: AbstractContextManager[None] = simulator.running(simulator.Mode.CHECKED)
    return checking


def interpreted() -> bool:
    """Whether kernels run in an interpreter, a thousand times slower than compiled ones."""
    return device == "cuda" and os.environ.get("TRITON_INTERPRET") == "1"


def affordable(variant: Variant, case: cases.Case) -> bool:
    """Whether attention of the case takes well under a second: in the interpreter, few steps."""
    n_head, n_head_kv = case.heads
    heads = n_head if variant.name == "rows" else n_head_kv
    at_once = 16 if variant.name == "flash" else 1  # queries
    steps = sum(
        min(first + i + 1, case.width or first + i + 1) // 32 + 1
        for first, n in case.sequences
        for i in range(0, n, at_once)
    )
    return not interpreted() or heads * steps <= INTERPRETED_STEPS


def package() -> ModuleType:
    return Device.parse(device).package()


def module(name: str) -> ModuleType:
    """A module of the package by its name there."""
    return importlib.import_module(f"{package().__name__}.{name}")


def variants(op: str) -> list[Variant]:
    """Those that run here: some need a GPU, which the interpreter is none of."""
    here = package().compute_capability()
    found = registry.variants(op, device)
    return [v for v in found if not v.limits.capability or v.limits.capability <= (here or ())]


def takes(variant: Variant, case: cases.Case, fmt: KvFormat | None = None) -> bool:
    return variant.limits.why_not(case.shape, package().compute_capability(), fmt) is None


def find(op: str, name: str) -> Variant:
    return next(v for v in variants(op) if v.name == name)


def default(op: str, fmt: KvFormat = KvFormat.F32) -> Variant:
    """The variant that an op without shapes chooses for `fmt`."""
    return registry.select(op, device=device, fmt=fmt).variant


def config_of(variant: Variant, **overrides: Any) -> dict[str, Any]:
    """The variant's configuration; an override of what it cannot tune is left out."""
    return {
        name: overrides.get(name, THREADS if name == "threads" else tunable.default)
        for name, tunable in variant.space.items()
    }


def configs_of(variant: Variant) -> list[dict[str, Any]]:
    """Configurations that may not change a bit: each value of each free tunable (contract 6.4)."""
    free = {name: t.values for name, t in variant.space.items() if not t.numeric}
    if "threads" in free:
        free["threads"] = (1, 2, 3, 5)
    return [
        config_of(variant),
        *(config_of(variant, **{name: value}) for name, values in free.items() for value in values),
    ]


def arranged(region: Region) -> Region:
    """A copy of a canonical region, arranged as the package does."""
    return carrying.arranged(package(), region)


def canonical(region: Region) -> Region:
    """A region of the package in the canonical layout."""
    return carrying.canonical(package(), region)


def given(value: Any) -> Any:
    """A numpy array or a canonical region as the package takes it; anything else as it is."""
    return carrying.given(package(), value)


def returned(value: Any) -> Any:
    """An answer of the package in numpy and in the canonical layout."""
    return carrying.returned(package(), value)


def launch(
    variant: Variant, *tensors: Any, config: Any = None, host: bool = False, **scalars: Any
) -> Any:
    """What the variant makes of copies of `tensors`; arrays stay on the host if `host`."""
    chosen = config_of(variant) if config is None else config
    sent = [t if host and not isinstance(t, Region) else given(t) for t in tensors]
    attends = variant.op in registry.ATTENTION  # `attend` says whether it is small
    with checked(not attends and sum(map(size, tensors)) <= CHECKED_ELEMENTS):
        return returned(variant.launch(*sent, **scalars, config=chosen))


def size(value: Any) -> int:
    """Elements of an array or of a region's arrays; none of anything else."""
    arrays = value.arrays if isinstance(value, Region) else (value,)
    return sum(int(np.size(array)) for array in arrays if array is not None)


def op(name: str, fmt: KvFormat = KvFormat.F32) -> Any:
    """The default variant of an op, over numpy arrays and canonical regions."""
    return functools.partial(launch, default(name, fmt))


def attend(variant: Variant, inputs: cases.Inputs, **overrides: Any) -> Any:
    """The attention of a case, f32 [n_q, n_head, d]."""
    chosen = config_of(variant, **overrides)
    tensors = inputs.tensors(chosen.get("block_m", 1))
    ends = inputs.positions.astype(np.int64) + 1
    scores = inputs.q.shape[1] * (np.minimum(ends, inputs.width) if inputs.width else ends).sum()
    with checked(scores <= CHECKED_SCORES):
        return launch(variant, *tensors, **inputs.scalars, config=chosen)


def case_named(name: str) -> cases.Case:
    return next(case for case in cases.CASES if case.name == name)


def apart(x: Any, shift: int, extra: int) -> Any:
    """The rows of x [n, m] as columns of a wider array of the package, `shift` columns in."""
    wide = np.full((len(x), shift + x.shape[1] + extra), np.nan, np.float32)
    wide[:, shift : shift + x.shape[1]] = x
    return package().from_host(wide)[:, shift : shift + x.shape[1]]


def short(name: str) -> cases.Case:
    """The case of that name; interpreted kernels get fewer keys, queries and heads of it."""
    case = case_named(name)
    if not interpreted():
        return case
    return replace(
        case,
        name=f"{name}-short",
        heads=(case.heads[0] // case.heads[1], 1),
        sequences=tuple((min(first, 20), min(n, 2)) for first, n in case.sequences),
    )


def compiled_only() -> pytest.MarkDecorator:
    """Left out where kernels are interpreted: it would take minutes, or gigabytes."""
    return pytest.mark.skipif(interpreted(), reason="takes minutes interpreted")


def same_bits(a: Any, b: Any) -> bool:
    """Equal bit for bit: signs of zero count."""
    return np.array_equal(a.view(np.int32), b.view(np.int32))
