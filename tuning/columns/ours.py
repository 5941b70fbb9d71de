"""The column of this project: the default variants of the CPU backend."""

from __future__ import annotations

from functools import partial
from typing import Any

from minfer import kernels_numba, registry
from minfer.format import Floats, KvFormat, Region
from minfer.ops import OPS, Shape
from minfer.window import tiles
from tuning.bench import inputs
from tuning.bench.cases import Attention, Case, Product, copies
from tuning.bench.protocol import Absent, Message
from tuning.columns import machine
from tuning.columns.ours_model import model
from tuning.columns.ours_session import session
from tuning.columns.regions import copy_of, filled
from tuning.columns.subjects import Measure, Subject, finite, run_column


def attention(case: Case, how: Message) -> Subject:
    """The default variant of `attn_window` over cells that hold the case's rows."""
    assert isinstance(case, Attention)
    fmt = KvFormat(how["fmt"])
    given = inputs.attention_inputs(case)
    shape = Shape(case.kind, case.n_q, case.n_head, case.n_head_kv, case.head_dim)
    choice = registry.select(
        "attn_window", fmt=fmt, shape=shape, config={"threads": how["threads"]}
    )
    cut = tiles([case.n_q], choice.block_m, decode=case.n_q == 1)
    scale = case.head_dim**-0.5

    def call(k: Region, v: Region) -> Floats:
        out: Floats = choice.launch(
            given.q, k, v, given.positions, None, cut,
            fmt=fmt, scale=scale, width=0, config=choice.config,
        )  # fmt: skip
        return out

    pair = filled(fmt, given.k), filled(fmt, given.v)
    n = copies(case, 2 * pair[0].arrays[0].nbytes, how["rotate"])
    sets = [pair, *((copy_of(pair[0]), copy_of(pair[1])) for _ in range(n - 1))]
    out = call(*pair)
    return Subject(
        {"call": Measure([partial(call, *pair) for pair in sets])},
        finite(inputs.checked_attention(case, out), out),
        note=f"{choice.variant.op}_{choice.variant.name}",
        facts={"query": choice.variant.numerics(fmt).query},
    )


def product(case: Case, how: Message) -> Subject:
    """The default variant of `matvec` or `matmul` in a weight format that it declares."""
    assert isinstance(case, Product)
    fmt, op = KvFormat(how["fmt"]), case.op
    by_format = "fmt" in OPS[op].keywords
    read = {f for v in registry.variants(op) for f in v.formats} if by_format else {KvFormat.F32}
    if fmt not in read:
        raise Absent(f"{op} reads {', '.join(sorted(f.value for f in read))} weights")
    choice = registry.select(op, fmt=fmt, config={"threads": how["threads"]})
    weight, x = inputs.product_inputs(case)
    stored = inputs.stored_weight(weight, fmt)
    keywords = {"fmt": fmt} if by_format else {}

    def call(weight: Any) -> Floats:
        out: Floats = choice.launch(weight, x, **keywords, config=choice.config)
        return out

    n = copies(case, stored.nbytes, how["rotate"])
    out = call(stored)
    return Subject(
        {"call": Measure([partial(call, stored.copy()) for _ in range(n)])},
        finite(inputs.checked_product(out), out),
        note=f"{op}_{choice.variant.name}",
        facts={"query": choice.variant.numerics(fmt).query if by_format else "f32"},
    )


def do_machine(request: Message) -> Message:
    """Rates of this machine, measured now."""
    return {"rates": machine.rates(request["threads"], request["read_bytes"])}


if __name__ == "__main__":
    run_column(
        {"attn": attention, "dense": product, "model": model, "session": session},
        kernels_numba.environment,
        {"machine": do_machine},
    )
