"""Changes of a store are whole, whatever interrupts them (contract 0.1, 5.5)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest
from interrupts import interrupted_at
from refusals import state
from stores import batch_rows, make_store, tokens

from minfer import uninterrupted
from minfer.errors import Refusal
from minfer.kv.store import KvStore
from minfer.uninterrupted import Uninterrupted


class CameError(Exception):
    """What a signal handler raises."""


@pytest.fixture
def handlers() -> object:
    """SIGTERM raises CameError, as SIGINT raises KeyboardInterrupt."""

    def come(number: int, frame: object) -> None:
        raise CameError

    before = signal.signal(signal.SIGTERM, come)
    yield come
    signal.signal(signal.SIGTERM, before)


def test_signals_come_after_the_block(handlers: object) -> None:
    done = []
    for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, CameError)):
        with pytest.raises(error), Uninterrupted():
            signal.raise_signal(number)
            done.append(number)
    assert done == [signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_every_signal_that_came_is_delivered(handlers: object) -> None:
    with pytest.raises(CameError) as caught, Uninterrupted(), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_a_signal_between_two_handlers_loses_none(
    handlers: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM came in the block; SIGINT comes when its handler is back and before that runs."""

    left = [signal.SIGINT]

    def restore(number: int, handler: object) -> None:
        signal.signal(number, handler)  # type: ignore[arg-type]
        if handler is signal.default_int_handler and left:
            signal.raise_signal(left.pop())

    monkeypatch.setattr(uninterrupted, "set_handler", restore)
    with pytest.raises(CameError) as caught, Uninterrupted():
        signal.raise_signal(signal.SIGTERM)
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_an_error_of_the_block_leaves_the_handlers_in_place() -> None:
    with pytest.raises(ZeroDivisionError), Uninterrupted():
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("times", [1, 2])
def test_handlers_that_raise_while_they_are_given_back(
    handlers: object, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is back may raise before the next is; if twice, the next hands its signal on."""
    left = [CameError() for _ in range(times)]

    def give(number: int, handler: object) -> None:
        signal.signal(number, handler)
        if handler is signal.default_int_handler and left:
            raise left.pop()

    monkeypatch.setattr(uninterrupted, "set_handler", give)
    with pytest.raises(CameError), Uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (signal.getsignal(signal.SIGTERM) is handlers) == (times == 1)
    with pytest.raises(CameError):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_other_threads_need_nothing() -> None:
    seen = []

    def block() -> None:
        with Uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def forked() -> KvStore:
    """Sequence 1 with 6 rows, of which 2 reads 4 and has one of its own; cells 0 to 3 are free."""
    store = make_store("q8_0", n_ctx=32)
    for seq, cap in ((7, 4), (1, 8), (8, 1), (2, 5)):
        store.reserve(seq, cap)
    _feed(store, (1, 0, 6))
    store.share_prefix(1, 2, 4)
    _feed(store, (2, 4, 1))
    store.release(7)
    store.release(8)
    return store


def _feed(store: KvStore, *groups: tuple[int, int, int]) -> None:
    batch = tokens(*groups)
    _, k, v = batch_rows(batch)
    with store.step(batch) as step:
        step.write(0, k=k, v=v)


OPERATIONS: dict[str, Callable[[KvStore], object]] = {
    "defrag": lambda store: store.defrag(),
    "resize": lambda store: store.resize_with_defrag(1, 12),
    "copy": lambda store: (store.reserve(3, 9), store.copy_prefix(2, 3, 5)),
    "remove": lambda store: store.remove(1, 4, 1, rope=None),
    "release": lambda store: store.release(1),
    "truncate": lambda store: store.truncate(2, 2),
    "donor": lambda store: _feed(store, (1, 2, 1)),
    "sharer": lambda store: _feed(store, (2, 1, 1)),
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_an_interrupt_leaves_rows_before_or_after(what: str) -> None:
    """Contents of all sequences are those before or after, at every line; a step may be cut."""
    calm = forked()
    OPERATIONS[what](calm)
    lines = 0
    for line in range(1, 2000):
        store = forked()
        before = contents(store)
        try:
            with interrupted_at(line):
                OPERATIONS[what](store)
        except KeyboardInterrupt:
            lines += 1
        else:
            break
        store.check()
        now = contents(store)
        for seq in set(now) | set(contents(calm)):
            allowed = [some.get(seq) for some in (before, contents(calm))]
            if what in ("donor", "sharer"):
                allowed += [rows[: len(now[seq])] for rows in allowed]
            assert now.get(seq, []) in [rows or [] for rows in allowed], (line, seq)
    assert lines > 20 and state(store) == state(calm)


def contents(store: KvStore) -> dict[int, list[bytes]]:
    """Every readable row of every sequence, K and V together."""
    return {
        seq: [
            k.tobytes() + v.tobytes()
            for k, v in zip(*(store.export_cells(seq, 0, which) for which in "kv"), strict=True)
        ]
        for seq in store.sequences()
    }


def test_an_error_while_cells_move_poisons_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = forked()

    def fail(*_: object) -> None:
        raise MemoryError("no scratch")

    monkeypatch.setattr(store._arena, "move", fail)
    with pytest.raises(MemoryError):
        store.defrag()
    monkeypatch.undo()
    for call in (
        store.defrag,
        lambda: store.reserve(9, 1),
        lambda: store.export(1, 0, "k"),
        lambda: store.written(2),
        lambda: _feed(store, (1, 6, 1)),
    ):
        with pytest.raises(Refusal, match="no scratch") as caught:
            call()
        assert caught.value.rule == "5.5"


def test_rows_survive_what_they_are_moved_by() -> None:
    store = forked()
    before = contents(store)
    for what in ("defrag", "resize"):
        OPERATIONS[what](store)
        assert contents(store) == before
    assert np.unique(store.owners()).tolist() == [-1, 1, 3]
