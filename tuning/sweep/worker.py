"""The process that compiles, checks and times configurations: `tuning.sweep.worker SETTING`.

It may crash or hang; the parent ends it and starts another. SETTING is JSON: device, fmt, threads,
rotate, add (files with variants), op and the names of the cases.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from minfer.device import Device, DeviceKind
from minfer.errors import Refusal
from minfer.format import KvFormat
from tuning.bench.protocol import Handler, Message, serve
from tuning.sweep import machine, own_files
from tuning.sweep.cases import case_named
from tuning.sweep.gate import WrongAnswer
from tuning.sweep.ready import Inputs, Ready, Setting
from tuning.sweep.resources import launched, taken

COMPILERS = {"triton", "numba", "llvmlite"}  # whose exceptions say that a kernel does not compile
COMPILING = ("PassManager", "out of resource", "Unable to build metal library")
SAID = 400  # characters of a message


def status_of(error: Exception) -> tuple[str, str]:
    """The status of a trial that ended so, and why in a line."""
    told = (str(error), *getattr(error, "__notes__", ()))
    text = " ".join(" ".join(told).split())[:SAID]
    kind = type(error)
    named = f"{kind.__name__}: {text}"
    if isinstance(error, WrongAnswer):
        return "wrong", text
    if isinstance(error, Refusal):
        return "refused", text
    if kind.__module__.partition(".")[0] in COMPILERS or any(part in text for part in COMPILING):
        return "compile-failed", named
    return "crashed", named


class Workbench:
    """What a worker holds: inputs on the device, and configurations that are ready."""

    def __init__(self, how: Message) -> None:
        self.device = Device.parse(how["device"])
        own_files.add(how["add"], how["device"])
        fmt = KvFormat(how["fmt"]) if how["fmt"] else KvFormat.F32
        self.setting = Setting(self.device, fmt, how["threads"], how["rotate"])
        self.cases = [case_named(how["op"], name) for name in how["cases"]]
        self.inputs = Inputs(self.setting)
        self.ready: dict[str, Ready] = {}
        self.threads = threading.active_count()

    def machine(self, _request: Message) -> Message:
        """Rates of the machine, measured now."""
        return {"rates": machine.rates(self.setting)}

    def prepare(self, request: Message) -> Message:
        """Compile and check one configuration on all cases."""
        start = time.monotonic()
        self.threads = threading.active_count()
        with launched(self.device) as kernels:
            status, message = self._tried(partial(self._make, request))
            self._recover()
            resources = taken(kernels)
        if status == "ok" and resources.get("spills"):
            message = f"{resources['spills']} registers of a thread are spilled"
            if not request["may_spill"]:
                status = "spills"
        if status == "ok":  # what is launched here are kernels of another configuration
            status, broken = self._tried(self.ready[request["key"]].check_free)
            message = broken or message
        if status != "ok":
            self.drop(request)
        seconds = time.monotonic() - start
        return {"status": status, "message": message, "resources": resources, "seconds": seconds}

    def _make(self, request: Message) -> str:
        made = Ready(self.inputs, self.cases, request["variant"], request["config"])
        self.ready[request["key"]] = made
        return made.trouble

    def time(self, request: Message) -> Message:
        """One sample of a case."""
        try:
            seconds = self.ready[request["key"]].sample(request["case"], request["calls"])
        except Exception as error:  # is the row of this configuration
            status, message = self._failed(error)
            return {"status": status, "message": f"after a timed round: {message}"}
        return {"status": "ok", "seconds": seconds}

    def _tried(self, act: Callable[[], str | None]) -> tuple[str, str]:
        """The status of a trial after `act`, and what it says."""
        try:
            return "ok", act() or ""
        except Exception as error:  # is the row of this configuration
            return self._failed(error)

    def _failed(self, error: Exception) -> tuple[str, str]:
        """`status_of`; where a call may have changed what others are given, that is made anew."""
        status, message = status_of(error)
        if status in ("wrong", "crashed"):
            self.inputs = Inputs(self.setting)
        if status not in ("wrong", "refused"):
            traceback.print_exc()
        return status, message

    def drop(self, request: Message) -> Message:
        """Forget a configuration. left: threads that it started and that go on without it."""
        self.ready.pop(request["key"], None)
        self._recover()
        return {"left": max(0, threading.active_count() - self.threads)}

    def _recover(self) -> None:
        """End a process whose GPU context is lost: every later call would fail too."""
        if self.device.kind is DeviceKind.CUDA and self.device.package().compute_capability():
            import torch

            try:
                torch.cuda.synchronize()
            except Exception:
                traceback.print_exc()
                os._exit(1)

    def handlers(self) -> dict[str, Handler]:
        return {
            "hello": lambda _request: {},
            "machine": self.machine,
            "prepare": self.prepare,
            "time": self.time,
            "drop": self.drop,
        }


def pin(threads: int) -> None:
    """Stay on as many cores as there are threads, where the system lets a process say so."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:threads])


def main(argv: list[str]) -> None:
    """Answer requests until stdin ends."""
    how: dict[str, Any] = json.loads(argv[1])
    if how["device"] == "cpu":
        pin(how["threads"])
    serve(Workbench(how).handlers())
    os._exit(0)  # threads that a variant started do not hold it


if __name__ == "__main__":
    main(sys.argv)
