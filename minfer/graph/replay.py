"""Replay: decode's launches are recorded once and run again by one call (contract 7.4).

A recording holds addresses and kernels. It carries the identity of what it was made of, and for
anything else it is refused and the launches are recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from minfer.errors import Refusal
from minfer.format import Floats
from minfer.graph.nodes import Graph, Input
from minfer.graph.run import bind, execute, launch_all
from minfer.kv.step import Step
from minfer.offload import Stretch
from minfer.ops import DECODE


class Identity(NamedTuple):
    """What recorded launches depend on.

    graph: its uid. first, end: the nodes. pool: generation of the arrays that hold the cells.
    layout: how cells are arranged in them.
    """

    graph: int
    first: int
    end: int
    pool: int
    layout: str

    @classmethod
    def of(cls, graph: Graph, step: Step) -> Identity:
        """The identity of all nodes of `graph` over the cells of an open step."""
        return cls(graph.uid, 0, len(graph.nodes), *step.pool)


class Buffers(Protocol):
    """Int inputs of one graph where launches find them, at addresses that stay."""

    @property
    def arrays(self) -> Mapping[Input, Any]:
        """Arrays of the backend; None for a causal window."""

    def fill(self, inputs: Mapping[Input, Any]) -> None:
        """Take over the numbers of one batch."""


class Recording(Protocol):
    """Launches of a whole graph."""

    def replay(self) -> Floats:
        """Run them; the output rows, a new array on the host."""


class Recorder(Protocol):
    """What a device that can record its launches offers."""

    def buffers(self, inputs: Mapping[Input, Any]) -> Buffers:
        """Buffers for inputs of these shapes."""

    def record(self, launch: Callable[[], Any]) -> Recording:
        """Record what `launch` launches, running none of it; it returns the output rows."""


@dataclass(frozen=True)
class Executable:
    """A recording, the buffers it reads, and what it was made of."""

    identity: Identity
    buffers: Buffers
    recording: Recording

    def replay(self, identity: Identity, inputs: Mapping[Input, Any]) -> Floats:
        """The output rows of one batch; refused for another identity than its own."""
        if identity != self.identity:
            differ = [
                f"{name} was {was} and is {now}"
                for name, was, now in zip(Identity._fields, self.identity, identity, strict=True)
                if was != now
            ]
            raise Refusal(
                "7.4",
                f"these launches were recorded of something else ({', '.join(differ)}); record "
                "them again",
                {"recorded": tuple(self.identity), "wanted": tuple(identity)},
            )
        self.buffers.fill(inputs)
        return self.recording.replay()


class Runner:
    """Runs the graphs of one engine, decode by replay where there is a recorder.

    stretches: where layers lie. recorded, refused: how often launches were recorded, and a
    recording refused.
    """

    def __init__(self, stretches: Sequence[Stretch], recorder: Recorder | None) -> None:
        self._kernels, self._recorder = [s.kernels for s in stretches], recorder
        self._kept: dict[int, Executable] = {}
        self.recorded = 0
        self.refused = 0

    def run(self, graph: Graph, inputs: Mapping[Input, Any], step: Step) -> Floats:
        """The output rows of one batch on the host, float32 [n_out, n_vocab].

        inputs: what `graph.run.fill_batch_inputs` gave. Prompts are launched directly, and so is
        everything under the sanitizer, which looks between launches.
        """
        if self._recorder is None or graph.params.kind != DECODE or step.sanitizes:
            return self._launched(graph, self._placed(inputs), step)
        kept = self._kept.get(graph.uid)
        if kept is not None:
            try:
                rows = kept.replay(Identity.of(graph, step), inputs)
            except Refusal:
                self.refused += 1
            else:
                step.replayed()
                return rows
        return self._recorded(self._recorder, graph, inputs, step)

    def forget(self, graph: Graph) -> None:
        """Give up what was recorded of a graph."""
        self._kept.pop(graph.uid, None)

    def _recorded(
        self, recorder: Recorder, graph: Graph, inputs: Mapping[Input, Any], step: Step
    ) -> Floats:
        """Launch directly, which compiles every kernel, then record the same launches.

        Where the direct run left cells in other arrays there is nothing to record.
        """
        before = Identity.of(graph, step)
        buffers = recorder.buffers(inputs)
        buffers.fill(inputs)
        rows = self._launched(graph, buffers.arrays, step)
        if Identity.of(graph, step) == before:
            bound = bind(graph, buffers.arrays, step)
            recording = _record(recorder, lambda: launch_all(graph, bound))
            self._kept[graph.uid] = Executable(before, buffers, recording)
            self.recorded += 1
        return rows

    def _placed(self, inputs: Mapping[Input, Any]) -> dict[Input, Any]:
        """The inputs as arrays of the backend that reads them."""
        places = [kernels.from_host for kernels in self._kernels]
        return {
            at: None if array is None else places[at.stretch](array) for at, array in inputs.items()
        }

    def _launched(self, graph: Graph, inputs: Mapping[Input, Any], step: Step) -> Floats:
        rows: Floats = self._kernels[-1].to_host(execute(graph, inputs, step))
        return rows


def _record(recorder: Recorder, launch: Callable[[], Any]) -> Recording:
    """A recording; refuses with what the device said and the way out."""
    try:
        return recorder.record(launch)
    except Exception as error:  # whatever a device raises where it cannot record
        said = str(error).strip().splitlines()
        why = said[0] if said else type(error).__name__
        raise Refusal(
            "7.4",
            f"launches cannot be recorded ({why}); Engine.load(replay=False) makes them directly",
            {"error": type(error).__name__},
        ) from error
