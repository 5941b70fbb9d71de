"""Decode: a query's keys are cut into partitions of 256, a threadgroup each; then they are joined.

A threadgroup takes up to four query heads of one KV head. Its four simdgroups own 64 keys of the
partition each and read K and V from where they lie, in pieces of four elements: four lanes share
the dot products of a key, then a lane owns a key, then lanes own elements of the answer.
"""

from __future__ import annotations

import mlx.core as mx

from minfer.kernels_mlx._call import ARGUMENTS, Call
from minfer.kernels_mlx._combine import combine
from minfer.kernels_mlx._gather import GATHER
from minfer.kernels_mlx._kernel import SIMD, MetalKernel
from minfer.kernels_mlx._softmax import SOFTMAX
from minfer.kernels_mlx._tile import CELLS_OF_CALL, TILE
from minfer.ops import Config
from minfer.window import PARTITION

HEADS = 4  # query heads of a threadgroup at most
WIDE = 256  # head_dim beyond which sums of several heads do not fit a threadgroup's memory
SIMDGROUPS = 4

# MOST: room for query heads. Grid: partition, (KV head, part of its heads), query.
_ATTN_SPLIT_SOURCE = (
    CELLS_OF_CALL
    + f"""
  constexpr int SIMDGROUPS = {SIMDGROUPS}, PARTITION = {PARTITION};
  constexpr int KEYS = PARTITION / SIMDGROUPS;  // of a simdgroup
"""
    + """
  constexpr int PIECES = D / 4, HELD = (PIECES + 31) / 32;
  // keys that the lanes add at once where a row has fewer pieces than there are lanes
  constexpr int SIDES = PIECES <= 4 ? 8 : PIECES <= 8 ? 4 : PIECES <= 16 ? 2 : 1;
  constexpr int DOTS = SIMDGROUPS * MOST * 32, SUMS = SIMDGROUPS * SIDES * MOST * PIECES;
  constexpr int WORK = DOTS > SUMS ? DOTS : SUMS;
  threadgroup float4 q_rows[MOST * PIECES];
  threadgroup float4 work[WORK];  // four parts of each dot product, then sums of values
  threadgroup float p[SIMDGROUPS * MOST * 32];
  threadgroup float tops[SIMDGROUPS * MOST], totals[SIMDGROUPS * MOST];

  const int lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const int thread_index = thread_index_in_threadgroup, query = threadgroup_position_in_grid.z;
  const int group = n_head / n_head_kv, parts = (group + MOST - 1) / MOST;
  const int kv_head = threadgroup_position_in_grid.y / parts;
  const int first_head = threadgroup_position_in_grid.y % parts * MOST;  // in the group
  const int heads = min(MOST, group - first_head), start = kv_head * D;
  const size_t row = size_t(query) * n_head + kv_head * group + first_head;
  const int pos = positions[query];
  const Window w = query_window<RUNS>(window, query, pos, width, causal);
  const int partition = w.first / PARTITION + threadgroup_position_in_grid.x;

  if (partition <= pos / PARTITION) {  // for the whole threadgroup
    // one by one: a slice of an array need not be aligned to a piece
    threadgroup float* q_elements = (threadgroup float*)q_rows;
    for (int i = thread_index; i < heads * D; i += SIMDGROUPS * 32) q_elements[i] = q[row * D + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float m[MOST], l[MOST];
    float4 acc[MOST][HELD];
    for (int h = 0; h < MOST; h++) {
      m[h] = -INFINITY;
      l[h] = 0.0f;
      for (int i = 0; i < HELD; i++) acc[h][i] = float4(0.0f);
    }
    threadgroup float4* dots = work + simdgroup * MOST * 32;
    threadgroup float* weights = p + simdgroup * MOST * 32;
    for (int tile = 0; tile < KEYS / 32; tile++) {
      const int index = partition * PARTITION + simdgroup * KEYS + tile * 32;
      // keys are counted from the index: one past pos may not fit 32 bits
      const int ahead = pos - index, hidden = w.first - index;
      if (ahead >= 0 && hidden < 32) {  // for the whole simdgroup
        for (int n = lane / 4; n < 32; n += 8) {
          float4 sums[MOST];
          for (int h = 0; h < MOST; h++) sums[h] = float4(0.0f);
          if (n >= hidden && n <= ahead) {
            const int cell = cell_of<RUNS>(w, index + n);
            for (int i = lane % 4; i < PIECES; i += 4) {
              const float4 piece = load4(k, cell, start + 4 * i);
              for (int h = 0; h < heads; h++)
                sums[h] += piece * q_rows[h * PIECES + i];
            }
          }
          for (int h = 0; h < heads; h++) {
            threadgroup float* four = (threadgroup float*)(dots + h * 32 + n);
            four[lane % 4] = (sums[h].x + sums[h].y) + (sums[h].z + sums[h].w);
          }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);

        const bool seen = lane >= hidden && lane <= ahead;
        for (int h = 0; h < heads; h++) {
          const float4 four = dots[h * 32 + lane];
          const float s = seen ? (four.x + four.y) + (four.z + four.w) : -INFINITY;
          const float top = max(m[h], simd_max(s)), decay = weight(m[h], top, factor);
          const float mine = seen ? exp2((s - top) * factor) : 0.0f;
          weights[h * 32 + lane] = mine;
          l[h] = l[h] * decay + simd_sum(mine);
          m[h] = top;
          for (int i = 0; i < HELD; i++) acc[h][i] *= decay;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);

        const int side = SIDES > 1 ? lane / PIECES : 0, piece = SIDES > 1 ? lane % PIECES : lane;
        for (int n = side; n < 32 && side < SIDES; n += SIDES) {
          if (n >= hidden && n <= ahead) {
            const int cell = cell_of<RUNS>(w, index + n);
            for (int i = 0; i < HELD; i++) {
              if (piece + 32 * i < PIECES) {
                const float4 value = load4(v, cell, start + 4 * (piece + 32 * i));
                for (int h = 0; h < heads; h++) acc[h][i] += weights[h * 32 + n] * value;
              }
            }
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last dot products have been read

    const int side = SIDES > 1 ? lane / PIECES : 0, piece = SIDES > 1 ? lane % PIECES : lane;
    for (int h = 0; h < heads; h++) {
      for (int i = 0; i < HELD; i++) {
        if (side < SIDES && piece + 32 * i < PIECES) {
          const int at = ((simdgroup * SIDES + side) * MOST + h) * PIECES;
          work[at + piece + 32 * i] = acc[h][i];
        }
      }
      if (lane == 0) {
        tops[simdgroup * MOST + h] = m[h];
        totals[simdgroup * MOST + h] = l[h];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const threadgroup float* values = (const threadgroup float*)work;
    for (int i = thread_index; i < heads * D; i += SIMDGROUPS * 32) {
      const int h = i / D, d = i % D;
      float top = -INFINITY, total = 0.0f, sum = 0.0f;
      for (int s = 0; s < SIMDGROUPS; s++) top = max(top, tops[s * MOST + h]);
      for (int s = 0; s < SIMDGROUPS; s++) {
        const float share = weight(tops[s * MOST + h], top, factor);
        for (int side = 0; side < SIDES; side++)
          sum += values[((s * SIDES + side) * MOST + h) * D + d] * share;
        total += totals[s * MOST + h] * share;
      }
      const size_t place = (row + h) * n_parts + threadgroup_position_in_grid.x;
      scratch_accs[place * D + d] = sum;
      if (d == 0) {
        scratch_states[2 * place] = top;
        scratch_states[2 * place + 1] = total;
      }
    }
  }
"""
)

_split = MetalKernel(
    "attn_split",
    (*ARGUMENTS, "n_parts"),
    ("scratch_states", "scratch_accs"),
    _ATTN_SPLIT_SOURCE,
    TILE + GATHER + SOFTMAX,
)


def attend_split(call: Call, config: Config) -> mx.array:
    """Run `split` on a checked call."""
    if not call.n_q:
        return mx.zeros_like(call.q)
    most = min(HEADS, config["heads"], 1 << (call.group - 1).bit_length())
    most = most if call.head_dim <= WIDE else 1
    n_parts, parts_of_heads = call.most_partitions, -(-call.group // most)
    room = (call.n_q, call.n_head, n_parts)
    states, accs = _split(
        *call.arguments,
        n_parts,
        outputs=[((*room, 2), mx.float32), ((*room, call.head_dim), mx.float32)],
        groups=(n_parts, call.n_head_kv * parts_of_heads, call.n_q),
        threads=SIMDGROUPS * SIMD,
        MOST=most,
        **call.template,
    )
    return combine(call, states, accs)
