"""The column of FlashAttention-3, in f16 where this build of it takes that, else in bf16."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from tuning.bench.batches import Batch
from tuning.bench.cases import Case, copies
from tuning.bench.protocol import Message
from tuning.columns.replay import (
    inputs_of,
    picked_of,
    refuse_format,
    run_gpu_column,
    subject,
    versions,
)
from tuning.columns.subjects import Subject

MODULES = ("flash_attn_interface", "fa3_fwd_interface")


def library() -> Any:
    """Under the first of its names that is there."""
    for name in MODULES[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return importlib.import_module(MODULES[-1])


fa3: Any = library()


def rows_of(case: Batch, dtype: Any) -> list[Any]:
    """q, k and v [batch, n, heads, d]."""
    return [rows.unflatten(0, (case.batch, -1)) for rows in inputs_of(case, dtype)]


def attention(case: Case, how: Message) -> Subject:
    """flash_attn_with_kvcache for one query, flash_attn_func for more."""
    assert isinstance(case, Batch)
    refuse_format(how["fmt"], ["f16"])
    attend = fa3.flash_attn_with_kvcache if case.n_q == 1 else fa3.flash_attn_func
    call, kind = partial(attend, causal=True), "f16"
    q, k, v = rows_of(case, torch.float16)
    try:
        call(q, k, v)
    except RuntimeError:  # built without f16
        kind, (q, k, v) = "bf16", rows_of(case, torch.bfloat16)
    n = copies(case, 2 * k.nbytes, how["rotate"])
    sets = [(k, v), *((k.clone(), v.clone()) for _ in range(n - 1))]
    calls = [partial(call, q, *pair) for pair in sets]
    return subject(calls, picked_of(case), attend.__name__, facts={"format": kind})


def all_versions() -> dict[str, str]:
    """Versions of what runs."""
    return versions() | {"flash attention": str(getattr(fa3, "__version__", "3"))}


if __name__ == "__main__":
    run_gpu_column({"batch": attention}, all_versions)
