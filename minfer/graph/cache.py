"""Graphs kept by their params: equal params reuse one (contract 7.1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from minfer.graph.nodes import Graph
from minfer.graph.params import GraphParams

MAX_GRAPHS = 64


class GraphCache:
    """The most recently used graphs, at most `MAX_GRAPHS`. forget: told of each that leaves."""

    def __init__(self, forget: Callable[[Graph], None] = lambda graph: None) -> None:
        self._graphs: OrderedDict[GraphParams, Graph] = OrderedDict()
        self._forget = forget
        self.built = 0

    def get(self, params: GraphParams, build: Callable[[GraphParams], Graph]) -> Graph:
        """The graph of `params`, built on first use."""
        graph = self._graphs.get(params)
        if graph is None:
            graph = build(params)
            self.built += 1
            self._graphs[params] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._forget(self._graphs.popitem(last=False)[1])
        self._graphs.move_to_end(params)
        return graph

    def __iter__(self) -> Iterator[Graph]:
        return iter(self._graphs.values())
