"""Every Metal kernel in the simulator: launched as MLX would, checked, and no barrier too many."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import under_test

mx = pytest.importorskip("mlx.core")

import metalsim  # noqa: E402
from every_kernel import TOUR, Step, bits  # noqa: E402
from metalsim import Launched, Mode  # noqa: E402

from minfer import kernels_mlx  # noqa: E402
from minfer.kernels_mlx._kernel import MetalKernel  # noqa: E402

pytestmark = pytest.mark.skipif(
    not under_test.simulated(), reason="runs by --on metal, in the simulator"
)

STEPS = pytest.mark.parametrize("step", TOUR, ids=lambda step: step.name)
# A parameter of a kernel: `const device float* x [[buffer(0)]]`.
PARAMETER = re.compile(r"(const )?(device|constant) \w+([*&]) (\w+) \[\[buffer\((\d+)\)\]\]")


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(kernels_mlx.__path__):
        yield importlib.import_module(f"{kernels_mlx.__name__}.{found.name}")


def kernels() -> dict[str, MetalKernel]:
    """The kernels that modules of the package hold, alone or by format."""
    found: dict[str, MetalKernel] = {}
    for module in modules():
        for value in vars(module).values():
            for kernel in value.values() if isinstance(value, dict) else [value]:
                if isinstance(kernel, MetalKernel):
                    assert found.setdefault(kernel.name, kernel) == kernel
    return found


KERNELS = kernels()
GUARDED = [name for name, k in KERNELS.items() if metalsim.barriers(k.header + k.source)]


def first_step(kernel: str) -> Step:
    return next(step for step in TOUR if step.kernel == kernel)


# -- what is launched -----------------------------------------------------------------------------


@STEPS
def test_mlx_writes_the_text_of_every_launch(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[MetalKernel] = []
    launch = MetalKernel.__call__

    def noted(self: MetalKernel, *inputs: Any, **how: Any) -> Any:
        called.append(self)
        return launch(self, *inputs, **how)

    monkeypatch.setattr(MetalKernel, "__call__", noted)
    with metalsim.launches() as launched:
        step.run()
    assert step.kernel in [kernel.name for kernel in called]
    assert [kernel.name for kernel in called] == [seen.name for seen in launched]
    for kernel, seen in zip(called, launched, strict=True):
        assert_is_of(kernel, seen)


def assert_is_of(kernel: MetalKernel, seen: Launched) -> None:
    """The header, then MLX's signature with the parameters of the kernel, then its source."""
    head, found, rest = seen.text.partition(f"[[kernel]] void custom_kernel_{kernel.name}_")
    assert found and kernel.header in head and kernel.source in rest
    assert "#pragma METAL fp contract(off)" in head  # the simulator never contracts
    parameters, _, _ = rest.partition(") {")
    spaces, marks, names, numbers = [], [], [], []
    for const, space, mark, name, number in PARAMETER.findall(parameters):
        spaces.append(f"{const}{space}")
        marks.append(mark)
        names.append(name)
        numbers.append(int(number))
    n_in, n_out = len(kernel.inputs), len(kernel.outputs)
    assert names == [*kernel.inputs, *kernel.outputs]
    assert numbers == list(range(n_in + n_out))
    assert spaces[n_in:] == ["device"] * n_out
    # arrays lie in device memory whatever their size, numbers come as references
    assert {*zip(spaces, marks, strict=True)} <= {
        ("const device", "*"),
        ("device", "*"),
        ("const constant", "&"),
    }


def test_the_tour_leaves_no_kernel_out() -> None:
    assert {step.kernel for step in TOUR} == set(KERNELS)


# -- what the simulator checks --------------------------------------------------------------------


@STEPS
def test_a_checked_run_finds_nothing_and_gives_the_same_bits(step: Step) -> None:
    fast = step.run()
    with metalsim.running(Mode.CHECKED):
        checked = step.run()
    assert bits(checked) == bits(fast)
    assert step.error(fast) < 1e-5


@pytest.mark.parametrize("kernel", GUARDED)
def test_no_barrier_can_go(kernel: str) -> None:
    """Without any one of them the simulator finds a race."""
    assert not metalsim.unnoticed(first_step(kernel).run)
