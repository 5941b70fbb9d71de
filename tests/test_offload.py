"""Plans: which device each layer lies on, what is refused, and what memory is asked (9.6)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import planes as planes_package
import pytest
from refusals import refused
from tiny_models import write_tiny_gguf

from minfer import Engine, KvStore, memory
from minfer.device import Device
from minfer.format import KvFormat
from minfer.offload import DevicePlan, Need, Stretch, required

MIB = 1 << 20
FREE = {"cuda": 300 * MIB, "cpu": 200 * MIB}
CPU = Device.parse("cpu")


def test_a_plan_counts_layers() -> None:
    cuda = Device.parse("cuda")
    plan = DevicePlan.parse("cpu:2,cuda:3,cpu:1")
    assert str(plan) == "cpu:2,cuda:3,cpu:1" and plan.devices == (CPU, cuda)
    assert plan.stretches(6) == (
        Stretch(CPU, range(2)),
        Stretch(cuda, range(2, 5)),
        Stretch(CPU, range(5, 6)),
    )
    assert DevicePlan.parse(plan) is plan
    assert DevicePlan.parse(" cpu:2 , cuda:3,cpu:1 ") == plan
    for one in ("cpu", CPU, "cpu:30"):
        assert DevicePlan.parse(one).stretches(30) == (Stretch(CPU, range(30)),)


@pytest.mark.parametrize(
    ("text", "rule", "words"),
    [
        ("gpu", "0.3", "device 'gpu' is none of cpu, metal, cuda"),
        ("", "0.3", "device '' is none of"),
        ("cpu:15,gpu:15", "0.3", "'gpu' is none of cpu, metal, cuda, in 'cpu:15,gpu:15'"),
        ("cpu,cpu", "9.6", "device 'cpu,cpu': 'cpu' is no DEVICE:LAYERS"),
        ("cpu:1,", "9.6", "device 'cpu:1,': '' is no DEVICE:LAYERS"),
        ("cpu:0,cpu:2", "9.6", "'cpu:0' is no DEVICE:LAYERS"),
        ("cpu:-1,cpu:3", "9.6", "'cpu:-1' is no"),
        ("cpu:1 cpu:1", "9.6", "device 'cpu:1 cpu:1': 'cpu:1 cpu:1' is no"),
        ("cpu:1:1", "9.6", "'cpu:1:1' is no"),
        ("cpu:\u0661,cpu:1", "9.6", "such as cpu:10,cuda:20"),
        ("cpu:" + "9" * 5000, "9.6", "is no DEVICE:LAYERS"),
    ],
)
def test_what_is_no_plan(text: str, rule: str, words: str) -> None:
    refused(None, rule, lambda: KvStore(2, 8, 2, 32, device=text), words)


@pytest.mark.parametrize("text", ["cpu:1", "cpu:1,cpu:2", "cpu:3"])
def test_layers_have_to_add_up(tiny_gguf: Path, text: str) -> None:
    placed = sum(int(part[-1]) for part in text.split(","))
    words = f"device {text} places {placed} layers, and there are 2; give numbers that add up to 2"
    for call in (
        lambda: KvStore(2, 8, 2, 32, device=text),
        lambda: Engine.load(tiny_gguf, n_ctx=8, device=text),
    ):
        error = refused(None, "9.6", call, words)
        assert (error.facts["placed"], error.facts["n_layer"]) == (placed, 2)


def test_a_device_that_is_not_there_is_refused_before_the_file_is_opened(tmp_path: Path) -> None:
    call = lambda: Engine.load(tmp_path / "none.gguf", device="cpu:1,metal:1")  # noqa: E731
    refused(None, "0.3", call, "device metal needs")


def test_auto_goes_by_the_first_device_that_is_no_cpu(
    planes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fmt(device: str, n_layer: int, cache_type: str | None = None) -> KvFormat:
        return KvStore(n_layer, 4, 2, 64, device=device, cache_type=cache_type).fmt

    assert fmt(f"cpu:63,{planes}:1", 64) is fmt(f"{planes}:1,cpu:63", 64) is KvFormat.F16
    assert fmt("cpu:63,cpu:1", 64) is fmt(f"cpu:1,{planes}:1", 2) is KvFormat.F32
    assert fmt(f"cpu:63,{planes}:1", 64, "f32") is KvFormat.F32
    monkeypatch.setattr(planes_package, "READS_PACKED_KV", False)
    words = f"{planes} cannot read a q8_0 cache"
    for device in (f"cpu:1,{planes}:1", f"{planes}:1,cpu:1"):
        refused(None, "3.3", lambda device=device: fmt(device, 2, "q8_0"), words)
    assert fmt("cpu:1,cpu:1", 2, "q8_0") is KvFormat.Q8_0


def test_narrow_activations_need_cuda_everywhere(planes: str, tiny_gguf: Path) -> None:
    how: dict[str, Any] = {"activations": "f16", "n_ctx": 8}
    call = lambda: Engine.load(tiny_gguf, device=f"{planes}:1,cpu:1", **how)  # noqa: E731
    refused(None, "0.3", call, "device cpu keeps activations in f32")
    plan = f"{planes}:1,{planes}:1"
    assert str(Engine.load(tiny_gguf, device=plan, **how).store.device_plan) == plan


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture
def gpu(planes: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device with 300 MiB of its own, beside a host with 200 MiB free."""
    monkeypatch.setattr(planes_package, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(memory, "gpu_free_bytes", lambda: FREE["cuda"])
    monkeypatch.setattr(memory, "free_bytes", lambda: FREE["cpu"])
    return planes


def test_every_memory_is_asked_for_what_lies_there(gpu: str) -> None:
    """64 MiB of headroom in each."""
    cuda = Device.parse(gpu)

    def ask(*needs: tuple[Device, int]) -> None:
        with required(Need(device, "KV cache", n * MIB) for device, n in needs):
            pass

    ask((CPU, 136), (cuda, 236))
    ask((CPU, 68), (cuda, 118), (CPU, 68), (cuda, 118))
    words = "needs 201.0 MiB (KV cache on cpu 137.0 MiB), 200.0 MiB free"
    refused(None, "0.1", lambda: ask((CPU, 68), (cuda, 1), (CPU, 69)), words)
    words = "needs 301.0 MiB (KV cache on cuda 237.0 MiB), 300.0 MiB free"
    refused(None, "0.1", lambda: ask((CPU, 1), (cuda, 237)), words)
    refused(None, "0.1", lambda: ask((CPU, 137)), "(KV cache 137.0 MiB)")


def test_devices_without_a_memory_of_their_own_share_the_hosts(
    planes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 200 * MIB)
    call = lambda: KvStore(3, 1 << 17, 2, 32, device=f"cpu:1,{planes}:2")  # noqa: E731
    parts = ("cells on cpu 64.0 MiB", "cells on cuda 128.0 MiB", "tables on cpu 4.0 MiB")
    refused(None, "0.1", call, "needs 260.0 MiB (f32 KV", *parts, "200.0 MiB free")


@pytest.mark.parametrize(("device", "name"), [("cpu:1,{}:3", "cuda"), ("cpu:3,{}:1", "cpu")])
def test_a_model_asks_each_memory_for_its_layers(
    gpu: str, tmp_path: Path, device: str, name: str
) -> None:
    """A layer of 160,000 cells takes 78 MiB."""
    write_tiny_gguf(tmp_path / "m.gguf", n_layer=4)
    call = lambda: Engine.load(tmp_path / "m.gguf", n_ctx=160_000, device=device.format(gpu))  # noqa: E731
    words = (f"weights on {name} ", f"f32 KV cache of 160000 cells on {name} 234.4 MiB")
    error = refused(None, "0.1", call, *words, f"{memory.human(FREE[name])} free")
    assert all(what.endswith((f" on {name}", "needs", "free")) for what in error.facts)


def test_formats_side_by_side_have_to_fit_together(
    call: Any, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 cells in f32 take 19.5 MiB, in f16 half of that: each fits, both do not."""
    (tmp_path / "text").write_text("the cat")
    monkeypatch.setattr(memory, "free_bytes", lambda: 92 * MIB)
    command = ("ppl", tiny_gguf, tmp_path / "text", "--n-ctx", 20_000, "--compare", "q8_0,f32,f16")
    for device in ("cpu", "cpu:1,cpu:1"):
        done = call(*command, "--device", device)
        assert (done.code, done.out) == (2, "")
        parts = "f32 KV cache of 20000 cells 19.5 MiB, f16 KV cache of 20000 cells 9.8 MiB"
        assert f"needs 93.3 MiB ({parts}), 92.0 MiB free" in done.err


# --- weights --------------------------------------------------------------------------------------


class Placed(np.ndarray):
    """An array of a device that is not the host."""


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("device", "there"),
    [
        ("cpu:1,{}:1,cpu:1", {1}),
        ("cpu:1,{}:2", {1, 2, "out"}),
        ("{}:1,cpu:2", {0, "in"}),
        ("{}:2,{}:1", {0, 1, 2, "in", "out"}),
    ],
)
def test_weights_lie_where_their_layer_lies(
    planes: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: str,
    there: set[Any],
    tied: bool,
) -> None:
    """The embedding on the first device, the output head on the last, twice if it is both."""
    monkeypatch.setattr(planes_package, "from_host", lambda array: array.view(Placed))
    monkeypatch.setattr(planes_package, "array_type", lambda: Placed)
    write_tiny_gguf(tmp_path / "m.gguf", n_layer=3, tied=tied)
    engine = Engine.load(tmp_path / "m.gguf", n_ctx=16, device=device.format(planes, planes))
    weights = engine._loaded.weights
    assert ("output.weight" in weights) == (not tied or len(there & {"in", "out"}) == 1)
    for name, weight in weights.items():
        at: Any = {"token_embd.weight": "in"}.get(name, "out")
        if name.startswith("blk."):
            at = int(name.split(".")[1])
        lies = isinstance(getattr(weight, "array", weight), Placed)
        assert lies == (at in there), name
    other = engine.with_cache("q8_0")
    assert other.store.device_plan == engine.store.device_plan
    assert other._loaded.weights is weights


# --- the command line -----------------------------------------------------------------------------


def test_commands_take_plans(call: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the cat in the hat and the other cat " * 9)
    for command in (
        ("run", tiny_gguf, "-p", "the cat", "-n", 9, "--n-ctx", 32),
        ("ppl", tiny_gguf, tmp_path / "text", "--n-ctx", 32, "--compare", "f32,q8_0"),
    ):
        one, two = (call(*command, "--device", d) for d in ("cpu", "cpu:1,cpu:1"))
        assert (two.code, two.out) == (0, one.out) and one.out
        done = call(*command, "--device", "cpu:1,cpu:2")
        assert (done.code, done.out) == (2, "")
        assert "device cpu:1,cpu:2 places 3 layers, and there are 2" in done.err
        assert "cpu:10,cuda:20" in call(command[0], "--help").out
    done = call("explain", "attn_map", "--device", "cpu:1,cpu:1")
    assert done.code == 2 and "invalid choice: 'cpu:1,cpu:1'" in done.err


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "offload.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(example, "offload.md", "exec"), found)
    assert capsys.readouterr().out == "cpu [0]\ncpu [1, 2]\n"
    assert (found["out"].shape, found["store"].written(1)) == ((5, 2, 64), 5)
