"""Columns of the table: whose code runs, in which interpreter, and whether it is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tuning.bench.protocol import Absent, CallFailed, Child, ChildFailed, Message

OURS, CONTROL, COPY = "ours", "control", "copy"  # COPY: of files, by the system
# Ours otherwise on a GPU: over rows in several runs of cells, without replayed graphs, with rounded
# activations. Each with an argument of `ours_cuda` and the kind of cases that it has.
OTHERWISE = {
    "2 runs": ("2", "batch"),
    "4 runs": ("4", "batch"),
    "no replay": ("no-replay", "model"),
    "f16 activations": ("f16", "model"),
}
START_SECONDS, ANSWER_SECONDS = 120.0, 600.0
GPU_ANSWER_SECONDS = 180.0  # compiling included; a kernel that hangs is ended after that
GPU_PEERS = {  # module and argument, and the kinds of cases that it has
    "cuDNN": (("torch_cuda", "cudnn"), "batch"),
    "FA2": (("torch_cuda", "fa2"), "batch"),
    "FlexAttention": (("torch_cuda", "flex"), "batch"),
    "FlashInfer": (("flashinfer_cuda",), "batch"),
    "FA3": (("fa3_cuda",), "batch"),
    "torch": (("torch_cuda", "linear"), "dense"),
    "compiled": (("transformers_cuda", "static"), "model"),
    "eager": (("transformers_cuda", "eager"), "model"),
}
GPU_WAY_OUT = "install it, or name an interpreter that has it: --peers PYTHON"
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
    patience: seconds that an answer may take. way_out: for a peer that is missing.
    """

    name: str
    start: Callable[[], Answers]
    missing: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    suites: Sequence[str] = ()
    idle: float = 0.0
    child: Answers | None = None
    patience: float = ANSWER_SECONDS
    way_out: str = WAY_OUT

    @property
    def is_peer(self) -> bool:
        return self.name not in (OURS, CONTROL, *OTHERWISE)

    def open(self) -> None:
        """Start the child and ask who it is; what goes wrong is kept in `missing`."""
        try:
            self.child = self.start()
            hello = self.child.ask({"do": "hello"}, START_SECONDS)
        except (ChildFailed, OSError) as error:
            self.close()
            reason = str(error).splitlines()[-1]
            self.missing = f"{reason}; {self.way_out}" if self.is_peer else reason
            return
        self.versions, self.suites = hello["versions"], hello["suites"]

    def ask(self, **request: Any) -> Message:
        """A reply; raises Absent, or ChildFailed. A child that is gone is started anew next time,
        with nothing prepared."""
        if self.child is None:
            self.child = self.start()
        try:
            reply = self.child.ask(request, self.patience)
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
    found.append(Column(COPY, _child(sys.executable, "copied_file")))
    for name, module in (("ggml", "ggml"), ("torch", "torch_cpu")):
        if peers is None:
            missing = "not asked for; --peers adds it"
        elif not peers.exists():
            missing = f"there is no {peers}; {WAY_OUT}"
        else:
            missing = ""
        found.append(Column(name, _child(str(peers), module), missing))
    return found


def gpu_columns(peers: Path | None, kinds: Sequence[str]) -> list[Column]:
    """Ours on a GPU, as control and otherwise too, and the peers that have cases of `kinds`."""
    started: dict[str, tuple[str, ...]] = dict.fromkeys((OURS, CONTROL), ())
    started |= {name: (how,) for name, (how, kind) in OTHERWISE.items() if kind in kinds}
    found = [Column(n, _child(sys.executable, "ours_cuda", *how)) for n, how in started.items()]
    missing = "not asked for; --peers adds it" if peers is None else ""
    for name, (how, kind) in GPU_PEERS.items():
        if kind in kinds:
            found.append(Column(name, _child(str(peers), *how), missing, way_out=GPU_WAY_OUT))
    for column in found:
        column.patience = GPU_ANSWER_SECONDS
    return found


def _child(interpreter: str, module: str, *arguments: str) -> Callable[[], Answers]:
    return lambda: Child([interpreter, "-m", f"tuning.columns.{module}", *arguments])


@contextmanager
def opened(found: list[Column]) -> Iterator[list[Column]]:
    """The columns with their children started; all are ended in the end."""
    try:
        wanted = [column for column in found if not column.missing]
        with ThreadPoolExecutor(max(1, len(wanted))) as pool:
            list(pool.map(Column.open, wanted))
        yield found
    finally:
        for column in found:
            column.close()
