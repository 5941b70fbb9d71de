"""`split` in Triton: however many programs share a query's keys, its bits are the same.

Runs on a GPU, or with TRITON_INTERPRET=1 on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_oracle import assert_within_budget
from under_test import attend, find, same_bits

from minfer import cases
from minfer.cases import RUNS, SPAN, Case
from minfer.format import KvFormat
from minfer.ops import DECODE
from minfer.window import PARTITION

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from minfer.kernels_triton import _shares, _split  # noqa: E402
from minfer.kernels_triton._arguments import interpreted  # noqa: E402

if not (interpreted() or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

# A program keeps trees of 16 partitions. The whole window ends with 15 of them, the sliding one
# begins in the second 16, with a partition of odd index, and ends in the third.
CASES = [
    Case("whole", DECODE, (2, 1), 16, ((31 * PARTITION - 31, 1),), RUNS, pieces=3),
    Case("sliding", DECODE, (2, 1), 16, ((38 * PARTITION + 6, 1),), SPAN, width=20 * PARTITION + 9),
]


@pytest.fixture(autouse=True)
def poisoned_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for states starts as NaN, so reading what was not written shows."""
    of = _shares.Partials.of

    def poisoned(*args: Any, **options: Any) -> _shares.Partials:
        made = of(*args, **options)
        made.states.fill_(float("nan"))
        made.accs.fill_(float("nan"))
        return made

    monkeypatch.setattr(_shares.Partials, "of", poisoned)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_do_not_depend_on_how_many_programs_share_the_keys(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = cases.make(case, KvFormat.F16)
    variant = find(inputs.op, "split")

    def shared_by(n: int) -> np.ndarray:
        monkeypatch.setattr(_split, "splits", lambda *_: n)
        answer: np.ndarray = attend(variant, inputs)
        return answer

    alone = shared_by(1)
    assert_within_budget(variant, KvFormat.F16, inputs, alone)
    for n in (2, 3, 5, 16, 33):
        assert same_bits(shared_by(n), alone), n
