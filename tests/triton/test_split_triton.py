"""`split` in Triton: however many programs share a query's keys, its bits are the same.

Runs by `--on cuda`, on a GPU or with TRITON_INTERPRET=1 on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import under_test
from attention_oracle import assert_within_budget
from under_test import attend, find, same_bits

from minfer import cases
from minfer.cases import RUNS, SPAN, Case
from minfer.format import KvFormat
from minfer.ops import DECODE
from minfer.window import PARTITION

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from minfer.kernels_triton import _shares, _split  # noqa: E402
from minfer.kernels_triton._arguments import home, interpreted  # noqa: E402
from minfer.kernels_triton._softmax import join_groups, load_state, store_answer  # noqa: E402

if under_test.device != "cuda" or not (interpreted() or torch.cuda.is_available()):
    pytest.skip("needs --on cuda, and a GPU or TRITON_INTERPRET=1", allow_module_level=True)

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


@pytest.mark.parametrize("position", [2**19 * PARTITION + 149, 2**31 - 300])
def test_states_join_where_positions_are_large(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 keys, once on both sides of the border between partitions 2**19 - 1 and 2**19."""
    near = cases.make(Case("far", DECODE, (2, 1), 16, ((399, 1),), SPAN), KvFormat.F16)
    inputs = replace(near, positions=np.array([position], np.int32))
    variant = find(inputs.op, "split")
    monkeypatch.setattr(_split, "splits", lambda *_: 1)
    alone = attend(variant, inputs)
    assert_within_budget(variant, KvFormat.F16, near, alone)
    for n in (2, 5):
        monkeypatch.setattr(_split, "splits", lambda *_, n=n: n)
        assert same_bits(attend(variant, inputs), alone), n


@triton.jit(do_not_specialize=["first", "last", "n_groups"])
def _joined_kernel(states, accs, out, first, last, n_groups, D: tl.constexpr):
    """The joined groups of one row, not yet divided: quotients of a GPU are not the host's."""
    r = tl.arange(0, 1)
    held, at = r == 0, r.to(tl.int64)
    state = load_state(states, accs, at + last - first, held, D, D)
    state = join_groups(state, first, last, states, accs, at, at + n_groups, held, 1.0, D, D)
    state = (state[0], tl.full([1], 1.0, tl.float32), state[2])
    store_answer(out, at, state, held, D, D)


def tree_sum(leaves: np.ndarray, first: int, begin: int, size: int) -> np.ndarray | None:
    """Leaves first, first + 1, .. that lie in [begin, begin + size) in one binary tree, float32."""
    if begin + size <= first or begin >= first + len(leaves):
        return None
    if size == 1:
        return leaves[begin - first]
    left, right = (tree_sum(leaves, first, at, size // 2) for at in (begin, begin + size // 2))
    return right if left is None else left if right is None else left + right


@pytest.mark.parametrize("first", [0, 1, 5, 7, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 13, 27])
def test_groups_join_in_one_tree_over_absolute_indices(first: int, n: int) -> None:
    """Where all maxima are 0 and all sums 1, to join is to add accumulators."""
    room = n + n.bit_length()
    leaves = np.random.default_rng(n).standard_normal((n, 16)).astype(np.float32)
    states = torch.full((room, 2), torch.nan)
    accs = torch.full((room, 16), torch.nan)
    states[:n, 0], states[:n, 1], accs[:n] = 0.0, 1.0, torch.from_numpy(leaves)
    out = torch.empty(16, device=home())
    _joined_kernel[(1,)](states.to(home()), accs.to(home()), out, first, first + n - 1, n, D=16)
    total = tree_sum(leaves, first, 0, 64)
    assert total is not None and same_bits(out.cpu().numpy(), total)
