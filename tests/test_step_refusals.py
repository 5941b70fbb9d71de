"""Steps: what is refused, with the tables as before (contract 5.5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refused
from stores import (
    BATCH,
    batch_rows,
    forward,
    make_store,
    scattered,
    tokens,
)

from minfer.errors import Refusal
from minfer.kv.store import KvStore


def failed_step(rule: str, use: Callable[[KvStore], object], **kwargs: int) -> Refusal:
    """The refusal of a step that `use` breaks; the tables are as before."""
    store = make_store(**kwargs)
    store.reserve(1, 8)
    digest = store.digest()
    with pytest.raises(Refusal) as caught:
        use(store)
    assert caught.value.rule == rule, caught.value
    assert store.digest() == digest
    assert store.written(1) == 0
    store.check()
    return caught.value


def test_attend_before_write() -> None:
    def use(store: KvStore) -> None:
        with store.step(BATCH) as step:
            step.attend(0, q=batch_rows(BATCH)[0])

    assert "before its rows are written" in failed_step("5.5", use).message


def test_a_second_write() -> None:
    def use(store: KvStore) -> None:
        _, k, v = batch_rows(BATCH)
        with store.step(BATCH) as step:
            step.write(0, k=k, v=v)
            kept = step.region(0)[0].arrays[0].tobytes()
            try:
                step.write(0, k=-k, v=v)
            finally:
                assert step.region(0)[0].arrays[0].tobytes() == kept

    assert "second time" in failed_step("5.5", use).message


def test_a_second_write_by_a_graph() -> None:
    def use(store: KvStore) -> None:
        _, k, v = batch_rows(BATCH)
        with store.step(BATCH) as step:
            step.write(0, k=k, v=v)
            step.stored(0, *step.region(0))

    failed_step("5.5", use)


def test_leaving_with_a_layer_unwritten() -> None:
    def use(store: KvStore) -> None:
        _, k, v = batch_rows(BATCH)
        with store.step(BATCH) as step:
            step.write(1, k=k, v=v)

    error = failed_step("5.5", use, n_layer=3)
    assert error.facts == {"unwritten": [0, 2], "n_layer": 3}


@pytest.mark.parametrize("layer", [-1, 2, True, 0.0, None])
def test_a_layer_that_is_not_there(layer: int) -> None:
    def use(store: KvStore) -> None:
        _, k, v = batch_rows(BATCH)
        with store.step(BATCH) as step:
            step.write(layer, k=k, v=v)

    failed_step("5.5", use, n_layer=2)


def test_bad_rows() -> None:
    q, k, v = batch_rows(BATCH)

    def write(k: object, v: object, store: KvStore) -> None:
        with store.step(BATCH) as step:
            step.write(0, k=k, v=v)

    assert "float64" in failed_step("4.2", partial(write, k.astype(np.float64), v)).message
    failed_step("4.2", partial(write, k, v.astype(np.float16)))
    failed_step("4.2", partial(write, k, v.astype(np.int32)))
    failed_step("10", partial(write, k.tolist(), v))
    error = failed_step("10", partial(write, k, v[:1]))
    assert error.facts == {"name": "v", "shape": (1, 2, 32), "wanted": (2, 2, 32)}
    failed_step("10", partial(write, k.reshape(2, -1), v))
    failed_step("10", partial(write, q, v))


def test_bad_queries() -> None:
    q, k, v = batch_rows(BATCH)

    def attend(arguments: dict[str, object], store: KvStore) -> None:
        with store.step(BATCH) as step:
            step.write(0, k=k, v=v)
            step.attend(0, **{"q": q, **arguments})

    error = failed_step("2.8", partial(attend, {"q": q[:, :5]}))
    assert error.facts == {"n_head": 5, "n_head_kv": 2}
    failed_step("2.8", partial(attend, {"q": q[:, :0]}))
    failed_step("10", partial(attend, {"q": q[:1]}))
    failed_step("10", partial(attend, {"q": q[..., :16]}))
    failed_step("10", partial(attend, {"q": q[0]}))
    failed_step("4.2", partial(attend, {"q": q.astype(np.float64)}))
    failed_step("2.4", partial(attend, {"width": -1}))
    failed_step("10", partial(attend, {"scale": float("nan")}))
    failed_step("6.6", partial(attend, {"variant": "quick"}))


def test_a_second_step_and_changes_of_the_tables_wait() -> None:
    store = scattered("f32")
    batch = tokens((1, 5, 1))
    q, k, v = batch_rows(batch)
    with store.step(batch) as step:
        step.write(0, k=k, v=v)
        digest = store.digest()
        for call in (
            lambda: store.step(tokens((2, 6, 1))).__enter__(),
            lambda: store.reserve(9, 1),
            lambda: store.release(2),
            lambda: store.truncate(2, 0),
            lambda: store.import_rows(2, k[None], v[None]),
        ):
            with pytest.raises(Refusal) as caught:
                call()
            assert caught.value.rule == "5.5"
            assert store.digest() == digest
        step.attend(0, q=q)
    assert store.written(1) == 6


def test_a_step_is_useless_after_its_block() -> None:
    store = make_store()
    store.reserve(1, 4)
    q, k, v = batch_rows(BATCH)
    with store.step(BATCH) as step:
        step.write(0, k=k, v=v)
    for call in (
        lambda: step.write(0, k=k, v=v),
        lambda: step.attend(0, q=q),
        lambda: step.stored(0, *store.region(0)),
        lambda: step.region(0),
    ):
        with pytest.raises(Refusal) as caught:
            call()
        assert caught.value.rule == "5.5"
        assert "over" in caught.value.message


def test_a_refused_plan_opens_no_step() -> None:
    store = scattered("f32")
    digest, generation = store.digest(), store.generation
    for rule, batch in (("5.5", tokens((1, 6, 1))), ("2.5", tokens((3, 4, 1)))):
        with pytest.raises(Refusal) as caught, store.step(batch):
            pass
        assert caught.value.rule == rule
        assert (store.digest(), store.generation) == (digest, generation)
    store.reserve(8, 1)


def test_kernels_without_spans_take_causal_steps_only(causal_only: None) -> None:
    store = make_store()
    store.reserve(1, 4)
    store.reserve(2, 4)
    forward(store, tokens((1, 0, 2)))
    for batch in (tokens((2, 0, 1)), tokens((1, 2, 1), (2, 0, 1))):
        refused(store, "2.6", partial(forward, store, batch), "one is span", "from cell 0")
    forward(store, tokens((1, 2, 2), kind="decode"))
    assert (store.written(1), store.written(2)) == (4, 0)


def test_a_layer_that_is_written_is_not_replayed_too() -> None:
    def use(store: KvStore) -> None:
        _, k, v = batch_rows(BATCH)
        with store.step(BATCH) as step:
            step.write(0, k=k, v=v)
            step.replayed()

    assert "layers [0] are written already" in failed_step("5.5", use).message


def test_a_device_that_answers_no_more_loses_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store, gone = make_store(), []
    store.reserve(1, 8)
    fake = SimpleNamespace(
        **{**vars(store.kernels), "to_host": lambda array: 1 / 0 if gone else array}
    )
    monkeypatch.setitem(vars(store.stretches[0]), "kernels", fake)
    for dead in (False, True):
        gone[:] = [dead] * dead
        with pytest.raises(RuntimeError, match="illegal address"), store.step(BATCH):
            raise RuntimeError("illegal address")
        if not dead:
            assert store.written(1) == 0
            forward(store, BATCH)
            store.truncate(1, 0)
    calls: tuple[Callable[[], object], ...] = (
        lambda: forward(store, BATCH),
        lambda: store.written(1),
        lambda: store.reserve(2, 1),
        lambda: store.export(1, 0),
    )
    for call in calls:
        with pytest.raises(Refusal, match=r"lost: RuntimeError.*illegal.*another process") as lost:
            call()
        assert lost.value.rule == "5.5"


def test_a_refusal_in_a_step_does_not_ask_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(sanitize=False)  # the sanitizer wipes cells, by kernels
    store.reserve(1, 8)
    monkeypatch.setitem(vars(store.stretches[0]), "kernels", None)
    with pytest.raises(Refusal, match="unwritten"), store.step(BATCH):
        pass
    assert store.written(1) == 0
