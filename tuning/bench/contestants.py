"""Columns of the table: whose code runs, in which interpreter, and whether it is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tuning.bench.protocol import Absent, CallFailed, Child, ChildFailed, Message

OURS, CONTROL = "ours", "control"
START_SECONDS, ANSWER_SECONDS = 120.0, 600.0
WAY_OUT = "run `make peers`, or name an interpreter that has it: --peers PYTHON"


class Answers(Protocol):
    """What a column asks of its child; `protocol.Child` and the fakes of tests have it."""

    def ask(self, request: Message, timeout: float) -> Message:
        """The content of the reply."""
        ...

    def close(self) -> None:
        """End it."""
        ...


@dataclass
class Column:
    """One column and its child.

    missing: why there is no child. versions: what the child says of itself. idle: most CPU
    seconds it used between two requests, which is what its spinning workers took from others.
    """

    name: str
    start: Callable[[], Answers]
    missing: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    suites: Sequence[str] = ()
    idle: float = 0.0
    child: Answers | None = None

    @property
    def is_peer(self) -> bool:
        return self.name not in (OURS, CONTROL)

    def open(self) -> None:
        """Start the child and ask who it is; what goes wrong is kept in `missing`."""
        try:
            self.child = self.start()
            hello = self.child.ask({"do": "hello"}, START_SECONDS)
        except (ChildFailed, OSError) as error:
            self.close()
            reason = str(error).splitlines()[-1]
            self.missing = f"{reason}; {WAY_OUT}" if self.is_peer else reason
            return
        self.versions, self.suites = hello["versions"], hello["suites"]

    def ask(self, timeout: float = ANSWER_SECONDS, **request: Any) -> Message:
        """A reply; raises Absent, or ChildFailed. A child that is gone is started anew next time,
        with nothing prepared."""
        if self.child is None:
            self.child = self.start()
        try:
            reply = self.child.ask(request, timeout)
        except CallFailed:
            raise
        except ChildFailed:
            self.close()
            raise
        self.idle = max(self.idle, reply.get("idle", {}).get("cpu", 0.0))
        return reply

    def forget(self) -> None:
        """Let the child drop what it holds; one that cannot is ended."""
        if self.child is not None:
            try:
                self.ask(do="drop")
            except (Absent, ChildFailed):
                self.close()

    def close(self) -> None:
        """End the child; the next request starts another."""
        if self.child is not None:
            self.child.close()
            self.child = None


def columns(peers: Path | None) -> list[Column]:
    """Ours, ours again as the control, and the peers that `peers`, an interpreter, has."""
    found = [Column(name, _child(sys.executable, "ours")) for name in (OURS, CONTROL)]
    for name, module in (("ggml", "ggml"), ("torch", "torch_cpu")):
        if peers is None:
            missing = "not asked for; --peers adds it"
        elif not peers.exists():
            missing = f"there is no {peers}; {WAY_OUT}"
        else:
            missing = ""
        found.append(Column(name, _child(str(peers), module), missing))
    return found


def _child(interpreter: str, module: str) -> Callable[[], Answers]:
    return lambda: Child([interpreter, "-m", f"tuning.columns.{module}"])


@contextmanager
def opened(found: list[Column]) -> Iterator[list[Column]]:
    """The columns with their children started; all are ended in the end."""
    try:
        for column in found:
            if not column.missing:
                column.open()
        yield found
    finally:
        for column in found:
            column.close()
