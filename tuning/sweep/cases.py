"""The timed cases of each op on each device, by name, and cases of any other size.

What is timed here decides. Tuned against untuned is measured by other sizes, which are held out:
no list may take up a shape of that comparison.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product

from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops import OPS
from tuning.sweep import products
from tuning.sweep.attention import Attention
from tuning.sweep.cells import OfCells
from tuning.sweep.configuration import Question
from tuning.sweep.problem import Case
from tuning.sweep.rowwise import Rowwise
from tuning.sweep.sized import Sized

Lists = Mapping[str, tuple[str, ...]]
TABLES: tuple[type[Sized], ...] = (Rowwise, OfCells)
LLAMA, SMOLLM, NARROW = "h32/8-d128", "h9/3-d64", "h32/8-d64"
EXAMPLES = {
    "attn_window": f"decode-16x8192-{LLAMA}",
    "attn_map": f"decode-16x8192-{LLAMA}-r4",
    "matvec": "4096x14336-r1",
    "matmul": "4096x14336-r512",
    **{op: entry.form.example for table in TABLES for op, entry in table.table.items()},
}
NEAR = 3  # names that a refusal lists


def _named(*parts: Sequence[str]) -> tuple[str, ...]:
    """Every combination of parts, joined."""
    return tuple("-".join(chosen) for chosen in product(*parts))


def _in_runs(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}-r4" for name in names)


ON_CPU = (
    *_named(["decode"], ["1x512", "1x4096", "4x2048"], [LLAMA]),
    *_named(["decode"], ["1x512", "1x4096"], [SMOLLM]),
    *_named(["prefill"], ["1x512", "1x2048q512"], [LLAMA, SMOLLM]),
)
ON_CUDA = (
    *_named(["decode"], ["1x4096", "16x4096", "64x2048"], [LLAMA]),
    *_named(["decode"], ["1x4096", "16x8192"], [SMOLLM]),
    *_named(["decode"], ["16x4096"], [NARROW]),
    *_named(["prefill"], ["1x2048", "1x8192q2048"], [LLAMA, SMOLLM]),
)
WEIGHTS = ["4096x4096", "4096x14336", "576x1536"]
ROWS, FEW = ["r1", "r512"], ["1", "512"]
WIDTHS, GATES = ["w576", "w4096"], ["w1536", "w14336"]
KV_HEADS = ["h3-d64", "h8-d128"]
STEPS: Lists = {
    "matvec": _named(WEIGHTS, ["r1"]),
    "matmul": _named(WEIGHTS, ["r512"]),
    "rms_norm": _named(ROWS, WIDTHS),
    "silu_mul": _named(ROWS, GATES),
    "gelu_mul": _named(ROWS, GATES),
    "add": _named(["r1", "r4", "r512"], WIDTHS),
    "scale": _named(ROWS, WIDTHS),
    "softcap": ("r1-w256000", "r16-w256000", "r512-w4096"),
    "rope": _named(ROWS, ["h9-d64", "h32-d128"]),
    "embed": _named(ROWS, ["w576-v49152", "w2048-v32000"]),
    "store_cells": _named(FEW, KV_HEADS),
    "qkv_rope_store": _named(FEW, [SMOLLM, LLAMA]),
    "map_q8_0_cells": _named(["512", "4096"], KV_HEADS),
    "move_cells": _named(["1x4096", "64x64"], KV_HEADS),
    "quantize_q8_0": _named(ROWS, WIDTHS),
    "dequantize_q8_0": _named(ROWS, WIDTHS),
    "dot_q8_0": _named(ROWS, WIDTHS),
}
CPU: Lists = {"attn_window": ON_CPU, "attn_map": _in_runs(ON_CPU), **STEPS}
CUDA: Lists = {"attn_window": ON_CUDA, "attn_map": _in_runs(ON_CUDA), **STEPS}
TIMED: Mapping[str, Lists] = {"cpu": CPU, "metal": CPU, "cuda": CUDA}
# Never timed by a sweep: other lengths, batches and heads.
HELD_OUT = (
    *_named(["decode"], ["1x1500", "3x700"], [LLAMA, "h24/8-d128", SMOLLM, "h14/2-d64"]),
    *_named(["prefill"], ["1x384", "1x1500q300"], [LLAMA, "h24/8-d128", SMOLLM]),
)
HELD_OUT_ON_CUDA = (
    *_named(["decode"], ["1x1500", "8x3000", "40x3000"], [LLAMA, "h24/8-d128", SMOLLM]),
    *_named(["prefill"], ["1x384", "1x1500", "1x12000q1000"], [LLAMA, "h24/8-d128", SMOLLM]),
)
HELD_OUT_WEIGHTS = ["3072x8192", "2048x2048"]
HELD_OUT_STEPS: Lists = {
    "matvec": _named(HELD_OUT_WEIGHTS, ["r1"]),
    "matmul": _named(HELD_OUT_WEIGHTS, ["r200"]),
    "add": _named(["r3", "r200"], ["w896", "w3072"]),
}


def held_out(op: str, device: str) -> tuple[str, ...]:
    """Cases that no sweep times by itself; none of an op for which nobody thought of any."""
    attention = HELD_OUT_ON_CUDA if Device.parse(device).name == "cuda" else HELD_OUT
    both = {"attn_window": attention, "attn_map": _in_runs(attention)}
    return {**HELD_OUT_STEPS, **both}.get(op, ())


def names(op: str, device: str) -> tuple[str, ...]:
    """The listed cases of an op on a device; refuses an op or device that there is not."""
    if op not in OPS:
        raise Refusal("0.3", f"op {op!r} is none of {', '.join(OPS)}", {"op": op})
    return TIMED[Device.parse(device).name][op]


def parse(op: str, name: str) -> Case | None:
    """The case of that name, listed or not; None if the op has no such names."""
    if op in ("attn_window", "attn_map"):
        case = Attention.parse(name)
        return case if case is not None and case.op == op else None
    if op in ("matvec", "matmul"):
        return products.parse(op, name)
    (table,) = (table for table in TABLES if op in table.table)
    return table.parse(op, name)


def case_named(op: str, name: str) -> Case:
    """The case of that name; refuses a name that says none."""
    if (case := parse(op, name)) is None:
        raise _unknown(op, name, ())
    return case


def cases_of(
    op: str,
    device: str,
    pattern: str | None,
    fmt: KvFormat | None,
    listed: Sequence[str] | None = None,
) -> list[Case]:
    """The listed cases that a glob names, or the one case of an exact name, listed or not.

    pattern: None for all. fmt: None where the op has no formats; cases that do not fit it are left
    out. listed: None for those of `names`. Refuses a pattern that names nothing, and rows that are
    never whole blocks.
    """
    listed = names(op, device) if listed is None else listed
    one = None if pattern is None else parse(op, pattern)
    chosen = [name for name in listed if pattern is None or fnmatchcase(name, pattern)]
    found = [one] if one else [case_named(op, name) for name in chosen]
    if not found:
        raise _unknown(op, pattern or "", listed)
    fitting = [case for case in found if case.fits(fmt or KvFormat.F32)]
    if not fitting:
        what = f"no case of {op} fits q8_0, whose rows are whole blocks of 32: "
        raise Refusal("3.3", what + ", ".join(case.name for case in found), {"op": op})
    return fitting


def questions(
    op: str, device: str, device_kind: str, fmt: str | KvFormat, cases: Sequence[Case]
) -> dict[Question, list[Case]]:
    """Cases by the question that they answer. fmt: of no account where the op has no formats."""
    stored = str(fmt) if OPS[op].formats else ""
    found: dict[Question, list[Case]] = {}
    for case in cases:
        sizes = (case.shape.kind, case.head_dim)
        found.setdefault(Question(op, device, device_kind, stored, *sizes), []).append(case)
    return found


def _unknown(op: str, name: str, listed: Sequence[str]) -> Refusal:
    near = difflib.get_close_matches(name, listed, NEAR, cutoff=0) or list(listed[:NEAR])
    message = f"{name!r} names no case of {op}; a name reads like {EXAMPLES[op]}"
    if near:
        message += f", and near it are listed {', '.join(near)}"
    return Refusal("10", message, {"op": op, "case": name, "near": near})
