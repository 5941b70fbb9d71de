"""Columns of the GPU benchmark, run in Triton's interpreter: right answers, without numba."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuning.bench.protocol import Absent, CallFailed, Child, ChildFailed

for needed in ("torch", "triton"):
    pytest.importorskip(needed)

SCRIPT = """
import json, sys
from functools import partial

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import torch
from torch.nn.attention import SDPBackend

import tuning.__main__
from tuning.bench import checks
from tuning.bench.batches import Batch
from tuning.bench.cases import Product
from tuning.bench.protocol import Absent
from tuning.columns import machine_cuda, ours_cuda, torch_cuda

decode = Batch(1, 40, 2, 1, 32, batch=2, torn=True)
prefill = Batch(5, 5, 2, 1, 32, batch=2, kinds=("f16",))
product = Product(48, 64, 1)
how = {"rotate": 3 * 2 * 80 * 64}  # three sets of f16 cells
math = partial(torch_cuda.sdpa, backend=SDPBackend.MATH)
report = {}

def told(name, case, fmt, prepare, ours=True):
    try:
        subject = prepare(case, {**how, "fmt": fmt})
    except Absent as why:
        report[name] = str(why)
        return
    check = checks.check_ours if ours else partial(checks.check_peer, reference=None)
    subject.measures["call"].sample(1)
    report[name] = [
        subject.note, len(subject.measures["call"].calls),
        check(case=case, fmt=fmt, values=subject.values, facts=subject.facts).passed,
    ]

for n_runs in (1, 4):
    told(f"{n_runs} runs", decode, "q8_0", partial(ours_cuda.attention, n_runs=n_runs))
told("prefill", prefill, "f16", partial(ours_cuda.attention, n_runs=1))
told("not torn", prefill, "f16", partial(ours_cuda.attention, n_runs=2))
told("matvec", product, "q8_0", ours_cuda.product)
sdpa = partial(torch_cuda.attention, attend=math, name="math")
told("sdpa", decode, "f16", sdpa, False)
told("sdpa prefill", prefill, "f16", sdpa, False)
told("sdpa q8_0", decode, "q8_0", sdpa, False)
flex = partial(torch_cuda.attention, attend=torch_cuda.flex, name="flex")
told("flex decode", decode, "f16", flex, False)
told("linear", product, "f16", torch_cuda.product, False)
report["rates"] = sorted(machine_cuda.rates(1 << 12))
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_ours_attends_rightly_wherever_rows_lie(report: Any) -> None:
    assert report["1 runs"][1:] == [6, True] and report["1 runs"][0].startswith("attn_window_")
    assert report["4 runs"][1:] == [6, True] and report["4 runs"][0].startswith("attn_map_")
    assert report["prefill"][1:] == [1, True]
    assert report["not torn"] == "rows lie in one run"
    assert report["matvec"][0].startswith("matvec_") and report["matvec"][2]


def test_torch_is_called_rightly(report: Any) -> None:
    assert report["sdpa"] == ["math", 3, True] and report["sdpa prefill"] == ["math", 1, True]
    assert report["sdpa q8_0"] == "it takes f16, not q8_0"
    assert report["flex decode"] == "compiled for prefill alone"
    assert report["linear"][0] == "linear" and report["linear"][2]


def test_a_gpu_has_rates_of_copies_and_products(report: Any) -> None:
    assert report["rates"] == ["bf16", "fma", "int8", "read"]


LOST = """
import sys
import torch
from tuning.bench.protocol import Absent, serve
from tuning.columns import replay

def lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def absent(request):
    raise Absent("no such thing")

def lose(request):
    torch.cuda.synchronize = lost
    raise ValueError("the launch failed")

replay.DEVICE, torch.cuda.synchronize = "cuda", lambda: None
handlers = {"fail": lambda request: 1 / 0, "absent": absent, "lose": lose}
serve({verb: replay.guarded(handler) for verb, handler in handlers.items()})
"""


def test_a_child_ends_when_its_gpu_is_lost_and_not_before() -> None:
    child = Child([sys.executable, "-c", LOST])
    try:
        with pytest.raises(CallFailed, match="division by zero"):
            child.ask({"do": "fail"}, 60)
        with pytest.raises(Absent, match="no such thing"):
            child.ask({"do": "absent"}, 60)
        with pytest.raises(ChildFailed, match=r"exit code 1: (?s:.*)illegal memory access"):
            child.ask({"do": "lose"}, 60)
    finally:
        child.close()
