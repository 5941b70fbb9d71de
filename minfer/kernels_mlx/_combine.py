"""Joining the partitions of a query head in one binary tree (contract 6.3c)."""

from __future__ import annotations

import mlx.core as mx

from minfer.kernels_mlx._call import Call
from minfer.kernels_mlx._gather import GATHER
from minfer.kernels_mlx._kernel import SIMD, THREADS, MetalKernel
from minfer.kernels_mlx._softmax import SOFTMAX
from minfer.window import PARTITION

LEVELS = 24  # of a tree over the partitions of 2**31 positions, and one

# A thread joins one element of one query head. Subtrees that wait for their right neighbour lie on
# a stack, as the bits of a binary counter; aligned groups of absolute partition indices are joined.
_ATTN_COMBINE_SOURCE = (
    f"""
  constexpr int PARTITION = {PARTITION}, LEVELS = {LEVELS};
"""
    + """
  const int d = thread_position_in_grid.x, head = thread_position_in_grid.y;
  const int query = thread_position_in_grid.z, pos = positions[query];
  const Window w = query_window<RUNS>(window, query, pos, width, causal);
  const int first = w.first / PARTITION, last = pos / PARTITION;
  if (d < D) {
    const size_t row = size_t(query) * n_head + head;
    float ms[LEVELS], ls[LEVELS], accs[LEVELS];
    int n_waits = 0;
    for (int index = first; index <= last; index++) {
      const size_t place = row * n_parts + (index - first);
      float m = scratch_states[2 * place], l = scratch_states[2 * place + 1];
      float acc = scratch_accs[place * D + d];
      // a bit for each subtree to its left; one that ends before `first` is empty
      int left = index == last ? index : index & ~(index + 1);
      while (left > 0 && (index & -(left & -left)) > first) {
        n_waits--;
        const float top = max(ms[n_waits], m);
        const float a = weight(ms[n_waits], top, factor), b = weight(m, top, factor);
        l = ls[n_waits] * a + l * b;
        acc = accs[n_waits] * a + acc * b;
        m = top;
        left &= left - 1;
      }
      ms[n_waits] = m;
      ls[n_waits] = l;
      accs[n_waits] = acc;
      n_waits++;
    }
    // adding +0 leaves no negative zero, which masked keys could flip
    out[row * D + d] = accs[0] / ls[0] + 0.0f;
  }
"""
)

_combine = MetalKernel(
    "attn_combine",
    ("scratch_states", "scratch_accs", "window", "positions", "n_head", "n_parts", "width",
     "causal", "factor"),
    ("out",),
    _ATTN_COMBINE_SOURCE,
    GATHER + SOFTMAX,
)  # fmt: skip


def combine(call: Call, states: mx.array, accs: mx.array) -> mx.array:
    """The answers of all queries from what `split` left of their partitions.

    states f32 [n_q, n_head, n_parts, 2] of (m, l), accs f32 [n_q, n_head, n_parts, d]; part i of a
    query is partition i after that of its first key.
    """
    threads = min(-(-call.head_dim // SIMD) * SIMD, THREADS)
    (out,) = _combine(
        states,
        accs,
        call.window_or_positions,
        call.positions,
        call.n_head,
        states.shape[2],
        call.width,
        int(call.causal),
        call.factor,
        outputs=[(call.q.shape, mx.float32)],
        groups=(-(-call.head_dim // threads), call.n_head, call.n_q),
        threads=threads,
        D=call.head_dim,
        RUNS=call.runs,
    )
    return out
