"""Rotation of heads by RoPE: shared by `rope`, `qkv_rope_store` and `map_q8_0_cells`."""

from __future__ import annotations

from minfer.ops import INTERLEAVED

ROTATE = """
// The dimension that turns together with `dim`, where 2 * n_pairs turn; past them itself.
// Pairs are (2i, 2i + 1) if `interleaved`, else (i, i + n_pairs).
METAL_FUNC int partner_of(int dim, int n_pairs, int interleaved) {
  if (dim >= 2 * n_pairs) return dim;
  if (interleaved) return dim ^ 1;
  return dim < n_pairs ? dim + n_pairs : dim - n_pairs;
}

// A value `own` at `dim` of a head, turned by a row c, s [n_pairs] of the tables; partner: the
// value at `partner_of`. A pair (a, b) becomes (a * c - b * s, b * c + a * s), every operation
// rounded by itself.
METAL_FUNC float turned(
    float own, float partner, int dim,
    const device float* c, const device float* s, int n_pairs, int interleaved) {
  if (dim >= 2 * n_pairs) return own;
  const bool first = interleaved ? dim % 2 == 0 : dim < n_pairs;
  const int pair = interleaved ? dim / 2 : first ? dim : dim - n_pairs;
  const float part = partner * s[pair];
  return own * c[pair] + (first ? -part : part);
}
"""


def interleaved(pairing: str) -> bool:
    """Whether pairs are dimensions 2i and 2i + 1."""
    return pairing == INTERLEAVED
