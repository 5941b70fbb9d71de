"""The compute graph: nodes in order, each bound to one kernel variant (contract 7)."""
