"""How close an answer must come to its oracle (contract 4.6)."""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.format import KvFormat

# Of max |v|, against the oracle that does not round the query.
CAP = {KvFormat.F32: 1e-5, KvFormat.F16: 5e-4, KvFormat.Q8_0: 2e-2}


def assert_within_budget(out: Any, exact: Any, single: Any) -> None:
    """At most twice what float32 numpy makes of the same inputs, plus 1e-6."""
    assert np.abs(out - exact).max() <= 2 * np.abs(single - exact).max() + 1e-6
