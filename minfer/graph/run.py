"""Filling a graph's inputs from a planned step, and running it (contract 7.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minfer import window
from minfer.errors import Refusal
from minfer.format import Int32, KvFormat, Region
from minfer.graph.nodes import Graph, Input, LayerRegions, Node
from minfer.kv.batch import Batch
from minfer.kv.checks import whole_number
from minfer.kv.inputs import StepInputs
from minfer.kv.sanitizer import Attended
from minfer.kv.step import Step
from minfer.ops import DECODE
from minfer.registry import ATTENTION


def fill_batch_inputs(
    graph: Graph,
    planned: StepInputs,
    tokens: Sequence[int],
    out_rows: Sequence[int],
    n_ctx: int,
) -> dict[Input, Any]:
    """The int inputs of one batch on the host, every bound checked before anything runs.

    tokens: one id a row of the batch. out_rows: the rows whose logits are wanted. n_ctx: number of
    cells. Refuses ids outside the vocabulary, cells or windows outside the arena, tiles or output
    rows outside the batch, and a batch of another size than the graph was built for.
    """
    p = graph.params
    arrays: dict[str, Any] = {
        "tokens": np.asarray(tokens, dtype=np.int32),
        "positions": planned.positions,
        "cells": planned.cells,
        "window": planned.window,
        "out_rows": np.asarray(out_rows, dtype=np.int32),
    }
    for name, want in (
        ("tokens", p.n_tokens),
        ("positions", p.n_tokens),
        ("cells", p.n_tokens),
        ("out_rows", p.n_out),
    ):
        if arrays[name].shape != (want,):
            raise Refusal(
                "7.5",
                f"{name} has shape {arrays[name].shape}, the graph takes ({want},)",
                {"input": name, "have": arrays[name].shape, "want": (want,)},
            )
    _check_bound("tokens", arrays["tokens"], graph.n_vocab, "the vocabulary")
    _check_bound("cells", arrays["cells"], n_ctx, "the arena")
    _check_bound("out_rows", arrays["out_rows"], p.n_tokens, "the batch")
    wrapped = window.wrap(planned.window, p.n_tokens)
    if not p.modes <= {wrapped.mode}:
        built = [mode.value for mode, _ in p.windows]
        raise Refusal(
            "7.5",
            f"the window is {wrapped.mode.value}, the graph was built otherwise",
            {"window": wrapped.mode.value, "built": built},
        )
    window.check(wrapped, planned.positions, n_ctx)
    cuts = [planned.cut(block_m) for block_m in graph.block_m]
    for tiles in cuts:
        _check_tiles(tiles, p.n_tokens)
    return {at: cuts[at.stretch] if at.name == "tiles" else arrays[at.name] for at in graph.inputs}


def output_rows(batch: Batch, n_out: int) -> list[int]:
    """Rows of the batch whose logits are wanted (contract 7.3)."""
    n, groups = len(batch.positions), batch.groups
    n_out = whole_number(n_out, "n_out", "7.3", low=1)
    if batch.kind == DECODE:
        return list(range(n))
    if len(groups) > 1:
        if n_out != 1:
            raise Refusal(
                "7.3",
                f"n_out {n_out} with {len(groups)} sequences; several give one last row each",
                {"n_out": n_out, "groups": len(groups)},
            )
        return [group.row + group.n - 1 for group in groups]
    whole_number(n_out, "n_out", "7.3", low=1, high=n, way_out=f"the batch has {n} tokens")
    return list(range(n - n_out, n))


def _check_bound(name: str, values: Int32, end: int, of: str) -> None:
    bad = (values < 0) | (values >= end)
    if bad.any():
        row = int(np.argmax(bad))
        raise Refusal(
            "7.5",
            f"{name}[{row}] is {int(values[row])}, outside {of} [0, {end})",
            {"input": name, "row": row, "value": int(values[row]), "end": end},
        )


def _check_tiles(tiles: Int32, n_tokens: int) -> None:
    """Tiles cut the batch into consecutive pieces; rows after the last one are zero."""
    rows, end = tiles.tolist(), 0
    for first, count in rows:
        cuts = first == end and count > 0
        if not cuts and (first or count or end < n_tokens):
            break
        end += count
    else:
        if end == n_tokens:
            return
    raise Refusal(
        "7.5",
        f"tiles {rows} do not cut {n_tokens} queries in order",
        {"tiles": rows, "n_tokens": n_tokens},
    )


def execute(graph: Graph, inputs: Mapping[Input, Any], step: Step) -> Any:
    """Run the nodes in order; returns the output rows, float32 [n_out, n_vocab].

    inputs: what `fill_batch_inputs` gave, on the host or on the device of each one's stretch.
    """
    slots = bind(graph, inputs, step)
    for node in graph.nodes:
        result = _launch(node, slots)
        if node.stores is not None:
            step.stored(node.stores, *result[1:])
        if step.sanitizes and node.op in ATTENTION:
            step.check(_attended(graph, node, slots), result)
        _free(node, slots)
    return slots[graph.output]


def launch_all(graph: Graph, bound: Sequence[Any]) -> Any:
    """The launches of `execute` alone, for a recorder: a step is told of no stored row."""
    slots = list(bound)
    for node in graph.nodes:
        _launch(node, slots)
        _free(node, slots)
    return slots[graph.output]


def bind(graph: Graph, inputs: Mapping[Input, Any], step: Step) -> list[Any]:
    """The table of values with inputs and regions in their slots."""
    slots = list(graph.slots)
    for at, slot in graph.inputs.items():
        slots[slot] = inputs[at]
    for layer, where in graph.regions.items():
        k, v = step.region(layer)
        for region in (k, v):
            _check_region(layer, region, graph.params.kv_format, where)
        slots[where.k.slot], slots[where.v.slot] = k, v
    return slots


def _launch(node: Node, slots: list[Any]) -> Any:
    """Put what a node computes into its slots; returns it."""
    result = node.launch(*[slots[i] for i in node.inputs], **node.scalars)
    values = (result,) if node.stores is None else result
    for slot, value in zip(node.outputs, values, strict=True):
        slots[slot] = value
    return result


def _free(node: Node, slots: list[Any]) -> None:
    for slot in node.frees:
        slots[slot] = None


def _attended(graph: Graph, node: Node, slots: Sequence[Any]) -> Attended:
    """The attention of `node`; its layer is that of the node that stored the cells it reads."""
    q, k, v, *windows = [slots[i] for i in node.inputs]
    layers = {at: n.stores for n in graph.nodes if n.stores is not None for at in n.outputs}
    layer = layers[node.inputs[1]]
    (device,) = (s.device.name for s in graph.params.stretches if layer in s.layers)
    return Attended(
        layer=layer,
        q=q,
        width=node.scalars["width"],
        receipt=next(r for r in graph.receipts if (r.op, r.device) == (node.op, device)),
        regions=(k, v),
        launch=lambda k, v: node.launch(q, k, v, *windows, **node.scalars),
    )


def _check_region(layer: int, region: Region, fmt: KvFormat, where: LayerRegions) -> None:
    """A graph built for one format and cell width never runs on another (contract 3.2)."""
    if region.fmt is not fmt or region.row_words != where.row_words:
        raise Refusal(
            "3.2",
            f"layer {layer} holds {region.fmt} cells of {region.row_words} words and the graph "
            f"was built for {fmt} cells of {where.row_words}",
            {
                "layer": layer,
                "have": (region.fmt.value, region.row_words),
                "want": (fmt.value, where.row_words),
            },
        )
