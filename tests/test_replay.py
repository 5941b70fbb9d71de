"""Replay: decode is recorded once, and what was recorded of something else is refused (7.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer import Batch, Engine
from minfer.errors import Refusal
from minfer.graph import cache
from minfer.graph.capture import places
from minfer.graph.replay import Executable, Identity
from minfer.models import graphs


class FakeBuffers:
    """Arrays on the host that stay where they are."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.arrays = {n: None if a is None else np.zeros_like(a) for n, a in inputs.items()}

    def fill(self, inputs: Mapping[str, Any]) -> None:
        for name, array in self.arrays.items():
            if array is not None:
                array[...] = inputs[name]


class FakeRecording:
    """Launches again what was recorded, over whatever the buffers hold by then."""

    def __init__(self, launch: Callable[[], Any], replays: list[Any]) -> None:
        self._launch, self._replays = launch, replays

    def replay(self) -> Any:
        rows = np.array(self._launch())
        self._replays.append(rows)
        return rows


class FakeRecorder:
    """Records on the CPU. replays: the rows of every replay."""

    def __init__(self) -> None:
        self.replays: list[Any] = []

    def buffers(self, inputs: Mapping[str, Any]) -> FakeBuffers:
        return FakeBuffers(inputs)

    def record(self, launch: Callable[[], Any]) -> FakeRecording:
        return FakeRecording(launch, self.replays)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    """What every engine that is loaded now records with."""
    made = FakeRecorder()
    monkeypatch.setattr(graphs, "recorder", lambda kernels: made)
    return made


def load(path: Path, device: str = "cpu", **how: Any) -> Engine:
    engine = Engine.load(path, n_ctx=64, threads=1, device=device, **how)
    engine.store.reserve(0, 40)
    engine.prefill([5, 90, 41], 0)
    return engine


def counts(engine: Engine) -> tuple[int, int, int]:
    """Recorded, refused, kept."""
    runner = engine._graphs._runner
    return runner.recorded, runner.refused, len(runner._kept)


def same_answers(engine: Engine, path: Path, n: int = 4) -> None:
    """The next tokens have the logits of an engine that launches everything directly."""
    plain = load(path, replay=False)
    for token in range(engine.store.written(0) - 3):
        plain.decode(10 + token)
    for token in range(engine.store.written(0) - 3, engine.store.written(0) - 3 + n):
        assert np.array_equal(engine.decode(10 + token), plain.decode(10 + token))


def test_decode_is_recorded_once_and_replayed(tiny_gguf: Path, fake: FakeRecorder) -> None:
    engine = load(tiny_gguf)
    assert counts(engine) == (0, 0, 0)  # a prompt is not recorded
    same_answers(engine, tiny_gguf, 20)
    assert counts(engine) == (1, 0, 1)
    assert len(fake.replays) == 19
    assert engine.store.written(0) == 23


def test_a_batch_is_recorded_for_its_exact_size(tiny_gguf: Path, fake: FakeRecorder) -> None:
    engine = load(tiny_gguf)
    engine.store.reserve(1, 10)
    engine.prefill([7], 1)
    alone = [load(tiny_gguf, replay=False) for _ in range(2)]
    alone[1].store.truncate(0, 0)
    alone[1].prefill([7], 0)
    for at in range(4):
        both = engine.forward(Batch([0, 1], [3 + at, 1 + at], "decode", [20 + at, 30 + at]))
        one, two = (e.decode(t + at, 0) for e, t in zip(alone, (20, 30), strict=True))
        assert np.array_equal(both, np.stack([one, two]))
    assert counts(engine) == (1, 0, 1) and len(fake.replays) == 3
    engine.decode(9, 1)
    assert counts(engine) == (2, 0, 2) and len(fake.replays) == 3


def test_rows_are_copies_that_later_replays_leave_alone(
    tiny_gguf: Path, fake: FakeRecorder
) -> None:
    engine = load(tiny_gguf)
    rows = [engine.decode(10 + i) for i in range(4)]
    kept = deepcopy(rows)
    engine.decode(77)
    assert all(np.array_equal(a, b) for a, b in zip(rows, kept, strict=True))
    assert not np.array_equal(rows[2], rows[3])


def test_moved_arrays_are_refused_and_recorded_again(tiny_gguf: Path, fake: FakeRecorder) -> None:
    engine = load(tiny_gguf)
    same_answers(engine, tiny_gguf)
    assert counts(engine) == (1, 0, 1)
    k, v = engine.store.region(1)
    before = engine.store.pool_generation
    engine.store.rebind(1, k, v)
    assert engine.store.pool_generation == before, "the same arrays"
    engine.store.rebind(1, k, deepcopy(v))
    assert engine.store.pool_generation == before + 1
    v.arrays[0][:] = 255  # what still reads the old array gives other logits
    replays = len(fake.replays)
    same_answers(engine, tiny_gguf)
    assert counts(engine) == (2, 1, 1)
    assert len(fake.replays) == replays + 3


