"""Partial softmax states, and how they join (contract 6.3c).

A state of a query head is (m, l, acc): largest score, sum of weights, weighted values; weights are
exp2((score - m) * factor). The state of no keys is (-inf, 0, 0), and joining it changes nothing.
"""

SOFTMAX = """
// exp2((m - top) * factor); 0 for a state of no keys, also where both are of none.
METAL_FUNC float weight(float m, float top, float factor) {
  return m == -INFINITY ? 0.0f : exp2((m - top) * factor);
}
"""
