"""The column of FlashInfer: pages of 16 cells in any order for decode, whole rows for prefill.

Where our cells are q8_0, its are fp8: eight bits too, with no scale of a block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flashinfer
import torch

from tuning.bench.batches import Batch
from tuning.bench.cases import Case, copies
from tuning.bench.protocol import Absent, Message
from tuning.columns.replay import (
    DEVICE,
    inputs_of,
    picked_of,
    refuse_format,
    run_gpu_column,
    subject,
    versions,
)
from tuning.columns.subjects import Subject

PAGE = 16
WORKSPACE = 256 << 20
KINDS = {"f16": ("f16", torch.float16), "q8_0": ("fp8", torch.float8_e4m3fn)}


def attention(case: Case, how: Message) -> Subject:
    """The batch wrappers, planned before anything is timed."""
    assert isinstance(case, Batch)
    refuse_format(how["fmt"], list(KINDS) if case.n_q == 1 else ["f16"])
    kind, dtype = KINDS[how["fmt"]]
    q, k, v = inputs_of(case, torch.float16)
    if case.n_q == 1:
        call, sets = decode(case, dtype, k, v, how["rotate"])
    else:
        call, sets = prefill(case), [(k, v)]
    calls = [partial(call, q, *each) for each in sets]
    return subject(calls, picked_of(case), "flashinfer", facts={"format": kind})


def workspace() -> Any:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE)


def decode(case: Batch, dtype: Any, k: Any, v: Any, rotate: int) -> tuple[Any, list[Any]]:
    """Pages [n_pages, 2, 16, n_head_kv, d] that lie in a random order."""
    if case.n_cells % PAGE:
        raise Absent(f"{case.n_cells} cells are no pages of {PAGE}")
    n_pages = case.batch * case.n_cells // PAGE
    order = torch.randperm(n_pages, device=DEVICE)
    paged = torch.stack([rows.unflatten(0, (n_pages, PAGE)) for rows in (k, v)], dim=1)
    pages = torch.empty_like(paged, dtype=dtype)
    pages[order] = paged.to(dtype)
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE)
    last = torch.full((case.batch,), PAGE, dtype=torch.int32, device=DEVICE)
    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        ends * (case.n_cells // PAGE), order.int(), last, case.n_head, case.n_head_kv,
        case.head_dim, PAGE, q_data_type=torch.float16, kv_data_type=dtype,
    )  # fmt: skip
    n = copies(case, pages.nbytes, rotate)
    return wrapper.run, [(pages,), *((pages.clone(),) for _ in range(n - 1))]


def prefill(case: Batch) -> Any:
    """Causal, with the kernels of FlashAttention-3 where the GPU has them."""
    wrapper: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(), "NHD", backend="fa3"
    )
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE) * case.n_q
    wrapper.plan(
        ends, ends, case.n_head, case.n_head_kv, case.head_dim,
        causal=True, q_data_type=torch.float16,
    )  # fmt: skip
    return wrapper.run


def all_versions() -> dict[str, str]:
    """Versions of what runs."""
    return versions() | {"flashinfer": flashinfer.__version__}


if __name__ == "__main__":
    run_gpu_column({"batch": attention}, all_versions)
