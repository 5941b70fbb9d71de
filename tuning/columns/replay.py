"""Subjects on a GPU: calls recorded in one CUDA graph, answers of its replay, events around it.

The graph holds a call on every set of inputs. Its outputs are filled with NaN before the replay
whose answers are checked: what is checked is what is timed. Without a GPU, which is how Triton's
interpreter runs, calls are made one by one.
"""

from __future__ import annotations

import gc
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tuning.bench.batches import INPUTS, Batch, rows_of
from tuning.bench.inputs import checked_heads
from tuning.bench.protocol import NO_GRAPH, Absent, Handler, Message
from tuning.columns.subjects import Call, Measure, Prepare, Subject, run_column

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_grad_enabled(False)
Pick = Callable[[Any], Any]


class Replay(Measure):
    """Equal calls on rotating inputs in a CUDA graph, or made one by one where none records them.

    outs: what the calls gave, kept, so that none is written over another. trouble: why there is no
    graph.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__(calls)
        self.outs: list[Any] = []
        self.trouble = ""
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # inputs are there
        with torch.cuda.stream(side):  # compiles, and allocates workspaces
            for _ in range(2):
                calls[0]()
        torch.cuda.synchronize()
        self.graph: Any = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph):
                self.outs = [call() for call in calls]
        except Exception as error:  # whatever a library raises where it cannot be recorded
            torch.cuda.synchronize()
            self.graph, self.trouble = None, f"{type(error).__name__}: {error}".splitlines()[0]

    def run(self, times: int) -> None:
        """Make all calls so many times."""
        for _ in range(times):
            if self.graph is None:
                self.outs.clear()  # their memory is the next ones'
                self.outs += [call() for call in self.calls]
            else:
                self.graph.replay()

    def sample(self, n: int) -> float:
        """Seconds of one call over about n of them; half as many untimed ones wake the clocks."""
        times = math.ceil(n / len(self.calls))
        start, end = events(2)
        self.run(math.ceil(times / 2))
        start.record()
        self.run(times)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / (times * len(self.calls))

    def answers(self) -> list[Any]:
        """The outputs of one run, over those of another that were filled with NaN."""
        self.run(1)
        for out in self.outs:
            tensor_of(out).fill_(torch.nan)
        self.run(1)
        torch.cuda.synchronize()
        return [tensor_of(out) for out in self.outs]


def events(n: int) -> list[Any]:
    """Marks in the stream, with times."""
    return [torch.cuda.Event(enable_timing=True) for _ in range(n)]  # type: ignore[no-untyped-call]


def tensor_of(out: Any) -> Any:
    """The output itself, where a library gives more beside it."""
    return out[0] if isinstance(out, tuple) else out


def subject(
    calls: Sequence[Call], pick: Pick, note: str, facts: Mapping[str, Any] | None = None
) -> Subject:
    """A subject of equal calls. pick: the part of an output that is checked, as float32."""
    if DEVICE == "cpu":
        measure: Measure = Measure(calls)
        outs = [tensor_of(calls[0]())]
    else:
        measure = replay = Replay(calls)
        outs = replay.answers()
        note += f"{NO_GRAPH}{replay.trouble}" if replay.trouble else ""
    whole = all(bool(torch.isfinite(out).all()) for out in outs)
    values: NDArray[Any] = np.ascontiguousarray(pick(outs[-1]).float().cpu().numpy())
    values = values if whole else np.full_like(values, np.nan)
    return Subject({"call": measure}, values, note, dict(facts or {}))


# -- attention ------------------------------------------------------------------------------------


def inputs_of(case: Batch, dtype: Any = torch.float32) -> list[Any]:
    """q [batch * n_q, n_head, d], k and v [batch * n_cells, n_head_kv, d] on the GPU."""
    sizes = (case.n_q, case.n_head), (case.n_cells, case.n_head_kv), (case.n_cells, case.n_head_kv)
    made = []
    for name, (n, heads) in zip(INPUTS, sizes, strict=True):
        parts = [
            rows_of(case, name, s * n + _arange(n), _arange(heads), _arange(case.head_dim))
            for s in range(case.batch)
        ]
        made.append(torch.cat([part.to(dtype) for part in parts]))
    return made


def _arange(n: int) -> Any:
    return torch.arange(n, device=DEVICE)


def picked_of(case: Batch) -> Pick:
    """The checked queries and heads of an output that has [batch * n_q, n_head, d] numbers."""
    queries, heads = case.checked[0], checked_heads(case)

    def pick(out: Any) -> Any:
        return out.reshape(case.batch * case.n_q, case.n_head, case.head_dim)[queries][:, heads]

    return pick


# -- a column -------------------------------------------------------------------------------------


def run_gpu_column(
    prepare: Mapping[str, Prepare],
    versions: Callable[[], dict[str, str]],
    more: Mapping[str, Handler] | None = None,
) -> None:
    """Serve requests as `run_column` does; a child whose GPU context is lost ends."""
    run_column(prepare, versions, more, guard=guarded)


def guarded(handler: Handler) -> Handler:
    """An error that the GPU does not recover from ends the process: the next one has a new one."""

    def handle(request: Message) -> Message:
        try:
            return handler(request)
        except Absent:
            raise
        except Exception:
            try:
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
            except Exception:  # every later call would fail too
                traceback.print_exc()
                os._exit(1)
            raise
        finally:
            if request["do"] == "drop" and DEVICE == "cuda":
                gc.collect()
                torch.cuda.empty_cache()

    return handle


def versions() -> dict[str, str]:
    """Versions of what runs."""
    return {"torch": torch.__version__, "cuda": str(torch.version.cuda)}


def refuse_format(fmt: str, taken: Sequence[str]) -> None:
    """Say that a peer has no such cells or weights."""
    if fmt not in taken:
        raise Absent(f"it takes {' and '.join(taken)}, not {fmt}")
