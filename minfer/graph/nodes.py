"""What a finished graph is made of: values in slots, and nodes that compute them (contract 7)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minfer.graph.params import GraphParams
from minfer.ops import Kernel
from minfer.receipt import Receipt


@dataclass(frozen=True)
class Value:
    """A slot of the graph and the width in elements of one row in it."""

    slot: int
    width: int = 0


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
    queries of an attention tile. receipts: one for every kernel of the graph. uid: no other graph
    of this process has the same.
    """

    params: GraphParams
    nodes: tuple[Node, ...]
    slots: tuple[Any, ...]
    inputs: Mapping[str, int]
    regions: Mapping[int, LayerRegions]
    output: int
    n_vocab: int
    block_m: int
    receipts: tuple[Receipt, ...]
    uid: int = field(default_factory=itertools.count().__next__)
