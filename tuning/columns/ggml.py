"""The column of ggml and llama.cpp, in an interpreter that has llama-cpp-python."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuning.bench import inputs
from tuning.bench.cases import ELEMENT_BYTES, Attention, Case, Product, copies
from tuning.bench.protocol import Message
from tuning.columns.ggml_library import ALIGN, PREC_F32, Context, Graph, ggml
from tuning.columns.llama import do_requantize, model
from tuning.columns.subjects import Measure, Subject, finite, run_column

MASK_ROWS = 64  # flash_attn_ext wants this many rows of the mask at least


def attention(case: Case, how: Message) -> Subject:
    """ggml_flash_attn_ext with a causal mask, each KV head's rows one after the other."""
    assert isinstance(case, Attention)
    given, kind = inputs.attention_inputs(case), how["fmt"]
    k, v = (np.ascontiguousarray(rows.transpose(1, 0, 2)) for rows in (given.k, given.v))
    size = 2 * case.n_cells * case.row_bytes(kind)
    graphs = [
        attention_graph(case, kind, given.q, k, v, how["threads"])
        for _ in range(copies(case, size, how["rotate"]))
    ]
    graphs[0].run()
    out = Context.read(graphs[0].node, given.q.shape)
    return Subject(
        {"call": Measure([graph.run for graph in graphs])},
        finite(inputs.checked_attention(case, out), out),
        note="ggml_flash_attn_ext",
    )


def attention_graph(
    case: Attention, kind: str, q: Any, k: NDArray[Any], v: NDArray[Any], threads: int
) -> Graph:
    """The graph of one call with K and V [n_head_kv, n_cells, d] of its own."""
    lib = ggml()
    rows = max(case.n_q, MASK_ROWS)
    size = 8 * q.nbytes + 2 * k.size * ELEMENT_BYTES[kind] + 2 * rows * case.n_cells
    context = Context(int(size) + 16 * ALIGN + (1 << 20))
    mask = np.zeros((rows, case.n_cells), np.float32)
    if case.n_q > 1:
        seen = np.arange(case.n_cells) <= np.arange(case.n_q)[:, None] + case.n_cells - case.n_q
        mask[: case.n_q][~seen] = -np.inf
    node = lib.flash_attn_ext(
        context.pointer,
        context.put("f32", q.transpose(1, 0, 2)),
        context.put(kind, k),
        context.put(kind, v),
        context.put("f16", mask),
        case.head_dim**-0.5,
        0.0,
        0.0,
    )
    lib.flash_attn_ext_set_prec(node, PREC_F32)
    return Graph(context, node, threads)


def product(case: Case, how: Message) -> Subject:
    """ggml_mul_mat of a weight in `fmt` with float32 rows."""
    assert isinstance(case, Product)
    weight, x = inputs.product_inputs(case)
    kind, size = how["fmt"], case.weight_bytes(how["fmt"])

    def graph() -> Graph:
        rows = 4 * case.rows * (case.n_in + case.n_out)
        context = Context(int(size) + rows + 16 * ALIGN + (1 << 20))
        node = ggml().mul_mat(context.pointer, context.put(kind, weight), context.put("f32", x))
        return Graph(context, node, how["threads"])

    graphs = [graph() for _ in range(copies(case, size, how["rotate"]))]
    graphs[0].run()
    out = Context.read(graphs[0].node, (case.rows, case.n_out))
    return Subject(
        {"call": Measure([g.run for g in graphs])},
        finite(inputs.checked_product(out), out),
        note="ggml_mul_mat",
    )


def versions() -> dict[str, str]:
    """Versions of what is called; loads the library, so that its absence shows at once."""
    ggml()
    return {"llama-cpp-python": version("llama-cpp-python"), "numpy": np.__version__}


if __name__ == "__main__":
    run_column(
        {"attn": attention, "dense": product, "model": model},
        versions,
        {"requantize": do_requantize},
    )
