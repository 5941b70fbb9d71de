"""Choosing the next token from logits."""

from __future__ import annotations

import numpy as np

from minfer.errors import Refusal
from minfer.format import Floats


def greedy(logits: Floats, *, position: int) -> int:
    """The id of the highest of `logits` [n_vocab]; the lowest id among equals.

    position: of the token that gave the logits, for the message. Refuses logits that are not all
    finite (contract 4.2).
    """
    finite = np.isfinite(logits)
    if not finite.all():
        bad = int(np.count_nonzero(~finite))
        raise Refusal(
            "4.2",
            f"{bad} of {logits.size} logits at position {position} are not finite: the cache or "
            "the weights hold damaged values; start again, with an f32 cache if this returns",
            {"position": position, "bad": bad},
        )
    return int(np.argmax(logits))
