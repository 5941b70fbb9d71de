"""The workers of a question: processes that are started again when they crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from tuning.bench.protocol import CallFailed, Child, ChildFailed, Message

START_SECONDS = 600.0  # for libraries, and for rates of the machine

Item = TypeVar("Item")


class Worker:
    """One process, made by the first request. how: SETTING of `tuning.sweep.worker`."""

    def __init__(self, how: Message, timeout: float) -> None:
        self.how, self.timeout = how, timeout
        self.child: Child | None = None

    def start(self) -> None:
        """Have a process that is ready."""
        if self.child is None:
            argv = [sys.executable, "-m", "tuning.sweep.worker", json.dumps(self.how)]
            self.child = Child(argv, environment(self.how))
            self._asked({"do": "hello"}, START_SECONDS)

    def ask(self, timeout: float | None = None, **request: Any) -> Message:
        """The reply; raises ChildFailed, after which the next request has a new process."""
        self.start()
        return self._asked(request, self.timeout if timeout is None else timeout)

    def _asked(self, request: Message, timeout: float) -> Message:
        assert self.child is not None
        try:
            return self.child.ask(request, timeout)
        except CallFailed:
            raise
        except ChildFailed:
            self.close()
            raise

    def forget(self, key: str) -> None:
        """Let go of what was prepared, where there still is a process that holds it.

        One whose threads go on would slow others: it ends.
        """
        if self.child is not None:
            with contextlib.suppress(ChildFailed):
                if self.ask(do="drop", key=key)["left"]:
                    self.close()

    def close(self) -> None:
        """End the process; safe to repeat."""
        if self.child is not None:
            self.child.close()
            self.child = None


def environment(how: Message) -> dict[str, str]:
    """The environment of a worker: threads as asked, promoted rows left out."""
    return {**os.environ, "NUMBA_NUM_THREADS": str(how["threads"]), "MINFER_NO_TUNED": "1"}


class Crew:
    """Several workers. What they prepare, they prepare at the same time."""

    def __init__(self, how: Message, jobs: int, timeout: float) -> None:
        self.workers = [Worker(how, timeout) for _ in range(jobs)]

    def together(self, items: Iterable[Item], task: Any) -> Iterator[tuple[Worker, Item, Any]]:
        """task(worker, item) of an item a worker, all at once; in the order of the items."""
        pairs = list(zip(self.workers, items, strict=False))
        with ThreadPoolExecutor(max_workers=len(pairs) or 1) as pool:
            made = list(pool.map(lambda pair: task(*pair), pairs))
        yield from ((worker, item, done) for (worker, item), done in zip(pairs, made, strict=True))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@contextmanager
def crew_of(how: Message, jobs: int, timeout: float) -> Iterator[Crew]:
    """A crew whose processes end with the block."""
    made = Crew(how, jobs, timeout)
    try:
        yield made
    finally:
        made.close()
