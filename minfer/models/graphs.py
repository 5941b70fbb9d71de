"""The graphs of one model over one store (contract 7.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from minfer import rope
from minfer.format import Floats
from minfer.graph.builder import GraphBuilder
from minfer.graph.cache import GraphCache
from minfer.graph.capture import recorder
from minfer.graph.nodes import Graph, Heads, Input
from minfer.graph.params import GraphParams
from minfer.graph.replay import Runner
from minfer.kv.inputs import StepInputs
from minfer.kv.step import Step
from minfer.kv.store import KvStore
from minfer.models.blocks import Model, Tables
from minfer.models.hyperparameters import Hyperparameters
from minfer.ops import F32
from minfer.window import WindowMode


class ModelGraphs:
    """Builds a graph where a batch needs another one, keeps it by its params, and runs it.

    weights: what `models.weights.load_weights` gives. revision: the name of the model file.
    activations: what operands of products are rounded to. replay: whether decode is replayed on
    a device that can.
    """

    def __init__(
        self,
        hp: Hyperparameters,
        weights: Mapping[str, Any],
        store: KvStore,
        revision: str,
        *,
        activations: str = F32,
        replay: bool = True,
    ) -> None:
        self._hp, self._weights, self._store, self._revision = hp, weights, store, revision
        self._tables = _tables(hp, store)
        sliding = map(hp.sliding_of, range(hp.n_layer))
        self.widths = [how.width if how else 0 for how in sliding]
        self._activations = activations
        records = replay and len(store.stretches) == 1
        self._runner = Runner(store.stretches, recorder(store.kernels) if records else None)
        self._kept = GraphCache(self._runner.forget)
        self._params: dict[tuple[str, WindowMode, int, int], GraphParams] = {}

    @property
    def built(self) -> int:
        """How many graphs were built so far."""
        return self._kept.built

    def __iter__(self) -> Iterator[Graph]:
        """The graphs that are kept."""
        return iter(self._kept)

    def of(self, inputs: StepInputs, n_out: int) -> Graph:
        """The graph for a batch of which `n_out` rows give logits."""
        kind = inputs.kind, inputs.mode, inputs.n_tokens, n_out
        if kind not in self._params:
            self._params[kind] = self._new_params(inputs, n_out)
        return self._kept.get(self._params[kind], self.build)

    def _new_params(self, inputs: StepInputs, n_out: int) -> GraphParams:
        return GraphParams(
            n_tokens=inputs.n_tokens,
            n_out=n_out,
            kind=inputs.kind,
            stretches=self._store.stretches,
            kv_format=self._store.fmt,
            layout=self._store.layout,
            windows=tuple((inputs.mode, width) for width in self.widths),
            activations=self._activations,
            revision=self._revision,
        )

    def run(self, graph: Graph, inputs: Mapping[Input, Any], step: Step) -> Floats:
        """The output rows of a batch on the host, see `graph.replay.Runner`."""
        return self._runner.run(graph, inputs, step)

    def build(self, params: GraphParams) -> Graph:
        """A new graph of `params`."""
        hp = self._hp
        heads = Heads(hp.n_head, hp.n_head_kv, hp.head_dim)
        builder = GraphBuilder(params, heads, hp.n_vocab, self._store.threads)
        return builder.finish(
            hp.architecture.forward(Model(builder, hp, self._weights, self._tables))
        )


def _tables(hp: Hyperparameters, store: KvStore) -> list[Tables]:
    """cos and sin of every rope, by stretch: on its device, those that its layers turn by."""
    made = {r: rope.tables(store.n_ctx, r) for r in hp.ropes}
    found: list[Tables] = []
    for stretch in store.stretches:
        place, here = stretch.kernels.from_host, map(hp.rope_of, stretch.layers)
        found.append({r: (place(made[r][0]), place(made[r][1])) for r in dict.fromkeys(here)})
    return found
