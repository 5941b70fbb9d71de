"""Logical index -> cell: the one place where a window's addresses come from (contract 6.3).

The logical index of a key is its position. Only addresses depend on the mode of a window, so bits
do not depend on it or on where rows lie. A causal window is the span [0, pos + 1), which needs no
array. Spans and runs are told apart by the constant RUNS.
"""

GATHER = """
// One query's keys: run r ends before logical index e<r>, its key j lies in cell b<r> + j.
// first: the first index the query sees.
struct Window { int first, e0, e1, e2, b0, b1, b2, b3; };

// window: int32 [n_q, 2] of [lo, hi), or [n_q, 4, 2] of (cell, length) in position order; not read
// if `causal`. width: sliding width, 0 for none.
template <bool RUNS>
METAL_FUNC Window query_window(const device int* window, int query, int pos, int width,
                               int causal) {
  Window w = {0, 0, 0, 0, 0, 0, 0, 0};
  if (RUNS) {
    const device int* row = window + 8 * query;
    w.first = pos + 1 - (row[1] + row[3] + row[5] + row[7]);
    w.e0 = w.first + row[1];
    w.e1 = w.e0 + row[3];
    w.e2 = w.e1 + row[5];
    w.b0 = row[0] - w.first;
    w.b1 = row[2] - w.e0;
    w.b2 = row[4] - w.e1;
    w.b3 = row[6] - w.e2;
  } else if (!causal) {
    w.first = pos + 1 - (window[2 * query + 1] - window[2 * query]);
    w.b0 = window[2 * query + 1] - 1 - pos;
  }
  if (width > 0) w.first = max(w.first, pos + 1 - width);
  return w;
}

// The cell of logical index j.
template <bool RUNS>
METAL_FUNC int cell_of(Window w, int j) {
  if (!RUNS) return j + w.b0;
  return j + (j < w.e0 ? w.b0 : j < w.e1 ? w.b1 : j < w.e2 ? w.b2 : w.b3);
}

// The last cell of a query's window, its own row.
template <bool RUNS>
METAL_FUNC int own_cell(const device int* window, int query, int pos, int causal) {
  if (!RUNS) return causal ? pos : window[2 * query + 1] - 1;
  const device int* row = window + 8 * query;
  int cell = pos;
  for (int r = 0; r < 4; r++) cell = row[2 * r + 1] > 0 ? row[2 * r] + row[2 * r + 1] - 1 : cell;
  return cell;
}
"""
