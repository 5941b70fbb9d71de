"""Whole models on a GPU or in Triton's interpreter: the CPU's answers, replayed to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from device_models import Model  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from minfer import Batch  # noqa: E402
from minfer.format import KvFormat  # noqa: E402
from minfer.kernels_triton._arguments import interpreted  # noqa: E402
from minfer.models import graphs as model_graphs  # noqa: E402

GPU = torch.cuda.is_available() and not interpreted()
pytestmark = pytest.mark.skipif(not (GPU or interpreted()), reason="needs a GPU")
FORMATS = [fmt.value for fmt in KvFormat]
PROMPT = [5, 90, 41, 7, 201, 33, 12]
N_LAYER = 2 if GPU else 1


class HostBuffers:
    """What `CudaBuffers` is on a GPU, for the interpreter."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.arrays = {
            name: None if array is None else torch.zeros(array.shape, dtype=torch.int32)
            for name, array in inputs.items()
        }

    def fill(self, inputs: Mapping[str, Any]) -> None:
        for name, array in self.arrays.items():
            if array is not None:
                array.copy_(torch.from_numpy(np.array(inputs[name])))


class Again:
    """Launches again what a GPU would replay."""

    def __init__(self, launch: Callable[[], Any]) -> None:
        self._launch = launch

    def replay(self) -> Any:
        with NoLooking():
            return self._launch().numpy().copy()


class NoLooking(TorchDispatchMode):
    """Raises where a value of a tensor is looked at, which no capture survives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(bad in name for bad in ("_local_scalar_dense", "nonzero", "equal")), name
        return func(*args, **(kwargs or {}))


class HostRecorder:
    def buffers(self, inputs: Mapping[str, Any]) -> HostBuffers:
        return HostBuffers(inputs)

    def record(self, launch: Callable[[], Any]) -> Again:
        return Again(launch)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter recordings launch again; on a GPU they are CUDA graphs."""
    if not GPU:
        here = torch.Tensor
        monkeypatch.setattr(
            model_graphs, "recorder", lambda k: HostRecorder() if k.array_type() is here else None
        )


def tiny(cache_type: str = "f32", **how: Any) -> Model:
    return Model("cuda", cache_type, n_layer=N_LAYER, **how)


def pair(cache_type: str, **how: Any) -> tuple[Model, Model]:
    """Two equal models, one of which replays."""
    return tiny(cache_type, **how), tiny(cache_type, replay=False, **how)


@pytest.mark.parametrize("cache_type", FORMATS)
def test_replayed_tokens_have_the_bits_of_launched_ones(cache_type: str) -> None:
    models = pair(cache_type)
    for model in models:
        model.store.reserve(0, 20)
        model.feed(0, PROMPT, "prefill")
    for token in range(10, 14 if GPU else 13):
        ours, theirs = (model.feed(0, [token]) for model in models)
        assert ours.shape == (1, models[0].hp.n_vocab) and np.isfinite(ours).all()
        assert np.array_equal(ours, theirs)
    assert models[0].recorded == 1 and models[1].recorded == 0
    cells = [model.store.export_cells(0, 0, which) for model in models for which in "kv"]
    assert np.array_equal(cells[0], cells[2]) and np.array_equal(cells[1], cells[3])


def test_windows_of_every_mode_are_replayed() -> None:
    """A sequence from cell 0, one elsewhere, one that reads a prefix of the first."""
    models = pair("f32")
    for model in models:
        for seq, cap in ((0, 16), (1, 8), (2, 8)):
            model.store.reserve(seq, cap)
        model.feed(0, PROMPT[:3], "prefill")
        model.store.share_prefix(0, 1, 2)
    groups = ((0,), (2,), (1,), (0, 1, 2))[: 4 if GPU else 3]
    for _ in range(4 if GPU else 2):
        for seqs in groups:
            rows = []
            for model in models:
                at = [model.store.written(seq) for seq in seqs]
                rows.append(model.forward(Batch(seqs, at, "decode", [9 + seq for seq in seqs])))
            assert np.array_equal(*rows)
    assert models[0].recorded == len(groups)


@pytest.mark.skipif(not GPU, reason="needs a GPU: many launches")
def test_recordings_of_many_sizes_share_memory_and_keep_their_answers() -> None:
    models = pair("f16")
    for model in models:
        model.store.reserve(0, 64)
        model.feed(0, PROMPT, "prefill")
    for n in (1, 4, 2, 8, 1, 8, 2, 4, 1, 2):
        ours, theirs = (model.feed(0, [11 * (i + n) for i in range(n)]) for model in models)
        assert np.array_equal(ours, theirs)
    assert models[0].recorded == 4


def test_cells_in_another_array_are_recorded_again() -> None:
    models = pair("q8_0")
    for model in models:
        model.store.reserve(0, 20)
        model.feed(0, PROMPT, "prefill")
        model.feed(0, [10])
    store = models[0].store
    k, v = store.region(0)
    store.rebind(0, replace(k, arrays=tuple(array.clone() for array in k.arrays)), v)
    for array in k.arrays:
        array.zero_()
    for token in (11, 12):
        assert np.array_equal(*(model.feed(0, [token]) for model in models))
    assert (models[0].recorded, models[0].graphs._runner.refused) == (2, 1)


def test_the_sanitizer_passes_over_nan_in_free_cells() -> None:
    for cache_type in FORMATS if GPU else ("q8_0",):
        plain, checked = (tiny(cache_type, sanitize=on) for on in (False, True))
        for model in (plain, checked):
            model.store.reserve(0, 12)
            model.feed(0, PROMPT[:3], "prefill")
        assert np.array_equal(*(model.feed(0, [9]) for model in (plain, checked)))
        assert checked.recorded == 0


def test_narrow_activations_change_answers_a_little_and_say_so() -> None:
    bounds = {"f16": 2**-8, "bf16": 2**-5} if GPU else {"f16": 2**-8}  # interpreted dots lack bf16
    models = {name: tiny(activations=name) for name in ("f32", *bounds)}
    for model in models.values():
        model.store.reserve(0, 12)
    rows = {name: model.feed(0, PROMPT[:4], "prefill") for name, model in models.items()}
    for name, bound in bounds.items():
        error = np.abs(rows[name] - rows["f32"]).max() / np.abs(rows["f32"]).max()
        assert 0 < error < bound
        told = [str(r) for graph in models[name].graphs for r in graph.receipts]
        assert any(f"activations={name}" in text for text in told)