def test_another_layout_is_refused_and_recorded_again(
    tiny_gguf: Path, fake: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(tiny_gguf)
    engine.decode(10)
    graph = next(g for g in engine._graphs if g.params.kind == "decode")
    monkeypatch.setattr(engine._graphs, "of", lambda inputs, n_out: graph)
    monkeypatch.setattr(type(engine.store), "layout", "other")
    engine.decode(11)
    engine.decode(12)
    assert counts(engine) == (2, 1, 1) and len(fake.replays) == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"graph": 8}, "graph was 7 and is 8"),
        ({"first": 1}, "first was 0 and is 1"),
        ({"end": 29}, "end was 30 and is 29"),
        ({"pool": 3}, "pool was 2 and is 3"),
        ({"layout": "planes"}, "layout was canonical and is planes"),
    ],
)
def test_an_executable_never_runs_for_another_identity(
    changed: dict[str, Any], words: str, fake: FakeRecorder
) -> None:
    own = Identity(7, 0, 30, 2, "canonical")
    buffers = FakeBuffers({"tokens": np.zeros(1, np.int32)})
    executable = Executable(own, buffers, fake.record(lambda: [1.0]))
    inputs = {"tokens": np.ones(1, np.int32)}
    with pytest.raises(Refusal, match=f"{words}.*record them again") as refused:
        executable.replay(own._replace(**changed), inputs)
    assert refused.value.rule == "7.4"
    assert not fake.replays and not buffers.arrays["tokens"].any()
    assert executable.replay(own, inputs).tolist() == [1.0] and buffers.arrays["tokens"].all()


def test_a_backend_that_rebinds_every_step_is_not_recorded(
    tiny_gguf: Path, fake: FakeRecorder, planes: str
) -> None:
    engine = load(tiny_gguf, planes)
    same_answers(engine, tiny_gguf)
    assert counts(engine) == (0, 0, 0) and not fake.replays


def test_the_sanitizer_looks_between_launches(tiny_gguf: Path, fake: FakeRecorder) -> None:
    engine = load(tiny_gguf, sanitize=True)
    same_answers(engine, tiny_gguf)
    assert counts(engine) == (0, 0, 0)


def test_replay_can_be_turned_off(tiny_gguf: Path, fake: FakeRecorder) -> None:
    engine = load(tiny_gguf, replay=False)
    same_answers(engine, tiny_gguf)
    assert counts(engine) == (0, 0, 0)
    assert counts(engine.with_cache("f16"))[0] == 0 and not fake.replays


def test_recordings_leave_with_their_graph(
    tiny_gguf: Path, fake: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_GRAPHS", 3)
    engine = load(tiny_gguf)
    for n in (1, 2, 3, 4):
        at = engine.store.written(0)
        engine.forward(Batch([0] * n, range(at, at + n), "decode", [9] * n))
    assert counts(engine) == (4, 0, 3)
    decode = {graph.uid for graph in engine._graphs}
    assert set(engine._graphs._runner._kept) == decode


def test_two_engines_record_for_themselves(tiny_gguf: Path, fake: FakeRecorder) -> None:
    first = load(tiny_gguf)
    second = first.with_cache("f16")
    second.store.reserve(0, 40)
    plain = load(tiny_gguf, replay=False).with_cache("f16")
    plain.store.reserve(0, 40)
    for engine in (second, plain):
        engine.prefill([5, 90, 41], 0)
    same_answers(first, tiny_gguf)
    for token in range(3):
        assert np.array_equal(second.decode(token), plain.decode(token))
    assert counts(first) == counts(second) == (1, 0, 1)


def test_a_replay_that_fails_leaves_nothing_readable(tiny_gguf: Path, fake: FakeRecorder) -> None:
    engine = load(tiny_gguf)
    engine.decode(10)
    runner = engine._graphs._runner
    ((uid, kept),) = runner._kept.items()

    class Broken:
        def replay(self) -> Any:
            raise RuntimeError("out of order")

    runner._kept[uid] = replace(kept, recording=Broken())
    with pytest.raises(RuntimeError, match="out of order"):
        engine.decode(11)
    assert engine.store.written(0) == 4
    runner._kept[uid] = kept
    same_answers(engine, tiny_gguf)


def test_launches_that_cannot_be_recorded_are_refused_with_the_way_out(
    tiny_gguf: Path, fake: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(launch: Callable[[], Any]) -> FakeRecording:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    engine = load(tiny_gguf)
    with monkeypatch.context() as patched:
        patched.setattr(fake, "record", broken)
        with pytest.raises(
            Refusal, match=r"\(operation not permitted .* capturing\).*replay=False"
        ):
            engine.decode(10)
    assert engine.store.written(0) == 3
    same_answers(engine, tiny_gguf)


def test_inputs_lie_side_by_side_and_aligned() -> None:
    inputs = {
        "tokens": np.zeros(3, np.int32),
        "window": None,
        "tiles": np.zeros((70, 2), np.int32),
        "rows": np.zeros((3, 4, 2), np.int32),
    }
    found, size = places(inputs)
    assert found == {"tokens": slice(0, 3), "tiles": slice(64, 204), "rows": slice(256, 280)}
    assert size == 320
