"""Partial softmax states, and how they join (contract 6.3c).

A state of a query head is (m, l, acc): largest score, sum of weights, weighted values; weights are
exp2((score - m) * factor). States of partitions of 256 keys join in one binary tree over aligned
power-of-two groups of absolute partition indices. The state of no keys is (-inf, 0, 0), and joining
it changes nothing, so a program may own any aligned group without changing bits.
"""

import triton
import triton.language as tl

LEVELS = tl.constexpr(4)  # of the tree that `add_leaf` keeps in registers


@triton.jit
def weight(m, top, factor):
    """exp2((m - top) * factor); 0 for a state of no keys, also where both are of none."""
    return tl.where(m == float("-inf"), 0.0, tl.exp2((m - top) * factor))


@triton.jit
def no_keys(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The state of no keys."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    return m, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_D], tl.float32)


@triton.jit
def store_state(states, accs, at, state, held, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Put the state of rows [r] of which `held` are real at `at` int64 [r] of a `Partials`."""
    tl.store(states + 2 * at, state[0], mask=held)
    tl.store(states + 2 * at + 1, state[1], mask=held)
    d = tl.arange(0, BLOCK_D)
    mask = held[:, None] & (d < D)[None, :]
    tl.store(accs + at[:, None] * D + d[None, :], state[2], mask=mask)


@triton.jit
def load_state(states, accs, at, held, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """What `store_state` put there; states of no keys where not `held`."""
    m = tl.load(states + 2 * at, mask=held, other=float("-inf"))
    l = tl.load(states + 2 * at + 1, mask=held, other=0.0)
    d = tl.arange(0, BLOCK_D)
    mask = held[:, None] & (d < D)[None, :]
    return m, l, tl.load(accs + at[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_answer(out, rows, state, held, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Put acc / l of a state into the `rows` int64 [r] that are `held`; out float32 [.., D]."""
    d = tl.arange(0, BLOCK_D)
    # adding +0 leaves no negative zero, which masked keys could flip
    answer = state[2] / state[1][:, None] + 0.0
    tl.store(out + rows[:, None] * D + d[None, :], answer, mask=held[:, None] & (d < D)[None, :])


@triton.jit
def join(a, b, factor):
    """The state of both: m, l [rows] and acc [rows, d]."""
    m = tl.maximum(a[0], b[0])
    w_a, w_b = weight(a[0], m, factor), weight(b[0], m, factor)
    return m, a[1] * w_a + b[1] * w_b, a[2] * w_a[:, None] + b[2] * w_b[:, None]


@triton.jit
def add_leaf(s0, s1, s2, s3, leaf, index, factor, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Join leaf `index` with subtrees to its left, as a binary counter counts.

    s0, s1, s2: a subtree of 1, 2, 4 leaves that waits for its right neighbour. s3: one of 8, or all
    of 16. index: absolute, so leaves may begin anywhere. Whoever calls this takes `join_all` and
    begins anew where an aligned group of 16 at most ends. Returns all four.
    """
    if index % 2 == 0:
        s0 = leaf
    else:
        pair = join(s0, leaf, factor)
        s0 = no_keys(ROWS, BLOCK_D)
        if index // 2 % 2 == 0:
            s1 = pair
        else:
            four = join(s1, pair, factor)
            s1 = no_keys(ROWS, BLOCK_D)
            if index // 4 % 2 == 0:
                s2 = four
            else:
                s3 = join(s3, join(s2, four, factor), factor)
                s2 = no_keys(ROWS, BLOCK_D)
    return s0, s1, s2, s3


@triton.jit
def join_all(s0, s1, s2, s3, factor):
    """The state of all leaves that were added since all four were `no_keys`."""
    return join(s3, join(s2, join(s1, s0, factor), factor), factor)


@triton.jit
def _join_left(state, n_waits, index, last, begin, states, accs, waiting, held, factor,
               D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Join group `index` of those from `begin` on with the subtrees that it completes.

    The `last` one completes all. n_waits subtrees lie in rows `waiting` int64 [rows] and after, the
    leftmost first. Returns a state, and how many still wait.
    """
    tl.debug_barrier()  # other threads may have stored what is loaded
    left = tl.where(last, index, index & ~(index + 1))  # a bit for each subtree to its left
    while (left > 0) & (index & -(left & -left) > begin):  # one that ends before `begin` is empty
        n_waits -= 1
        subtree = load_state(states, accs, waiting + n_waits, held, D, BLOCK_D)
        state = join(subtree, state, factor)
        left = left & (left - 1)
    return state, n_waits


@triton.jit
def join_groups(state, first, last, states, accs, at, waiting, held, factor,
                D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The state of group `last` joined with those from group `first` on, which lie in rows `at`.

    at, waiting: int64 [rows]; rows `waiting` and after are room for what waits.
    """
    n_waits = first * 0
    tl.debug_barrier()  # other threads may have stored the groups
    for g in range(first, last):
        group = load_state(states, accs, at + g - first, held, D, BLOCK_D)
        group, n_waits = _join_left(group, n_waits, g, False, first, states, accs, waiting, held,
                                    factor, D, BLOCK_D)  # fmt: skip
        tl.debug_barrier()  # others may still load from the row that is stored
        store_state(states, accs, waiting + n_waits, group, held, D, BLOCK_D)
        n_waits += 1
    state, _ = _join_left(state, n_waits, last, True, first, states, accs, waiting, held, factor,
                          D, BLOCK_D)  # fmt: skip
    return state
