"""How `ring` joins what a warp made of the partitions of its group (contract 6.3c).

The tree is that of `_softmax`: partitions pairwise, pairs pairwise, and so on. A factor is 1 here,
because m is in units of exp2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _join(m0, l0, acc0, m1, l1, acc1):
    """One state of two: m, l [W, 4], acc [W, 4, D]."""
    m = gl.maximum(m0, m1)
    safe = gl.where(m == float("-inf"), 0.0, m)
    w0, w1 = gl.exp2(m0 - safe), gl.exp2(m1 - safe)
    wide: gl.constexpr = gl.SliceLayout(2, acc0.type.layout)
    a0, a1 = gl.convert_layout(w0, wide)[:, :, None], gl.convert_layout(w1, wide)[:, :, None]
    return m, l0 * w0 + l1 * w1, acc0 * a0 + acc1 * a1


@gluon.jit
def join_halves(m, l, acc, W: gl.constexpr, D: gl.constexpr):
    """The state of two partitions, as `_join` has it, of m, l [W, 8] and acc [W, D, 8]."""
    m = gl.reshape(m, [W, 2, 4])
    top = gl.max(m, axis=1)
    weight = gl.exp2(m - gl.where(top == float("-inf"), 0.0, top)[:, None, :])
    total = gl.sum(gl.reshape(l, [W, 2, 4]) * weight, axis=1)
    weight = gl.convert_layout(gl.reshape(weight, [W, 8]), gl.SliceLayout(1, acc.type.layout))
    acc = gl.reshape(acc * weight[:, None, :], [W, D // 8, 8, 2, 4])
    return top, total, gl.reshape(gl.permute(gl.sum(acc, axis=3), [0, 3, 2, 1]), [W, 4, D])


@gluon.jit
def _rows(states_ptr, accs_ptr, row, n_rows, n_heads, live, m, acc):
    """Where row `row` + w of each head lies in both arrays, and which of them exist."""
    L1: gl.constexpr = m.type.layout
    L2: gl.constexpr = acc.type.layout
    W: gl.constexpr = m.shape[0]
    h = gl.arange(0, 4, layout=gl.SliceLayout(0, L1))[None, :]
    w = gl.arange(0, W, layout=gl.SliceLayout(1, L1))[:, None]
    states = states_ptr + (row + h * n_rows + w) * 2
    states_live = (h < n_heads) & (w < live)
    h = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, L2)))[None, :, None]
    w = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, L2)))[:, None, None]
    d = gl.arange(0, acc.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, L2)))[None, None, :]
    accs = accs_ptr + (row + h * n_rows + w) * acc.shape[2] + d
    return states, states_live, accs, (h < n_heads) & (w < live) & (d >= 0)


@gluon.jit
def push(m, l, acc, index, last, states_ptr, accs_ptr, row, n_streams, n_rows, n_heads, live):
    """Join pair `index` of a group with those before it, in tree order; write what came of it.

    m, l [W, 4], acc [W, 4, D]. Warp w, one of `live` that have a group, writes to row `row` + w of
    its heads. States that wait for a right neighbour of 2**i pairs lie in rows i + 1 times
    n_streams further on, and are read by the thread, or its warp, that wrote them. The last pair
    takes all that wait.
    """
    waiting = row + n_streams
    left = gl.where(last, index, index & ~(index + 1))
    while left > 0:
        if left & 1:
            states, states_live, accs, accs_live = _rows(
                states_ptr, accs_ptr, waiting, n_rows, n_heads, live, m, acc
            )
            m0 = gl.load(states, mask=states_live, other=float("-inf"))
            l0 = gl.load(states + 1, mask=states_live, other=0.0)
            m, l, acc = _join(m0, l0, gl.load(accs, mask=accs_live, other=0.0), m, l, acc)
        left = left >> 1
        waiting += n_streams
    states, states_live, accs, accs_live = _rows(
        states_ptr, accs_ptr, gl.where(last, row, waiting), n_rows, n_heads, live, m, acc
    )
    gl.store(states, m + (l - l), mask=states_live)  # NaN where the sum is
    gl.store(states + 1, l, mask=states_live)
    gl.store(accs, acc, mask=accs_live)
