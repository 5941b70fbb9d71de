"""Devices: parsed strictly, and refused with the reason where they cannot be used."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minfer import memory
from minfer.device import Device, cores
from minfer.errors import Refusal


def test_names_are_exact() -> None:
    assert [Device.parse(name).name for name in ("cpu", "metal", "cuda")] == [
        "cpu",
        "metal",
        "cuda",
    ]
    assert Device.parse(Device.parse("cpu")) == Device.parse("cpu")
    for name in ("CPU", "gpu", "", None, 0):
        with pytest.raises(Refusal, match="is none of cpu, metal, cuda"):
            Device.parse(name)


def here_is_metal(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    """mlx is installed, and says whether there is Metal."""
    core = SimpleNamespace(metal=SimpleNamespace(is_available=lambda: available))
    monkeypatch.setitem(sys.modules, "mlx", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "mlx.core", core)


@pytest.mark.parametrize(
    ("device", "absent", "words"),
    [
        ("cpu", "minfer.kernels_numba", "device cpu has no kernels in this version"),
        ("cpu", "numba", r"device cpu needs numba.*pip install 'minfer\[cpu\]'"),
        ("cuda", "triton", r"device cuda needs triton.*pip install 'minfer\[cuda\]'"),
        ("cuda", "torch", r"device cuda needs torch.*pip install 'minfer\[cuda\]'"),
        ("metal", "mlx", r"device metal needs mlx.*pip install 'minfer\[metal\]'"),
        (
            "metal",
            "nothing",
            "device metal needs a Mac with Metal; .* MINFER_METAL_SIM=1 PYTHONPATH",
        ),
    ],
)
def test_a_device_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, device: str, absent: str, words: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name != absent else None)
    here_is_metal(monkeypatch, False)
    with pytest.raises(Refusal, match=words) as refused:
        Device.parse(device).package()
    assert refused.value.message == Device.parse(device).unavailable()


def test_metal_runs_on_a_mac_or_in_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    here_is_metal(monkeypatch, False)
    monkeypatch.setitem(sys.modules, "metalsim", SimpleNamespace(unavailable=lambda: None))
    monkeypatch.setenv("MINFER_METAL_SIM", "1")
    assert Device.parse("metal").unavailable() is None
    monkeypatch.delenv("MINFER_METAL_SIM")
    here_is_metal(monkeypatch, True)
    assert Device.parse("metal").unavailable() is None


def test_mlx_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library is missing, or a folder of that name lies on the path."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    empty = ModuleType("mlx")
    empty.__path__ = []
    monkeypatch.setitem(sys.modules, "mlx", empty)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    why = str(Device.parse("metal").unavailable())
    assert why.startswith("device metal cannot load mlx (No module named 'mlx.core'")
    assert "pip install 'mlx[cpu]'" in why


def test_a_simulator_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    here_is_metal(monkeypatch, False)
    monkeypatch.setenv("MINFER_METAL_SIM", "1")
    monkeypatch.setitem(sys.modules, "metalsim", SimpleNamespace(unavailable=lambda: "no clang"))
    assert Device.parse("metal").unavailable() == "device metal needs the simulator: no clang"


def test_the_simulator_is_found_in_a_checkout_only(monkeypatch: pytest.MonkeyPatch) -> None:
    here_is_metal(monkeypatch, False)
    monkeypatch.setenv("MINFER_METAL_SIM", "1")
    found = lambda name: None if name == "metalsim" else name  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert "simulator, which lies in tests/ of a source checkout: PYTHONPATH=tests" in str(
        Device.parse("metal").unavailable()
    )


def torch_with(gpu: str | None, capability: tuple[int, int] = (9, 0), built: bool = True) -> Any:
    """As much of torch as a device asks: a GPU by name, or none."""
    cuda = SimpleNamespace(
        is_available=lambda: gpu is not None,
        get_device_name=lambda: gpu,
        get_device_capability=lambda: capability,
        mem_get_info=lambda: (5000, 9000),
        memory_reserved=lambda: 700,
        memory_allocated=lambda: 400,
    )
    version = SimpleNamespace(cuda="13.0" if built else None)
    return SimpleNamespace(cuda=cuda, version=version, __version__="2.11.0")


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (torch_with(None), "device cuda needs an NVIDIA GPU, and torch sees none; use --device"),
        (torch_with(None, built=False), "and torch 2.11.0 is built without CUDA; use --device cpu"),
        (
            torch_with("Tesla T4", (7, 5)),
            "device cuda needs compute capability 8.0 and the Tesla T4 has 7.5; use --device cpu",
        ),
    ],
)
def test_a_gpu_that_is_missing_or_too_old(
    monkeypatch: pytest.MonkeyPatch, torch: Any, words: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Refusal) as refused:
        Device.parse("cuda").package()
    assert words in refused.value.message and refused.value.rule == "0.3"
    assert "TRITON_INTERPRET=1" in refused.value.message
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert Device.parse("cuda").unavailable() is None


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 1)])
def test_a_gpu_that_will_do(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch", torch_with("H200", capability))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert Device.parse("cuda").unavailable() is None


def test_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch, planes: str) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 11)
    assert Device.parse("cpu").free_bytes() == Device.parse(planes).free_bytes() == 11
    monkeypatch.setattr(Device.parse(planes).package(), "compute_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "torch", torch_with("H200"))
    assert Device.parse(planes).free_bytes() == 5300  # and what torch's allocator keeps unused
    assert Device.parse("cpu").free_bytes() == 11


def test_cores_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 9}, raising=False)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert cores() == 7


def test_the_first_thing_in_a_bug_report_names_the_pool_that_kernels_use() -> None:
    code = "from minfer.kernels_numba import environment; print(environment()['threading layer'])"
    kernel = (
        "import numba, numpy as np; from minfer.kernels_numba.dense import silu_mul_rows;"
        "x = np.ones((64, 512), np.float32); silu_mul_rows(x, x, config={'threads': 2});"
        "print(numba.threading_layer())"
    )
    layers = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
        for text in (code, kernel)
    ]
    assert layers[0].stdout == layers[1].stdout != ""
