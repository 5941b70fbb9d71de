"""The settings of the simulator's runs, local to the context that makes them."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Edit = Callable[[str, str], str]


class Mode(enum.Enum):
    FAST = "fast"  # no checks but guard pages around buffers below 64 MiB
    CHECKED = "checked"  # lint, then every access checked, in two schedules


@dataclass(frozen=True)
class Settings:
    mode: Mode = Mode.FAST
    seed: int = 1
    preempt_every: int = 7
    timeout_ms: int = 60_000
    edits: tuple[Edit, ...] = ()
    only_edited: bool = False  # launches whose text no edit changes run fast


class Launched(NamedTuple):
    """A launch as tests see it: the name given to metal_kernel, and the text that ran."""

    name: str
    text: str


_DEFAULT = Settings()
_settings: ContextVar[Settings] = ContextVar("settings", default=_DEFAULT)
_launches: ContextVar[list[Launched] | None] = ContextVar("launches", default=None)


def current() -> Settings:
    return _settings.get()


def note(launch: Launched) -> None:
    """Adds to the list of `launches`, if there is one."""
    if (seen := _launches.get()) is not None:
        seen.append(launch)


@contextlib.contextmanager
def _set(**changes: Any) -> Iterator[None]:
    token = _settings.set(replace(current(), **changes))
    try:
        yield
    finally:
        _settings.reset(token)


def running(
    mode: Mode, *, seed: int = 1, preempt_every: int = 7, timeout_ms: int = 60_000
) -> contextlib.AbstractContextManager[None]:
    """Kernels launched in this context run in `mode`.

    `seed` and `preempt_every` (one access in so many yields to another thread) shape the second
    run of a checked launch. A run over `timeout_ms` of CPU time is an error; 0 sets no limit.
    """
    return _set(mode=mode, seed=seed, preempt_every=preempt_every, timeout_ms=timeout_ms)


def edited(edit: Edit) -> contextlib.AbstractContextManager[None]:
    """In this context `edit(name, text)` changes the MSL text of each launch before it is built.

    `name` is the one given to metal_kernel. Edits of outer contexts come first.
    """
    return _set(edits=(*current().edits, edit))


def checking_edited_only(edit: Edit) -> contextlib.AbstractContextManager[None]:
    """Like `edited` and Mode.CHECKED for launches that `edit` changes; the others run fast."""
    return _set(edits=(*current().edits, edit), mode=Mode.CHECKED, only_edited=True)


@contextlib.contextmanager
def launches() -> Iterator[list[Launched]]:
    """The list of the launches in this context, as they come."""
    seen: list[Launched] = []
    token = _launches.set(seen)
    try:
        yield seen
    finally:
        _launches.reset(token)
