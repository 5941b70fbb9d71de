"""Parent and child talk in lines of JSON over the child's stdin and stdout.

A request is {"do": verb, "number": n, "within": seconds, ...}. A reply is {"ok": {...}},
{"absent": reason} for what the child cannot do by nature, or {"error": text}, with the number of
the request. Every reply carries the CPU seconds that the child used while it waited for the
request: a child whose idle workers spin shows.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import json
import os
import queue
import signal
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
ENDING = 5.0  # seconds that a child without stdout has to end
ALONE = 5.0  # seconds after which a child gives itself up that nobody ends in time


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

    What it starts is of its process group, and ends with it. environment: None is that of this
    process.
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
            process_group=0,
        )
        self._asked = 0
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
        self._asked += 1
        numbered = {**request, "number": self._asked, "within": timeout}
        try:
            self._process.stdin.write(json.dumps(numbered) + "\n")
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
            if reply["number"] != self._asked:  # that of an earlier request, or of nobody
                raise ValueError("another number")
        except (ValueError, KeyError, StopIteration, TypeError):
            self.close()
            raise ChildFailed(f"answered {line.strip()[:STDERR_SHOWN]!r}") from None
        if kind == "absent":
            raise Absent(reply["absent"])
        if kind == "error":
            raise CallFailed(reply["error"])
        content: Message = reply["ok"]
        return content

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it only closed its stdout
            self._process.wait(ENDING)
        self._end()
        code = self._process.returncode
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()[-STDERR_SHOWN:]
        return f"ended with exit code {code}" + (f": {said}" if said else "")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process; safe to repeat."""
        self._end()
        self._stderr.close()

    def _end(self) -> None:
        """Kill what is left of its process group."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left
                os.killpg(self._process.pid, signal.SIGKILL)
        elif self.alive:
            self._process.kill()
        self._process.wait()


Handler = Callable[[Message], Message]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer requests from stdin until it ends. What libraries print goes to stderr.

    A process that is still at a request when its parent must have given it up ends itself: the
    parent may be dead.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    used, since, me = time.process_time(), time.perf_counter(), os.getpid()
    for line in sys.stdin:
        idle = {"cpu": time.process_time() - used, "wall": time.perf_counter() - since}
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["within"] + ALONE, exit=True)
        reply = _answer(handlers, request)
        if os.getpid() != me:  # a copy that a call forked
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        if "ok" in reply:
            reply["ok"]["idle"] = idle
        reply["number"] = request["number"]
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
