"""Problems of a sweep: right answers pass in both versions, broken ones do not, names say all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import under_test
from refusals import refused

from minfer import registry
from minfer.device import Device
from minfer.format import KvFormat, Region
from minfer.ops import DECODE, OPS, PREFILL, Numerics
from minfer.registry import Choice
from minfer.tuned.rows import key_of
from tuning.sweep import cases
from tuning.sweep.bound import Bound
from tuning.sweep.problem import VERSIONS, Case, Problem
from tuning.sweep.sized import CACHES

F32, F16, Q8_0 = KvFormat
DEVICE = Device.parse(under_test.device)
SLOW = under_test.interpreted() or under_test.simulated()
GATED = 2 if SLOW else None  # gate problems of a case that are tried
SMALL = {  # of each op, what stands for a timed case
    "attn_window": ("decode-2x40-h4/2-d64", "prefill-1x40q17-h4/2-d64"),
    "attn_map": ("decode-2x40-h4/2-d64-r4", "prefill-1x40q17-h4/2-d64-r3"),
    "matvec": ("96x33-r1",),
    "matmul": ("96x33-r5",),
    "rope": ("r5-h3-d64",),
    "embed": ("r5-w96-v33",),
    "store_cells": ("7-h3-d64",),
    "qkv_rope_store": ("7-h6/3-d64",),
    "map_q8_0_cells": ("7-h3-d64",),
    "move_cells": ("3x5-h3-d64",),
}
NAMED = [(op, name) for op in OPS for name in SMALL.get(op, ("r5-w96",))]
EACH = [
    pytest.param(op, name, fmt, id=f"{op}-{name}-{fmt}")
    for op, name in NAMED
    for fmt in (KvFormat if OPS[op].formats or op == "move_cells" else [F32])
]


def case_of(op: str, name: str) -> Case:
    found = cases.parse(op, name)
    assert found is not None
    return found


def chosen(case: Case, fmt: KvFormat) -> Choice:
    return registry.select(case.op, device=DEVICE, fmt=fmt, shape=case.shape)


def answer(problem: Problem, choice: Choice, version: int) -> Any:
    """What the library answers, on the host."""
    bound = Bound(problem, DEVICE)
    bound.turn(version)
    with under_test.checked(small=False):
        return bound.answer(bound.launch(choice, bound.arguments(choice, fresh=True)))


def judged(problem: Problem, numerics: Numerics, version: int, out: Any) -> bool:
    return problem.judge(version, numerics, out).passed


@pytest.mark.parametrize(("op", "name", "fmt"), EACH)
def test_the_default_is_right_and_no_answer_fits_both_versions(
    op: str, name: str, fmt: KvFormat
) -> None:
    case = case_of(op, name)
    assert case.fits(fmt)
    choice = chosen(case, fmt)
    numerics = choice.variant.numerics(fmt)
    for problem in [case.problem(fmt), *case.gate(fmt)[:GATED]]:
        assert problem.op == op
        for version in VERSIONS:
            out = answer(problem, choice, version)
            assert judged(problem, numerics, version, out)
            assert not judged(problem, numerics, 1 - version, out)


def broken(out: Any) -> Iterator[tuple[str, Any]]:
    """Wrong versions of an answer: of a tuple, with one part wrong each."""
    if isinstance(out, tuple):
        yield "a part is missing", out[:-1]
        for i, part in enumerate(out):
            for what, wrong in broken(part):
                yield f"{what} in part {i}", (*out[:i], wrong, *out[i + 1 :])
    elif isinstance(out, Region):
        yield "no region", out.arrays[0]
        yield "another format", replace(out, fmt=F16 if out.fmt is F32 else F32)
        for what, wrong in _broken_array(out.arrays[0]):
            yield what, replace(out, arrays=(wrong,))
        for cell, byte in ((0, 0), (-1, -1)):  # no call stores into the first or the last cell
            wrong = out.arrays[0].copy()
            wrong[cell, byte] ^= 1
            yield f"one bit of cell {cell}", replace(out, arrays=(wrong,))
    else:
        yield "nothing", None
        yield from _broken_array(out)


def _broken_array(out: Any) -> Iterator[tuple[str, Any]]:
    changes: dict[str, Callable[[Any], Any]] = {
        "off by one element": lambda a: np.roll(a, 1),
        "off by one row": lambda a: np.roll(a, 1, axis=0),
        "zeros": np.zeros_like,
        "a row less": lambda a: a[:-1],
        "another shape": lambda a: a[None],
        "another type": lambda a: a.astype(np.float64 if a.dtype == np.float32 else np.int16),
    }
    if len(out) == 1:
        del changes["off by one row"]
    for what, change in changes.items():
        yield what, change(out)
    half = out.copy()
    half.reshape(-1)[half.size // 2 :] = np.nan if half.dtype == np.float32 else 255
    yield "half of it", half


@pytest.mark.parametrize(("op", "name", "fmt"), EACH)
def test_broken_answers_are_refused(op: str, name: str, fmt: KvFormat) -> None:
    case = case_of(op, name)
    choice = chosen(case, fmt)
    numerics, problem = choice.variant.numerics(fmt), case.problem(fmt)
    right, other = (answer(problem, choice, version) for version in VERSIONS)
    assert judged(problem, numerics, 0, right)
    for what, wrong in broken(right):
        assert not judged(problem, numerics, 0, wrong), what
    if isinstance(right, tuple):
        for i in range(len(right)):
            mixed = (*right[:i], other[i], *right[i + 1 :])
            assert not judged(problem, numerics, 0, mixed), f"part {i} of the other version"
    for i in problem.changed:
        given = problem.tensors[i]
        untouched = given if not isinstance(right, tuple) else (right[0], given, given)
        assert not judged(problem, numerics, 0, untouched)
        assert (given.arrays[0] != 0).any(axis=1).all(), "a cell holds nothing to be kept"


@pytest.mark.parametrize("op", ["store_cells", "move_cells", "map_q8_0_cells", "qkv_rope_store"])
def test_what_calls_left_in_a_region_does_not_reach_the_next_check(op: str) -> None:
    case = case_of(op, SMALL[op][0])
    choice, problem = chosen(case, Q8_0), case.problem(Q8_0)
    bound = Bound(problem, DEVICE)
    numerics = choice.variant.numerics(Q8_0)
    for version in (0, 1, 1, 0):
        bound.turn(version)
        for _ in range(3):
            bound.launch(choice, bound.arguments(choice))
        out = bound.answer(bound.launch(choice, bound.arguments(choice, fresh=True)))
        assert judged(problem, numerics, version, out)


@pytest.mark.parametrize("op", ["store_cells", "move_cells", "map_q8_0_cells", "qkv_rope_store"])
def test_arguments_of_a_problem_stay_as_they_are(op: str) -> None:
    """The oracle works in place: a judge has to work on copies."""
    case = case_of(op, SMALL[op][0])
    problem = case.problem(Q8_0)
    regions = [t for t in (*problem.tensors, *problem.other.values()) if isinstance(t, Region)]
    before = [region.arrays[0].copy() for region in regions]
    for version in VERSIONS:
        judged(problem, chosen(case, Q8_0).variant.numerics(Q8_0), version, None)
    for region, held in zip(regions, before, strict=True):
        assert (region.arrays[0] == held).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", cases.TIMED)
def test_listed_names_are_names_of_cases(op: str, device: str) -> None:
    listed = cases.names(op, device)
    assert len(set(listed)) == len(listed) > 0
    found = cases.cases_of(op, device, None, F32 if OPS[op].formats else None)
    assert tuple(case.name for case in found) == listed
    for case in found:
        assert case.op == op and case == cases.case_named(op, case.name)
        key = key_of(op, F32, case.shape)
        assert (key.kind, key.head_dim) == (case.shape.kind, case.head_dim)
    assert cases.case_named(op, cases.EXAMPLES[op]).name == cases.EXAMPLES[op]


@pytest.mark.parametrize(("op", "name"), NAMED)
def test_no_other_text_is_a_name(op: str, name: str) -> None:
    assert case_of(op, name).name == name
    for wrong in (f"{name}-", f"x{name}", name.upper(), f"{name}\n", "", name.replace("-", "_", 1)):
        assert cases.parse(op, wrong) is None, wrong
    for found in re.finditer("[0-9]+", name):
        assert cases.parse(op, f"{name[: found.start()]}0{name[found.end() :]}") is None
    others = {"attn_window": "attn_map", "attn_map": "attn_window"}
    assert op not in others or cases.parse(others[op], name) is None


def test_sizes_are_those_of_the_name() -> None:
    q, k, _, k_region, *_ = case_of("qkv_rope_store", "5-h6/3-d64").problem(F32).tensors
    assert (q.shape, k.shape) == ((5, 6, 64), (5, 3, 64))
    assert (k_region.n_head_kv, k_region.head_dim) == (3, 64)
    weight, tokens = case_of("embed", "r5-w96-v33").problem(F16).tensors
    assert weight.shape == (33, 96) and tokens.shape == (5,) and 32 in tokens
    _, moves = case_of("move_cells", "3x5-h1-d32").problem(F32).tensors
    assert moves.tolist() == [[0, 5, 5], [10, 15, 5], [20, 25, 5]]
    assert cases.parse("qkv_rope_store", "5-h6/4-d64") is None


def test_the_kind_of_a_step_follows_its_rows() -> None:
    for rows, kind in ((1, DECODE), (64, DECODE), (65, PREFILL), (512, PREFILL)):
        for op, name in (("rms_norm", f"r{rows}-w8"), ("store_cells", f"{rows}-h1-d32")):
            shape = case_of(op, name).shape
            assert (shape.kind, shape.n_q) == (kind, rows)


def test_patterns_choose_listed_cases_and_exact_names_any() -> None:
    def named(op: str, pattern: str | None, fmt: KvFormat | None = None) -> list[str]:
        return [case.name for case in cases.cases_of(op, "cpu", pattern, fmt)]

    assert named("attn_window", "decode-1x*-h9*", Q8_0) == [
        "decode-1x512-h9/3-d64",
        "decode-1x4096-h9/3-d64",
    ]
    assert all(name.endswith("-r4") for name in named("attn_map", None, F32))
    assert named("rms_norm", "r1-*") == ["r1-w576", "r1-w4096"]
    assert named("attn_window", "decode-3x777-h6/2-d64", F16) == ["decode-3x777-h6/2-d64"]
    assert named("embed", "r3-w33-v7", F32) == ["r3-w33-v7"]


def test_what_names_no_case_is_refused() -> None:
    def asked(*how: Any) -> Callable[[], object]:
        return lambda: cases.cases_of(*how)

    said = ("names no case of rope", "r512-h32-d128", "near it are listed r512-h9-d64")
    refused(None, "10", asked("rope", "cpu", "r512-h9-d6x", None), *said)
    refused(None, "10", asked("rope", "cpu", "", None), "'' names no case")
    refused(None, "10", asked("attn_map", "cuda", "decode-1x4096-h32/8-d128", F32), "-r4")
    refused(None, "10", lambda: cases.case_named("scale", "w5"), "'w5' names no case of scale")
    refused(None, "0.3", asked("rotate", "cpu", None, None), "op 'rotate' is none of", "rope")
    refused(None, "0.3", asked("rope", "tpu", None, None), "device 'tpu' is none of")
    odd = "no case of embed fits q8_0, whose rows are whole blocks of 32: r1-w33-v5"
    refused(None, "3.3", asked("embed", "cpu", "r1-w33-v5", Q8_0), odd)
    refused(None, "3.3", asked("dot_q8_0", "cpu", "r1-w33", None), "r1-w33")


def test_questions_hold_what_may_share_a_decision() -> None:
    def grouped(op: str, fmt: str, some: list[Case]) -> dict[str, list[str]]:
        found = cases.questions(op, "cpu", "box", fmt, some)
        return {question.key: [case.name for case in own] for question, own in found.items()}

    wanted = cases.cases_of("rope", "cpu", "r*", None)
    assert grouped("rope", "f32", wanted) == {
        "rope cpu box decode d64": ["r1-h9-d64"],
        "rope cpu box decode d128": ["r1-h32-d128"],
        "rope cpu box prefill d64": ["r512-h9-d64"],
        "rope cpu box prefill d128": ["r512-h32-d128"],
    }
    stored = cases.cases_of("store_cells", "cpu", "1-*", F16)
    assert grouped("store_cells", "f16", stored) == {
        "store_cells cpu box f16 decode": ["1-h3-d64", "1-h8-d128"]
    }


def test_bytes_are_claimed_only_where_no_cache_holds_them() -> None:
    assert case_of("add", "r512-w4096").work(F32).bytes == 0
    rows, width = CACHES >> 13, 4096
    assert case_of("add", f"r{rows}-w{width}").work(F32).bytes == 12 * rows * width - CACHES
    moved = case_of("move_cells", f"1x{CACHES >> 6}-h1-d32").work(Q8_0).bytes
    assert moved == 2 * 36 * (CACHES >> 6) - CACHES
