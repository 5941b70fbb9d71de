"""The column of this project: the default variants of the CPU backend."""

from __future__ import annotations

from functools import partial
from typing import Any

from minfer import kernels_numba, reference, registry
from minfer.format import Floats, KvFormat, Region, cell_bytes
from minfer.memory import zeroed
from minfer.ops import Shape
from minfer.window import tiles
from tuning.bench import inputs
from tuning.bench.cases import Attention, Case, Product, copies
from tuning.bench.protocol import Absent, Message
from tuning.columns import machine
from tuning.columns.ours_file import file
from tuning.columns.ours_model import model
from tuning.columns.ours_session import session
from tuning.columns.ours_store import store
from tuning.columns.ours_tables import tables
from tuning.columns.regions import pairs
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

    size = len(given.k) * cell_bytes(fmt, case.n_head_kv * case.head_dim)
    sets = pairs(fmt, given.k, given.v, copies(case, 2 * size, how["rotate"]))
    out = call(*sets[0])
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
    read = {f for v in registry.variants(op) for f in v.formats}
    if fmt not in read:
        raise Absent(f"{op} reads {', '.join(sorted(f.value for f in read))} weights")
    choice = registry.select(op, fmt=fmt, config={"threads": how["threads"]})
    weight, x = inputs.product_inputs(case)
    stored = reference.encode_weight(weight, fmt)

    def call(weight: Any) -> Floats:
        out: Floats = choice.launch(weight, x, fmt=fmt, config=choice.config)
        return out

    areas = zeroed([stored.nbytes] * copies(case, stored.nbytes, how["rotate"]))
    weights = [area.view(stored.dtype).reshape(stored.shape) for area in areas]
    for weight in weights:
        weight[:] = stored
    out = call(stored)
    return Subject(
        {"call": Measure([partial(call, weight) for weight in weights])},
        finite(inputs.checked_product(out), out),
        note=f"{op}_{choice.variant.name}",
        facts={"query": choice.variant.numerics(fmt).query},
    )


def do_machine(request: Message) -> Message:
    """Rates of this machine, measured now."""
    return {"rates": machine.rates(request["threads"], request["read_bytes"])}


if __name__ == "__main__":
    run_column(
        {
            "attn": attention,
            "dense": product,
            "model": model,
            "session": session,
            "store": store,
            "file": file,
            "tables": tables,
        },
        kernels_numba.environment,
        {"machine": do_machine},
    )
