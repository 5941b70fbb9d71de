"""Parent and child talk in lines of JSON over the child's stdin and stdout.

A request is {"do": verb, ...}. A reply is {"ok": {...}}, {"absent": reason} for what the child
cannot do by nature, or {"error": text}. Every reply carries the CPU seconds that the child used
while it waited for the request: a child whose idle workers spin shows.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent.parent
Message = dict[str, Any]
NO_GRAPH = ", no graph: "  # in the note of calls that no CUDA graph records
STDERR_SHOWN = 500  # characters of a dead child's stderr


class ChildFailed(Exception):
    """A child died, hung or spoke nonsense, and is gone; the text says which."""


class ChildHung(ChildFailed):
    """A child gave no answer in time, and is gone."""


class CallFailed(ChildFailed):
    """A child reported an error and lives on."""


class Absent(Exception):
    """What was asked for does not exist in this column; the text says why."""


def pack(array: NDArray[Any]) -> Message:
    """An array as JSON: its bytes in base64."""
    array = np.ascontiguousarray(array)
    text = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": text}


def unpack(packed: Mapping[str, Any]) -> NDArray[Any]:
    """The array of `pack`."""
    data = base64.b64decode(packed["base64"])
    return np.frombuffer(data, np.dtype(packed["dtype"])).reshape(packed["shape"])


class Child:
    """A process that answers requests, one at a time. Its stderr is kept for bad news.

    environment: None is that of this process.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=ROOT,
            env=environment,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, request: Message, timeout: float) -> Message:
        """The content of the reply. Raises Absent, or ChildFailed; a hung child is ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise ChildHung(f"gave no answer to {request['do']} in {timeout:g} s") from None
        except OSError:
            line = None
        if line is None:
            raise ChildFailed(self._last_words())
        return self._content(line)

    def _content(self, line: str) -> Message:
        try:
            reply = json.loads(line)
            kind = next(k for k in ("ok", "absent", "error") if k in reply)
        except (ValueError, StopIteration, TypeError):
            self.close()
            raise ChildFailed(f"answered {line.strip()[:STDERR_SHOWN]!r}") from None
        if kind == "absent":
            raise Absent(reply["absent"])
        if kind == "error":
            raise CallFailed(reply["error"])
        content: Message = reply["ok"]
        return content

    def _last_words(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()[-STDERR_SHOWN:]
        return f"ended with exit code {code}" + (f": {said}" if said else "")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process; safe to repeat."""
        if self.alive:
            self._process.kill()
        self._process.wait()
        self._stderr.close()


Handler = Callable[[Message], Message]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer requests from stdin until it ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    used, since = time.process_time(), time.perf_counter()
    for line in sys.stdin:
        idle = {"cpu": time.process_time() - used, "wall": time.perf_counter() - since}
        reply = _answer(handlers, json.loads(line))
        if "ok" in reply:
            reply["ok"]["idle"] = idle
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
        used, since = time.process_time(), time.perf_counter()


def _answer(handlers: Mapping[str, Handler], request: Message) -> Message:
    try:
        return {"ok": handlers[request["do"]](request)}
    except Absent as why:
        return {"absent": str(why)}
    except Exception as error:  # whatever a library raises is a fact for the table
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
