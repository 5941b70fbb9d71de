"""The columns of this project on a GPU: `tuning.columns.ours_cuda [RUNS | no-replay | f16]`.

RUNS: how many runs of cells each sequence lies in, 1 unless said. no-replay: whole models whose
launches are made one by one. f16: whole models with activations rounded to f16 for products.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from minfer import kernels_triton, reference, registry
from minfer.format import KvFormat, Region, cell_bytes
from minfer.ops import Shape
from minfer.window import tiles
from tuning.bench import inputs
from tuning.bench.batches import Batch, cells_of, placed, window_of
from tuning.bench.cases import Case, Product, copies
from tuning.bench.prompts import GPU_CHUNK
from tuning.bench.protocol import Absent, Message
from tuning.columns import machine_cuda
from tuning.columns.ours_model import model
from tuning.columns.replay import inputs_of, picked_of, run_gpu_column, subject
from tuning.columns.subjects import Prepare, Subject

on_gpu = kernels_triton.from_host


def attention(case: Case, how: Message, *, n_runs: int) -> Subject:
    """The default variant of `attn_window`, or of `attn_map` where a sequence has several runs."""
    assert isinstance(case, Batch)
    if n_runs > 1 and not case.torn:
        raise Absent("rows lie in one run")
    fmt = KvFormat(how["fmt"])
    n_q, scale = case.batch * case.n_q, case.head_dim**-0.5
    shape = Shape(case.kind, n_q, case.n_head, case.n_head_kv, case.head_dim)
    op = "attn_window" if n_runs == 1 else "attn_map"
    choice = registry.select(op, device="cuda", fmt=fmt, shape=shape)
    spans = placed(case, n_runs)
    cuts = tiles([case.n_q] * case.batch, choice.block_m, decode=case.n_q == 1)
    given = [on_gpu(array) for array in (case.positions, window_of(case, spans), cuts)]
    q, k, v = inputs_of(case)
    size = 2 * len(k) * cell_bytes(fmt, case.n_head_kv * case.head_dim)
    n_sets = copies(case, size, how["rotate"])
    sets = [[stored(fmt, rows, cells_of(spans)) for rows in (k, v)] for _ in range(n_sets)]

    def call(k: Region, v: Region) -> Any:
        return choice.launch(
            q, k, v, *given,
            fmt=fmt, scale=scale, width=0, config=choice.config,
        )  # fmt: skip

    return subject(
        [partial(call, *pair) for pair in sets],
        picked_of(case),
        note=f"{choice.variant.op}_{choice.variant.name}",
    )


def stored(fmt: KvFormat, rows: Any, cells: Any) -> Region:
    """A region with the rows [n, n_head_kv, d] in the cells."""
    store = registry.select("store_cells", device="cuda", fmt=fmt)
    region = kernels_triton.empty_region(fmt, len(rows), *rows.shape[1:])
    made: Region = store.launch(region, rows, cells, fmt=fmt, config=store.config)
    return made


def product(case: Case, how: Message) -> Subject:
    """The default variant of `matvec` or `matmul`."""
    assert isinstance(case, Product)
    fmt = KvFormat(how["fmt"])
    choice = registry.select(case.op, device="cuda", fmt=fmt)
    weight, x = inputs.product_inputs(case)
    stored = on_gpu(reference.encode_weight(weight, fmt))
    rows = on_gpu(x)
    n = copies(case, stored.nbytes, how["rotate"])
    weights = [stored, *(stored.clone() for _ in range(n - 1))]

    def call(weight: Any) -> Any:
        return choice.launch(weight, rows, fmt=fmt, config=choice.config)

    return subject(
        [partial(call, weight) for weight in weights],
        inputs.picked_rows,
        note=f"{case.op}_{choice.variant.name}",
        facts={"query": choice.variant.numerics(fmt).query},
    )


def do_machine(request: Message) -> Message:
    """Rates of this machine, measured now."""
    return {"rates": machine_cuda.rates(request["read_bytes"])}


MODELS: dict[str, dict[str, Any]] = {
    "1": {},
    "no-replay": {"replay": False},
    "f16": {"activations": "f16"},
}

if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else "1"
    prepare: dict[str, Prepare] = {}
    if asked in MODELS:
        prepare["model"] = partial(model, chunk=GPU_CHUNK, device="cuda", **MODELS[asked])
    if asked.isdigit():
        prepare["batch"] = partial(attention, n_runs=int(asked))
    if asked == "1":
        prepare["dense"] = product
    run_gpu_column(prepare, kernels_triton.environment, {"machine": do_machine})
