"""Greedy choice."""

from __future__ import annotations

import numpy as np
import pytest

from minfer.errors import Refusal
from minfer.models.sampling import greedy


def test_greedy_takes_the_highest_and_the_lowest_id_of_a_tie() -> None:
    assert greedy(np.array([1.0, -2.0, 3.5, 3.0], np.float32), position=0) == 2
    assert greedy(np.array([1.0, 7.0, 7.0, 7.0], np.float32), position=0) == 1
    assert greedy(np.array([-0.0, 0.0], np.float32), position=0) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_stop(bad: float) -> None:
    logits = np.zeros(8, np.float32)
    logits[3] = bad
    with pytest.raises(Refusal, match="1 of 8 logits at position 41 are not finite") as caught:
        greedy(logits, position=41)
    assert caught.value.rule == "4.2" and caught.value.facts == {"position": 41, "bad": 1}
