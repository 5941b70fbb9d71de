"""How the partitions of a query are shared out to programs, and where their states lie.

A free choice: states join in the tree of `_softmax` whatever it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minfer.kernels_triton._arguments import multiprocessors
from minfer.kernels_triton._call import Call
from minfer.kernels_triton._softmax import LEVELS
from minfer.window import PARTITION as PARTITION_KEYS

PARTITION = tl.constexpr(PARTITION_KEYS)
MOST_SHARED = 32  # groups of a program where they are not the largest; 22 is the most there are


@triton.jit
def group_level(p_first, p_last, n_splits):
    """log2 of the partitions of a group: the smallest groups that n_splits suffice for."""
    level = p_first * 0
    while (p_last >> level) - (p_first >> level) >= n_splits:
        level += 1
    return level


@triton.jit
def share_size(p_first, p_last, n_splits):
    """log2 of the partitions of a group, and groups of a program, which takes several in a row.

    The largest groups, of 16 partitions at most, with which the longest program is at most an
    eighth longer than it must be.
    """
    n = p_last - p_first + 1
    least = (n - 1) // n_splits + 1
    level = p_first * 0
    while (level < LEVELS) & ((n_splits == 1) | (1 << level < least)):
        level += 1
    share = ((p_last >> level) - (p_first >> level)) // n_splits + 1
    while 8 * tl.minimum(share << level, n) > 9 * least:
        level -= 1
        share = ((p_last >> level) - (p_first >> level)) // n_splits + 1
    return level, share


class Partials(NamedTuple):
    """Room for states: n_groups rows for groups, then rows for subtrees that wait for others.

    n_groups: as many as a query has at most. shared: a program takes several groups in a row, by
    `share_size`.
    """

    states: torch.Tensor  # float32 [n_q, n_head, n_rows, 2]
    accs: torch.Tensor  # float32 [n_q, n_head, n_rows, d]
    n_groups: int
    n_splits: int
    shared: bool

    @property
    def n_rows(self) -> int:
        return self.states.shape[2]

    @classmethod
    def of(
        cls, call: Call, n_groups: int, n_waiting: int, n_splits: int, *, shared: bool
    ) -> Partials:
        """Room for so many groups and waiting states a query head of a call."""
        shape = (call.n_q, call.n_head, n_groups + n_waiting)
        states, accs = call.q.new_empty((*shape, 2)), call.q.new_empty((*shape, call.head_dim))
        return cls(states, accs, n_groups, n_splits, shared)


def partials(call: Call, n_splits: int) -> Partials:
    """Room for a call whose queries are each shared out to n_splits programs."""
    largest = (call.most_partitions >> LEVELS.value) + 2
    if n_splits == 1:
        return Partials.of(call, largest, largest.bit_length(), 1, shared=True)
    n_groups = min(max(MOST_SHARED * n_splits, largest), call.most_partitions)
    return Partials.of(call, n_groups, 0, n_splits, shared=True)


def splits(call: Call, resident: int, waves: int) -> int:
    """Programs a (query, KV head), so that all run at once, `waves` times.

    resident: programs that a multiprocessor holds.
    """
    pairs, wanted = max(1, call.n_q * call.n_head_kv), waves * resident * multiprocessors()
    if waves == 1 and 8 * pairs >= 7 * multiprocessors():
        return 1  # one a multiprocessor reads as fast, and needs no second launch
    return max(1, min(wanted // pairs, call.most_partitions))
