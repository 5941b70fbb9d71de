"""Argument checks: whole numbers that are no bools or floats, rows, scales, windows."""

from __future__ import annotations

import math
from numbers import Integral, Real
from types import ModuleType
from typing import Any

import numpy as np

from minfer import settings
from minfer.errors import Refusal
from minfer.format import Int32, word
from minfer.window import WindowMode

INT32_MAX = 2**31 - 1
THREADS_MAX = 1024  # kernels keep memory for every thread
SCALE_END = 2.0**127  # kernels multiply it by log2(e) and keep it as float32


def whole_number(
    value: object, name: str, rule: str, low: int = 0, high: int = INT32_MAX, way_out: str = ""
) -> int:
    """`value` as an int in [low, high]; numpy integers count, bools and floats are refused.

    name: what the message calls it. way_out: a sentence added to the message.
    """
    if type(value) is int and low <= value <= high:
        return value
    if not isinstance(value, Integral) or isinstance(value, bool):
        problem = f"is no whole number ({type(value).__name__})"
    elif not low <= int(value) <= high:
        problem = f"is below {low}" if int(value) < low else f"is above {high}"
    else:
        return int(value)
    tail = f"; {way_out}" if way_out else ""
    facts = {"name": name, "value": value, "low": low, "high": high}
    raise Refusal(rule, f"{name} {value!r} {problem}{tail}", facts)


def thread_count(value: object) -> int:
    """A number of workers."""
    return whole_number(value, "threads", "10", low=1, high=THREADS_MAX)


def sanitizes(value: object) -> bool:
    """Whether cells are sanitized; None asks MINFER_SANITIZE_CELLS, and "0" is no answer (5.10)."""
    if value is None:
        return settings.flag("MINFER_SANITIZE_CELLS")
    if not isinstance(value, bool | np.bool_):
        kind = type(value).__name__
        message = f"sanitize {value!r} is a {kind}; give True, False or None"
        raise Refusal("10", message, {"sanitize": repr(value), "type": kind})
    return bool(value)


def sequence_id(value: object) -> int:
    """A sequence id, the caller's own number in [0, 2^31 - 1] (contract 5.2)."""
    return whole_number(value, "sequence id", "5.2")


def unknown(seq: int) -> Refusal:
    """A sequence that holds no run."""
    message = f"sequence {seq} is unknown to the store; reserve cells for it first"
    return Refusal("2.5", message, {"seq": seq})


def int32s(name: str, array: Any, shape: tuple[int, ...], kernels: ModuleType) -> Int32:
    """Whole numbers as int32 of `shape` on the host, from there or of the backend's own arrays.

    Other dtypes, shapes and sizes of number are refused.
    """
    given = kernels.to_host(array) if isinstance(array, kernels.array_type()) else np.asarray(array)
    if given.dtype.kind not in "iu" or given.shape != shape:
        raise Refusal(
            "10",
            f"{name} holds {given.dtype} {list(given.shape)}; give int32 {list(shape)}",
            {"name": name, "dtype": str(given.dtype), "shape": given.shape, "wanted": shape},
        )
    kept: Int32 = given.astype(np.int32, copy=False)
    if given.dtype != np.int32 and (kept != given).any():
        value = int(given[kept != given][0])
        message = f"{name} holds {value}, which is no int32"
        raise Refusal("10", message, {"name": name, "value": value})
    return kept


def checked_rows(name: str, array: Any, shape: tuple[int, ...], kernels: ModuleType) -> Any:
    """float32 of `shape` as an array of the backend; refused as by `refuse_rows`."""
    refuse_rows(name, array, shape, kernels)
    if isinstance(array, np.ndarray):
        return kernels.from_host(np.ascontiguousarray(array))
    return array


def refuse_rows(name: str, array: Any, shape: tuple[int, ...], kernels: ModuleType) -> None:
    """Refuse what is not float32 of `shape`, of numpy or of the backend's own (4.2, 10)."""
    own = kernels.array_type()
    if not isinstance(array, (np.ndarray, own)):
        kind, wanted = type(array).__name__, "a numpy array"
        if own is not np.ndarray:
            wanted += f" or a {own.__module__}.{own.__name__}"
        raise Refusal("10", f"{name} is a {kind}; give {wanted}", {"name": name, "type": kind})
    dtype, given = word(array.dtype), tuple(array.shape)
    if dtype != "float32":
        raise Refusal(
            "4.2",
            f"{name} holds {dtype}; rows reach the store as float32, convert them first",
            {"name": name, "dtype": dtype},
        )
    if given != shape:
        raise Refusal(
            "10",
            f"{name} has shape {list(given)}; wanted is {list(shape)}",
            {"name": name, "shape": given, "wanted": shape},
        )


def checked_query(
    q: Any, n_q: int | None, n_head_kv: int, head_dim: int, kernels: ModuleType
) -> Any:
    """Queries float32 [n_q, n_head, head_dim], n_head a multiple of n_head_kv (2.8).

    As an array of the backend, see `checked_rows`. n_q: None takes as many as there are.
    """
    n_rows, n_head = 1, n_head_kv
    if getattr(q, "ndim", 0) == 3:
        n_rows, n_head = q.shape[:2]
    wanted = (n_rows if n_q is None else n_q, n_head, head_dim)
    rows = checked_rows("q", q, wanted, kernels)
    if not n_head or n_head % n_head_kv:
        raise Refusal(
            "2.8",
            f"q has {n_head} heads, no multiple of {n_head_kv} KV heads",
            {"n_head": n_head, "n_head_kv": n_head_kv},
        )
    return rows


def checked_scale(scale: object, head_dim: int) -> float:
    """`scale`, or its default 1 / sqrt(head_dim); one that is not finite is refused."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    real = isinstance(scale, Real) and not isinstance(scale, bool)
    if not real or not abs(scale) < SCALE_END:  # type: ignore[arg-type]
        raise Refusal("10", f"scale {scale!r} is no finite float32", {"scale": scale})
    return float(scale)  # type: ignore[arg-type]


def refuse_window(mode: WindowMode, kernels: ModuleType, device: str) -> None:
    """Refuse a window that is not causal where the kernels of `device` read none (2.6)."""
    if mode is not WindowMode.CAUSAL and not kernels.SUPPORTS_ATTN_SPAN:
        raise Refusal(
            "2.6",
            f"the kernels of device {device} read causal windows only and this one is "
            f"{mode.value}; run one sequence at a time, from cell 0 and without a shared prefix",
            {"mode": mode.value, "device": device},
        )
