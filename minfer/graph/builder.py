"""Builds a graph from params: which nodes, in which order, with which kernel each (contract 7.2).

A model calls the builder's methods in order; every call adds one node and returns the `Value` it
produces. A value is a slot of the graph's table: constants (weights, tables) sit in their slots
from the start, inputs and K/V regions are put there per batch, the rest is computed and dropped
after its last use. Where the layers of another device begin, rows cross to it through the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minfer.format import KvFormat, cell_words
from minfer.graph.choices import Choices
from minfer.graph.nodes import Graph, Heads, Input, LayerRegions, Node, Value, with_frees
from minfer.graph.params import GraphParams
from minfer.graph.weight import Weight
from minfer.ops import DECODE, Kernel
from minfer.registry import Choice


@dataclass
class GraphBuilder:
    """Collects the nodes of one graph. threads: workers of every node, None for its own default."""

    params: GraphParams
    heads: Heads
    n_vocab: int
    threads: int | None
    _slots: list[Any] = field(default_factory=list)
    _nodes: list[Node] = field(default_factory=list)
    _inputs: dict[Input, Value] = field(default_factory=dict)
    _regions: dict[int, LayerRegions] = field(default_factory=dict)
    _stored: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    _weights: dict[int, Weight] = field(default_factory=dict)
    _crossed: dict[tuple[int, int], Value] = field(default_factory=dict)
    _stretch: int = 0

    def __post_init__(self) -> None:
        self._choices = Choices(self.params, self.heads, self.threads)
        self._block_m = [1] * len(self.params.stretches)

    def enter(self, stretch: int) -> None:
        """Put what follows on the device of a stretch, by its number; a builder begins at 0."""
        self._stretch = stretch

    def constant(self, array: Any) -> Value:
        """A `Weight`, or an array, that lies on the device and lives as long as the graph."""
        if not isinstance(array, Weight):
            return self._slot(array.shape[-1], array)
        value = self._slot(array.shape[1], array.array)
        self._weights[value.slot] = array
        return value

    def input(self, name: str) -> Value:
        """An int input that `graph.run.fill_batch_inputs` fills for every batch, by its name."""
        at = Input(name, self._stretch)
        if at not in self._inputs:
            self._inputs[at] = self._slot(0)
        return self._inputs[at]

    def rows(self, table: Value, index: Value) -> Value:
        """The rows of `table` that an int input names."""
        weight = self._weights.get(table.slot)
        fmt, origin = (weight.fmt, weight.origin) if weight else (KvFormat.F32, "")
        return self._op("embed", table, index, width=table.width, fmt=fmt, origin=origin)

    def rms_norm(self, x: Value, weight: Value, eps: float) -> Value:
        """x / rms(x) * weight, row by row."""
        return self._op("rms_norm", x, weight, width=x.width, eps=eps)

    def head_norm(self, x: Value, weight: Value, eps: float) -> Value:
        """rms_norm of each head of x [n, n_head * d], weight [d]; rows [n * n_head, d]."""
        return self.rms_norm(self._reshape(x, self.heads.head_dim), weight, eps)

    def linear(self, weight: Weight, x: Value) -> Value:
        """x @ weight.T: `matvec` when decoding, `matmul` in prefill; numerics follow the kind."""
        op = "matvec" if self.params.kind == DECODE else "matmul"
        n_out, value = weight.shape[0], self.constant(weight)
        return self._op(op, value, x, width=n_out, fmt=weight.fmt, origin=weight.origin)

    def linears(
        self, stacked: Weight | tuple[Weight, ...], sizes: Sequence[int], x: Value
    ) -> tuple[Value, ...]:
        """x @ part.T for each part of `stacked`, `sizes` rows of it one after the other.

        Decode reads all parts in one launch and cuts the result; a row's bits are the same. Parts
        of different formats come as a tuple.
        """
        if isinstance(stacked, tuple):
            return tuple(self.linear(part, x) for part in stacked)
        ends = list(itertools.accumulate(sizes))
        parts = list(zip([0, *ends], ends, strict=False))
        if self.params.kind != DECODE:
            return tuple(self.linear(stacked.rows(first, end), x) for first, end in parts)
        rows = self.linear(stacked, x)
        return tuple(self._columns(rows, first, end) for first, end in parts)

    def add(self, x: Value, y: Value) -> Value:
        """x + y; y of the same shape, or one row."""
        return self._op("add", x, y, width=x.width)

    def scale(self, x: Value, factor: float) -> Value:
        """x * factor."""
        return self._op("scale", x, width=x.width, factor=factor)

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        return self._op("softcap", x, width=x.width, cap=cap)

    def silu_mul(self, gate: Value, up: Value) -> Value:
        """gate * sigmoid(gate) * up."""
        return self._op("silu_mul", gate, up, width=up.width)

    def gelu_mul(self, gate: Value, up: Value) -> Value:
        """gelu(gate) * up."""
        return self._op("gelu_mul", gate, up, width=up.width)

    def qkv_rope_store(
        self, layer: int, q: Value, k: Value, v: Value, *, cos: Value, sin: Value, pairing: str
    ) -> Value:
        """Rotate q and k by position, store k and v by cell; returns q as heads."""
        choice = self._choices.choose("qkv_rope_store", self._stretch)
        h, regions = self.heads, self._load(layer)
        inputs = (
            self._reshape(q, h.n_head, h.head_dim),
            self._reshape(k, h.n_head_kv, h.head_dim),
            self._reshape(v, h.n_head_kv, h.head_dim),
            regions.k,
            regions.v,
            self.input("positions"),
            self.input("cells"),
            cos,
            sin,
        )
        outputs = (self._slot(h.head_dim), self._slot(0), self._slot(0))
        scalars = {"fmt": self.params.kv_format, "pairing": pairing}
        self._append(choice, inputs, outputs, scalars, stores=layer)
        self._stored[layer] = outputs[1:]
        return outputs[0]

    def attention(self, layer: int, q: Value, scale: float) -> Value:
        """Attention of q over the cells of `layer` as stored above; rows [n, n_head * d]."""
        mode, width = self.params.windows[layer]
        choice = self._choices.choose(mode.op, self._stretch)
        self._block_m[self._stretch] = choice.block_m
        k, v = self._stored[layer]
        window = (self.input("positions"), self.input("window"), self.input("tiles"))
        out = self._slot(self.heads.head_dim)
        scalars = {"fmt": self.params.kv_format, "scale": scale, "width": width}
        self._append(choice, (q, k, v, *window), (out,), scalars)
        return self._reshape(out, self.heads.n_head * self.heads.head_dim)

    def finish(self, output: Value) -> Graph:
        """The graph that computes `output`."""
        return Graph(
            params=self.params,
            nodes=with_frees(self._nodes, output.slot, self._kept_slots()),
            slots=tuple(self._slots),
            inputs={at: value.slot for at, value in self._inputs.items()},
            regions=dict(self._regions),
            output=output.slot,
            n_vocab=self.n_vocab,
            block_m=tuple(self._block_m),
            receipts=tuple(self._choices.receipts()),
        )

    def _slot(self, width: int, value: Any = None) -> Value:
        self._slots.append(value)
        return Value(len(self._slots) - 1, width, self._stretch)

    def _here(self, x: Value) -> Value:
        """The value on the device of the current stretch; from another it crosses, once."""
        if x.stretch == self._stretch:
            return x
        key = x.slot, self._stretch
        if key not in self._crossed:
            there, here = (self.params.stretches[at].kernels for at in (x.stretch, self._stretch))
            self._crossed[key] = self._slot(x.width)
            slots = (x.slot,), (self._crossed[key].slot,)
            self._nodes.append(
                Node("cross", lambda rows: here.from_host(there.to_host(rows)), *slots, {})
            )
        return self._crossed[key]

    def _load(self, layer: int) -> LayerRegions:
        """The regions of a layer, stamped with the width of its cells (contract 3.2)."""
        if layer not in self._regions:
            words = cell_words(self.params.kv_format, self.heads.n_head_kv * self.heads.head_dim)
            self._regions[layer] = LayerRegions(self._slot(0), self._slot(0), words)
        return self._regions[layer]

    def _kept_slots(self) -> frozenset[int]:
        """Slots that outlive a run: constants, inputs and regions."""
        computed = {slot for node in self._nodes for slot in node.outputs}
        return frozenset(range(len(self._slots))) - computed

    def _op(
        self,
        op: str,
        *inputs: Value,
        width: int,
        fmt: KvFormat | None = None,
        origin: str = "",
        **scalars: Any,
    ) -> Value:
        """fmt, origin: of the matrix it reads, if it reads one."""
        out = self._slot(width)
        stored = {} if fmt is None else {"fmt": fmt}
        choice = self._choices.choose(op, self._stretch, fmt, origin)
        self._append(choice, inputs, (out,), {**scalars, **stored})
        return out

    def _reshape(self, x: Value, *shape: int) -> Value:
        return self._view("reshape", x, shape[-1], lambda rows: rows.reshape(-1, *shape))

    def _columns(self, x: Value, first: int, end: int) -> Value:
        return self._view("columns", x, end - first, lambda rows: rows[:, first:end])

    def _view(self, name: str, x: Value, width: int, view: Kernel) -> Value:
        x, out = self._here(x), self._slot(width)
        self._nodes.append(Node(name, view, (x.slot,), (out.slot,), {}))
        return out

    def _append(
        self,
        choice: Choice,
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        scalars: Mapping[str, Any],
        stores: int | None = None,
    ) -> None:
        self._nodes.append(
            Node(
                choice.variant.op,
                choice.launch,
                tuple(self._here(value).slot for value in inputs),
                tuple(value.slot for value in outputs),
                {**scalars, "config": choice.config},
                stores,
            )
        )
