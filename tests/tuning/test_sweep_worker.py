"""The worker of a sweep: what one variant does is nothing to the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from minfer import registry
from minfer.device import Device
from minfer.format import KvFormat
from tuning.bench.protocol import Message
from tuning.sweep import cases
from tuning.sweep.bound import Bound
from tuning.sweep.configuration import Configuration
from tuning.sweep.crew import Worker
from tuning.sweep.trials import prepare, sample

PLANTED = Path(__file__).parent / "planted_variants.py"
CASE = "decode-1x300-h4/2-d64"
(SPLIT,) = (
    Configuration.default(v) for v in registry.variants("attn_window", "cpu") if v.name == "split"
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    how: Message = {"op": "attn_window", "device": "cpu", "fmt": "q8_0", "threads": 1}
    made = Worker(how | {"rotate": 1, "add": [str(PLANTED)], "cases": [CASE]}, 60)
    yield made
    made.close()


def prepared(worker: Worker, name: str) -> tuple[str, str]:
    reply = prepare(worker, Configuration(name, ()))
    return reply["status"], reply["message"]


def split_is_right(worker: Worker) -> bool:
    reply = prepare(worker, SPLIT)
    worker.forget(SPLIT.key)
    return bool(reply["status"] == "ok")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("reused", "a later call changed an answer: error "),
        ("restless", "it changes its q, which it may only read"),
        ("gnawing", "error "),
        ("deferred", "error "),
    ],
)
def test_a_variant_with_effects_is_wrong_and_the_next_one_is_not(
    worker: Worker, name: str, why: str
) -> None:
    status, message = prepared(worker, name)
    assert status == "wrong" and message.startswith(why)
    assert split_is_right(worker)


def test_an_answer_is_what_it_is_when_a_call_returns() -> None:
    case = cases.case_named("add", "r5-w96")
    bound = Bound(case.problem(KvFormat.F32), Device.parse("cpu"))
    outs = np.zeros((5, 96), np.float32), np.zeros(3, np.int32)
    alone, *parts = bound.answer(outs[0]), *bound.answer(outs)
    for out in outs:
        out += 1  # by a thread that the call has left, say
    assert not alone.any() and not any(part.any() for part in parts)


def test_a_process_with_threads_that_go_on_times_nobody_else(worker: Worker) -> None:
    assert split_is_right(worker)
    before = worker.child
    assert before is not None
    assert prepared(worker, "spinning") == ("ok", "")
    assert worker.child is before
    worker.forget("spinning")
    assert worker.child is None
    assert split_is_right(worker)


def test_a_variant_does_not_stop_the_clock(worker: Worker) -> None:
    assert prepared(worker, "hasty") == ("ok", "")
    assert sample(worker, "hasty", CASE, 1) > 0
