"""The column of torch: scaled_dot_product_attention and linear, in f32 or bf16."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from tuning.bench import inputs
from tuning.bench.cases import Attention, Case, Product, copies
from tuning.bench.protocol import Absent, Message
from tuning.columns.subjects import Measure, Subject, finite, run_column

# A 16-bit cache or weight is bf16 here: the CPU has instructions for it, and none for f16.
STAND_INS = {"f32": "f32", "f16": "bf16"}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
attend: Any = torch.inference_mode()(scaled_dot_product_attention)
multiply: Any = torch.inference_mode()(linear)


def stand_in(how: Message) -> str:
    """The type that stands for a format; sets the threads."""
    if how["fmt"] not in STAND_INS:
        raise Absent(f"torch has no {how['fmt']}")
    torch.set_num_threads(how["threads"])
    return STAND_INS[how["fmt"]]


def attention(case: Case, how: Message) -> Subject:
    """scaled_dot_product_attention over [1, n_head_kv, n_cells, d].

    One query: the query heads of a KV head are its queries, which reads K and V once a group.
    More: enable_gqa, causal by flag where queries and keys are equally many, else by a mask.
    """
    assert isinstance(case, Attention)
    kind, given = stand_in(how), inputs.attention_inputs(case)
    dtype = DTYPES[kind]
    q = torch.from_numpy(given.q.transpose(1, 0, 2)[None].copy()).to(dtype)
    options: dict[str, Any] = {"enable_gqa": case.n_head != case.n_head_kv}
    if case.n_q == 1:
        q = q.reshape(1, case.n_head_kv, -1, case.head_dim)
        options = {}
    elif case.n_q == case.n_cells:
        options["is_causal"] = True
    else:
        seen = np.arange(case.n_cells) <= given.positions[:, None]
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))
        options["attn_mask"] = torch.from_numpy(mask).to(dtype)
    k, v = (
        torch.from_numpy(rows.transpose(1, 0, 2)[None].copy()).to(dtype)
        for rows in (given.k, given.v)
    )
    call = partial(attend, **options)
    n = copies(case, 2 * k.nbytes, how["rotate"])
    sets = [(q, k, v), *((q, k.clone(), v.clone()) for _ in range(n - 1))]
    out = call(q, k, v).float().reshape(case.n_head, case.n_q, case.head_dim)
    values = out.numpy().transpose(1, 0, 2)
    return Subject(
        {"call": Measure([partial(call, *tensors) for tensors in sets])},
        finite(inputs.checked_attention(case, values), values),
        note="scaled_dot_product_attention",
        facts={"format": kind},
    )


def product(case: Case, how: Message) -> Subject:
    """torch.nn.functional.linear, both operands in one type."""
    assert isinstance(case, Product)
    kind = stand_in(how)
    weight, x = (torch.from_numpy(a).to(DTYPES[kind]) for a in inputs.product_inputs(case))
    weights = [weight.clone() for _ in range(copies(case, weight.nbytes, how["rotate"]))]
    out = multiply(x, weight).float().numpy()
    return Subject(
        {"call": Measure([partial(multiply, x, w) for w in weights])},
        finite(inputs.checked_product(out), out),
        note="linear",
        facts={"format": kind},
    )


def versions() -> dict[str, str]:
    """Versions of what is called."""
    return {"torch": torch.__version__, "numpy": np.__version__}


if __name__ == "__main__":
    run_column({"attn": attention, "dense": product}, versions)
