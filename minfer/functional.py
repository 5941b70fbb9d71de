"""Kernels without a store: attention over regions of your own, and the q8_0 codec (contract 10)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer import registry, window
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat, Region
from minfer.ops import DECODE, PREFILL, Shape
from minfer.registry import Choice
from minfer.window import Causal, Int32, Window, WindowMode


def attention(
    q: Any,
    k: Region,
    v: Region,
    window: Window,
    *,
    fmt: KvFormat | str | None = None,
    positions: Int32 | None = None,
    kind: str = PREFILL,
    scale: float | None = None,
    width: int = 0,
    variant: str | None = None,
    device: str | Device = "cpu",
    threads: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """softmax(scale * q k^T) v over the cells that `window` names; float32 [n_q, n_head, d].

    q: float32 [n_q, n_head, d]. k, v: regions of `n_head_kv` heads. fmt: checked against the
    regions where given. positions: int32 [n_q]; by default a query's window starts at position 0,
    and causal queries are the last ones of the region. scale: default 1 / sqrt(d). width: sliding
    width, 0 for none. variant: by name, or the default for the shape.
    """
    choice = _choose(q, k, fmt, window.mode, kind, variant, device, threads, config)
    at = _positions(window, len(q), k.n_cells) if positions is None else positions
    at = np.asarray(at, dtype=np.int32)
    block_m = int(choice.config.get("block_m", 1))
    tiles = _tiles(window, at, block_m, decode=kind == DECODE)
    return choice.launch(
        q,
        k,
        v,
        at,
        window.array,
        tiles,
        fmt=k.fmt,
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        width=width,
        config=choice.config,
    )


def _choose(
    q: Any,
    k: Region,
    fmt: KvFormat | str | None,
    mode: WindowMode,
    kind: str,
    variant: str | None,
    device: str | Device,
    threads: int | None,
    config: Mapping[str, Any] | None,
) -> Choice:
    if q.ndim != 3 or q.shape[2] != k.head_dim:
        raise Refusal(
            "10",
            f"q has shape {tuple(q.shape)}; the regions want [n_q, n_head, {k.head_dim}]",
            {"q": tuple(q.shape), "head_dim": k.head_dim},
        )
    wanted = KvFormat.parse(fmt) if isinstance(fmt, str) else fmt
    if wanted not in (None, k.fmt):
        raise Refusal(
            "3.2",
            f"fmt is {wanted} and the regions hold {k.fmt}; leave fmt out or give that one",
            {"fmt": str(wanted), "region": k.fmt.value},
        )
    shape = Shape(kind, len(q), q.shape[1], k.n_head_kv, k.head_dim)
    workers = threads if threads is not None else len(os.sched_getaffinity(0))
    return registry.select(
        mode.op,
        device=device,
        fmt=k.fmt,
        shape=shape,
        variant=variant,
        config={"threads": workers, **(config or {})},
    )


def _positions(window: Window, n_q: int, n_cells: int) -> Int32:
    """Positions of queries whose windows start at position 0."""
    if isinstance(window, Causal):
        return np.arange(n_cells - n_q, n_cells, dtype=np.int32)
    if window.mode is WindowMode.SPAN:
        seen = window.array[:, 1] - window.array[:, 0]
    else:
        seen = window.array[..., 1].sum(axis=1)
    return (seen - 1).astype(np.int32)


def _tiles(window_: Window, positions: Int32, block_m: int, *, decode: bool) -> Int32:
    """Tiles of queries that grow one window by one key each; others stand alone."""
    if decode:
        return window.tiles([1] * len(positions), 1, decode=True)
    groups: list[int] = []
    for query in range(len(positions)):
        if query and positions[query] == positions[query - 1] + 1 and _grows(window_, query):
            groups[-1] += 1
        else:
            groups.append(1)
    return window.tiles(groups, block_m)


def _grows(window_: Window, query: int) -> bool:
    """Whether a query sees what the one before it sees, and one key more at the end."""
    if isinstance(window_, Causal):
        return True
    before, here = window_.array[query - 1], window_.array[query]
    if window_.mode is WindowMode.SPAN:
        return bool(here[0] == before[0] and here[1] == before[1] + 1)
    used = int(np.count_nonzero(before[:, 1]))
    same = here.copy()
    if used < len(here) and here[used, 1]:
        same[used] = 0
        return bool(here[used, 1] == 1 and (same == before).all())
    same[used - 1, 1] -= 1
    return bool((same == before).all())


def quantize(rows: Any, *, device: str | Device = "cpu") -> NDArray[np.uint8]:
    """float32 rows [n, m] as canonical q8_0 cells, uint8 [n, 4 * cell_words] (contract 4.1)."""
    choice = registry.select("quantize_q8_0", device=device)
    result: NDArray[np.uint8] = choice.launch(rows, config=choice.config)
    return result


def dequantize(cells: Any, n: int, *, device: str | Device = "cpu") -> NDArray[np.float32]:
    """The n values of each canonical q8_0 cell, float32 [n_cells, n]."""
    choice = registry.select("dequantize_q8_0", device=device)
    result: NDArray[np.float32] = choice.launch(cells, n=n, config=choice.config)
    return result
