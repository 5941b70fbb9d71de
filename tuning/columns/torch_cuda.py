"""Columns of torch on a GPU: `python -m tuning.columns.torch_cuda cudnn | fa2 | flex | linear`.

cudnn, fa2: scaled_dot_product_attention by that library. flex: FlexAttention, compiled for each
shape with its own tiles, prefill only. linear: torch.nn.functional.linear, one row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from tuning.bench import inputs
from tuning.bench.batches import Batch
from tuning.bench.cases import Case, Product, copies
from tuning.bench.protocol import Absent, Message
from tuning.columns.replay import (
    DEVICE,
    Pick,
    inputs_of,
    picked_of,
    refuse_format,
    run_gpu_column,
    subject,
    versions,
)
from tuning.columns.subjects import Subject

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
DTYPES = {"f32": torch.float32, "f16": torch.float16}


def by_head(case: Batch, rows: Any) -> Any:
    """[batch * n, heads, d] as [batch, heads, n, d]."""
    return rows.unflatten(0, (case.batch, -1)).transpose(1, 2).contiguous()


def by_position(case: Batch) -> Pick:
    """The checked part of [batch, n_head, n_q, d]."""
    pick = picked_of(case)
    return lambda out: pick(out.transpose(1, 2))


def attention(case: Case, how: Message, *, attend: Callable[[Batch], Any], name: str) -> Subject:
    """attend: gives, for a case, what is called with q, k and v by head."""
    assert isinstance(case, Batch)
    refuse_format(how["fmt"], ["f16"])
    call = attend(case)
    q, k, v = (by_head(case, rows) for rows in inputs_of(case, torch.float16))
    n = copies(case, 2 * k.nbytes, how["rotate"])
    sets = [(k, v), *((k.clone(), v.clone()) for _ in range(n - 1))]
    return subject([partial(call, q, *pair) for pair in sets], by_position(case), name)


def sdpa(case: Batch, *, backend: Any) -> Any:
    """One query sees all its keys; more are causal and as many as keys."""
    causal, grouped = case.n_q > 1, case.n_head != case.n_head_kv

    def call(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return call


def flex(case: Batch) -> Any:
    """Compiled for this shape alone."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.n_q == 1:
        raise Absent("compiled for prefill alone")
    torch._dynamo.reset()
    seen = create_block_mask(
        lambda _b, _h, query, key: query >= key, None, None, case.n_q, case.n_cells, device=DEVICE
    )
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=seen, enable_gqa=case.n_head != case.n_head_kv)


def product(case: Case, how: Message) -> Subject:
    """torch.nn.functional.linear, rows and weights in one type."""
    assert isinstance(case, Product)
    refuse_format(how["fmt"], list(DTYPES))
    given = inputs.product_inputs(case)
    weight, x = (torch.from_numpy(a).to(DEVICE, DTYPES[how["fmt"]]) for a in given)
    n = copies(case, weight.nbytes, how["rotate"])
    weights = [weight, *(weight.clone() for _ in range(n - 1))]
    calls = [partial(linear, x, each) for each in weights]
    return subject(calls, inputs.picked_rows, "linear")


if __name__ == "__main__":
    asked = sys.argv[1]
    if asked == "linear":
        prepare: Any = {"dense": product}
    else:
        attend = flex if asked == "flex" else partial(sdpa, backend=BACKENDS[asked])
        prepare = {"batch": partial(attention, attend=attend, name=asked)}
    run_gpu_column(prepare, versions)
