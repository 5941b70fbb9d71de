"""What a finished graph is made of: values in slots, and nodes that compute them (contract 7)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from minfer.graph.params import GraphParams
from minfer.ops import Kernel
from minfer.receipt import Receipt


@dataclass(frozen=True)
class Value:
    """A slot of the graph, the width in elements of one row in it, and where it lies."""

    slot: int
    width: int = 0
    stretch: int = 0


class Input(NamedTuple):
    """An int input by its name; every stretch that reads it has its own."""

    name: str
    stretch: int = 0


@dataclass(frozen=True)
class Heads:
    """Head geometry of a model, the same in every layer."""

    n_head: int
    n_head_kv: int
    head_dim: int


@dataclass(frozen=True)
class Node:
    """One launch: `slots[outputs] = launch(*slots[inputs], **scalars)`.

    stores: the layer whose cells this node writes. frees: slots nobody reads afterwards.
    """

    op: str
    launch: Kernel
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scalars: Mapping[str, Any]
    stores: int | None = None
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerRegions:
    """Where a layer's K and V regions go, and the width of a cell the graph was built for."""

    k: Value
    v: Value
    row_words: int


@dataclass(frozen=True)
class Graph:
    """A finished graph; `graph.run.execute` runs it.

    slots: the table of values before a run. inputs, regions: which slots a batch fills. block_m:
    queries of an attention tile, by stretch. receipts: one for every kernel of the graph. uid: no
    other graph of this process has the same.
    """

    params: GraphParams
    nodes: tuple[Node, ...]
    slots: tuple[Any, ...]
    inputs: Mapping[Input, int]
    regions: Mapping[int, LayerRegions]
    output: int
    n_vocab: int
    block_m: tuple[int, ...]
    receipts: tuple[Receipt, ...]
    uid: int = field(default_factory=itertools.count().__next__)


def with_frees(nodes: list[Node], output: int, kept: frozenset[int]) -> tuple[Node, ...]:
    """Give every node the slots it reads last, so that a long prefill keeps few rows alive."""
    seen, done = {output} | kept, []
    for node in reversed(nodes):
        last = tuple(dict.fromkeys(s for s in (*node.inputs, *node.outputs) if s not in seen))
        seen.update(last)
        done.append(replace(node, frees=last))
    return tuple(reversed(done))
