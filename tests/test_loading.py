"""Loading onto a device: weights one by one, memory asked there, activations by request."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import planes as planes_package
import pytest
from refusals import refused

from minfer import Engine, KvStore, registry
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.graph.choices import Choices
from minfer.graph.nodes import Heads
from minfer.ops import Config, Tunable, variant


class Placed(np.ndarray):
    """An array of a device that is not the host."""


@pytest.fixture
def placing(planes: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is put on the device `planes`, in order."""
    seen: list[Any] = []

    def place(array: Any) -> Any:
        seen.append(array)
        return array.view(Placed)

    monkeypatch.setattr(planes_package, "from_host", place)
    monkeypatch.setattr(planes_package, "array_type", lambda: Placed)
    return seen


def test_weights_are_placed_one_by_one_and_shared(
    placing: list[Any], planes: str, tiny_gguf: Path
) -> None:
    engine = Engine.load(tiny_gguf, n_ctx=16, threads=1, device=planes)
    held = engine._loaded.weights
    arrays = [getattr(weight, "array", weight) for weight in held.values()]
    assert len(arrays) > 10 and all(type(array) is Placed for array in arrays)
    assert [id(a.base) for a in arrays] == [id(a) for a in placing[: len(arrays)]]
    homes = {id(owner(array)) for array in arrays}
    assert len(homes) == len(arrays), "dropped one by one: no two in one piece of memory"
    tables = [t for of in engine._graphs._tables for pair in of.values() for t in pair]
    assert all(type(table) is Placed for table in tables)
    placed = len(placing)
    other = engine.with_cache("f16")
    assert other._loaded.weights is held
    assert len(placing) == placed + len(tables), "rope tables only"


def owner(array: Any) -> Any:
    """What an array's memory belongs to."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


def test_a_model_that_the_device_cannot_hold_is_refused(
    planes: str, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "free_bytes", lambda device: 70 << 20)
    words = ("(weights ", "f32 KV cache of 65536 cells 64.0 MiB", "70.0 MiB free", "--n-ctx")
    refused(None, "0.1", lambda: Engine.load(tiny_gguf, n_ctx=65536, device=planes), *words)
    refused(
        None,
        "0.1",
        lambda: KvStore(2, 65536, 2, 32, cache_type="f32", device=planes),
        "f32 KV cache of 65536 cells 64.0 MiB",
    )


def test_a_device_that_runs_out_while_regions_are_made(
    planes: str, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    def fail(*_: Any) -> Any:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(planes_package, "empty_regions", fail)
    monkeypatch.setattr(Device, "free_bytes", lambda device: 1 << 30)
    for call in (
        lambda: KvStore(2, 64, 2, 32, cache_type="f32", device=planes),
        lambda: Engine.load(tiny_gguf, n_ctx=64, device=planes),
    ):
        refused(None, "0.1", call, "f32 KV cache of 64 cells", "1.0 GiB free", "--n-ctx")


def test_formats_follow_the_device_and_live_side_by_side(planes: str) -> None:
    """Auto is f16 where n_layer * n_kv_embd is 8192 or more, on an accelerator (contract 3.2)."""
    stores = {
        (device, n_layer): KvStore(n_layer, 4, 2, 64, device=device)
        for device in ("cpu", planes)
        for n_layer in (63, 64)
    }
    formats = {at: store.fmt for at, store in stores.items()}
    assert formats == {
        ("cpu", 63): KvFormat.F32,
        ("cpu", 64): KvFormat.F32,
        (planes, 63): KvFormat.F32,
        (planes, 64): KvFormat.F16,
    }


# --- activations ----------------------------------------------------------------------------------


@variant(space={"activations": Tunable("f32", ("f32", "f16", "bf16"), numeric=True)})
def softcap_narrow(x: Any, *, cap: float, config: Config) -> Any:
    """A variant that rounds what it is given."""
    return x.astype(np.float16) if config["activations"] == "f16" else x


def test_activations_reach_the_variants_that_have_them(
    planes: str, added: None, tiny_gguf: Path
) -> None:
    registry.add(sys.modules[__name__], planes)
    engine = Engine.load(tiny_gguf, n_ctx=32, threads=1, device=planes, activations="f16")
    engine.store.reserve(0, 8)
    engine.prefill([5, 6], 0)
    (graph,) = engine._graphs
    assert graph.params.activations == "f16"
    params = replace(graph.params, variants=(("softcap", "narrow"),))
    choices = Choices(params, Heads(4, 2, 32), threads=3)
    assert dict(choices.choose("softcap").config) == {"activations": "f16"}
    assert dict(choices.choose("silu_mul").config) == {"threads": 3}
    how: dict[str, Any] = {"device": planes, "variant": "narrow"}
    for given, kept in (({"activations": "f16"}, "f16"), ({}, "f32"), ({"threads": 2}, "f32")):
        choice = registry.select("softcap", **how, config=given)
        assert dict(choice.config) == {"activations": kept}
    assert "activations=f16" in str(
        registry.explain("softcap", **how, config={"activations": "f16"})
    )
    for bad in ("f8", 16):
        with pytest.raises(Refusal) as caught:
            registry.select("softcap", **how, config={"activations": bad})
        assert caught.value.rule == "6.4"


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
def test_narrow_activations_need_cuda(
    tiny_gguf: Path, tmp_path: Path, narrow: str, call: Any
) -> None:
    (tmp_path / "text").write_text("some text")
    words = f"device cpu keeps activations in f32; use device cuda for {narrow}"
    refused(None, "0.3", lambda: Engine.load(tiny_gguf, activations=narrow), words)
    for command in (("run", tiny_gguf, "-p", "x"), ("ppl", tiny_gguf, tmp_path / "text")):
        done = call(*command, "--activations", narrow)
        assert (done.code, done.out) == (2, "") and words in done.err
    assert call("run", tiny_gguf, "-p", "x", "-n", 1, "--activations", "f32").code == 0


def test_activations_are_named_exactly(tiny_gguf: Path) -> None:
    for bad in ("F16", "", "f64", None):
        words = f"activations {bad!r} are none of f32, f16, bf16"
        refused(None, "10", lambda bad=bad: Engine.load(tiny_gguf, activations=bad), words)


def test_params_with_other_activations_are_another_graph(planes: str, tiny_gguf: Path) -> None:
    def key(**how: Any) -> Any:
        engine = Engine.load(tiny_gguf, n_ctx=8, threads=1, device=planes, **how)
        inputs = SimpleNamespace(kind="decode", mode=None, n_tokens=1)
        return engine._graphs._new_params(inputs, 1)

    assert key() == key(activations="f32") != key(activations="bf16")
    assert hash(key()) == hash(key())
