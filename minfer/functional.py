"""Kernels without a store: attention over regions of your own, and the q8_0 codec (contract 10)."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from minfer import registry
from minfer import window as windows
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import Int32, KvFormat, Region
from minfer.kv.checks import (
    checked_query,
    checked_scale,
    int32s,
    refuse_window,
    whole_number,
)
from minfer.ops import DECODE, PREFILL, Shape
from minfer.window import Causal, Runs, Span, Window, WindowMode


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

    q: float32 [n_q, n_head, d], on the host or the device; the result is an array of the device's
    kernels. k, v: regions of `n_head_kv` heads. fmt: checked against the
    regions where given. positions: int32 [n_q]; by default a query's window starts at position 0,
    and causal queries are the last ones of the region. scale: default 1 / sqrt(d). width: sliding
    width, 0 for none. variant: by name, or the default for the shape. threads: default the cores
    this process may use.
    """
    for name, region in (("k", k), ("v", v)):
        if not isinstance(region, Region):
            kind = type(region).__name__
            raise Refusal("10", f"{name} is a {kind}; give a minfer.Region", {"type": kind})
    device = Device.parse(device)
    kernels = device.package()
    q = checked_query(q, None, k.n_head_kv, k.head_dim, kernels)
    seen = _checked_window(window, len(q), kernels)
    _refuse_format(fmt, k)
    refuse_window(seen.mode, kernels, device.name)
    workers = {} if threads is None else {"threads": whole_number(threads, "threads", "10", low=1)}
    choice = registry.select(
        seen.mode.op,
        device=device,
        fmt=k.fmt,
        shape=Shape(kind, len(q), q.shape[1], k.n_head_kv, k.head_dim),
        variant=variant,
        config={**workers, **(config or {})},
    )
    at = _positions(seen, len(q), k.n_cells) if positions is None else positions
    at = int32s("positions", at, (len(q),), kernels)
    return choice.launch(
        q,
        k,
        v,
        at,
        seen.array,
        _tiles(seen, at, choice.block_m, decode=kind == DECODE),
        fmt=k.fmt,
        scale=checked_scale(scale, k.head_dim),
        width=whole_number(width, "sliding width", "2.4"),
        config=choice.config,
    )


def _checked_window(given: Window, n_q: int, kernels: ModuleType) -> Window:
    """The window with int32 rows, one a query; another size or kind of number is refused (2.2)."""
    if isinstance(given, Causal):
        return given
    if not isinstance(given, Span | Runs):
        kind = type(given).__name__
        raise Refusal("2.2", f"window is a {kind}; give Causal(), Span or Runs", {"type": kind})
    array = int32s("the window", given.array, np.shape(given.array), kernels)
    wrapped = windows.wrap(array, n_q)
    if wrapped.mode is not given.mode:
        raise Refusal(
            "2.2",
            f"a window of {given.mode.value} for {n_q} queries does not hold {array.size} numbers",
            {"mode": given.mode.value, "size": array.size, "n_q": n_q},
        )
    return wrapped


def _refuse_format(fmt: KvFormat | str | None, k: Region) -> None:
    if fmt is not None and KvFormat.parse(fmt) is not k.fmt:
        raise Refusal(
            "3.2",
            f"fmt is {fmt} and the regions hold {k.fmt}; leave fmt out or give that one",
            {"fmt": str(fmt), "region": k.fmt.value},
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


def _tiles(window: Window, positions: Int32, block_m: int, *, decode: bool) -> Int32:
    """Tiles of queries that grow one window by one key each; others stand alone."""
    if decode:
        return windows.tiles([1] * len(positions), 1, decode=True)
    groups: list[int] = []
    for query in range(len(positions)):
        if query and positions[query] == positions[query - 1] + 1 and _grows(window, query):
            groups[-1] += 1
        else:
            groups.append(1)
    return windows.tiles(groups, block_m)


def _grows(window: Window, query: int) -> bool:
    """Whether a query sees what the one before it sees, and one key more at the end."""
    if isinstance(window, Causal):
        return True
    before, here = window.array[query - 1], window.array[query]
    if window.mode is WindowMode.SPAN:
        return bool(here[0] == before[0] and here[1] == before[1] + 1)
    used = int(np.count_nonzero(before[:, 1]))
    same = here.copy()
    if used < len(here) and here[used, 1]:
        same[used] = 0
        return bool(here[used, 1] == 1 and (same == before).all())
    same[used - 1, 1] -= 1
    return bool((same == before).all())


def quantize(rows: Any, *, device: str | Device = "cpu") -> Any:
    """float32 rows [n, m] as canonical q8_0 cells, uint8 [n, cell_bytes] (contract 4.1).

    rows: on the host or the device; the result is an array of the device's kernels.
    """
    choice = registry.select("quantize_q8_0", device=device)
    return choice.launch(rows, config=choice.config)


def dequantize(cells: Any, n: int, *, device: str | Device = "cpu") -> Any:
    """The n values of each canonical q8_0 cell, float32 [n_cells, n], see `quantize`."""
    choice = registry.select("dequantize_q8_0", device=device)
    return choice.launch(cells, n=n, config=choice.config)
