"""What the rounds of finals tell of the contenders, and what other rounds of them may tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuning.sweep.paired import Array, compare, differences, inflation, tick
from tuning.sweep.ties import Comparisons, Layout, Verdicts

RESAMPLES = 500
QUIETEST = 1 / 64  # of the noisiest case: quieter ones count for the same


@dataclass(frozen=True)
class Evidence:
    """Comparisons in finals, or in many of them. The control is the last contender.

    logs: by case, (finals, contenders, rounds). centres, variances: (finals, cases, contenders,
    contenders) of `paired.compare`. factors, steps: (finals, cases), what neighbouring rounds and
    the clock add to variances.
    """

    logs: tuple[Array, ...]
    centres: Array
    variances: Array
    factors: Array
    steps: Array

    @classmethod
    def of(cls, logs: Sequence[Array]) -> Evidence:
        """logs: by case, (contenders, rounds) or (finals, contenders, rounds)."""
        many = tuple(x.reshape(-1, *x.shape[-2:]) for x in logs)
        factors = np.stack([inflation(differences(x)) for x in many], axis=-1)
        steps = np.stack([tick(x) for x in many], axis=-1)
        return cls(many, *_compared(many, factors, steps), factors, steps)

    @property
    def rounds(self) -> tuple[int, ...]:
        """By case."""
        return tuple(x.shape[-1] for x in self.logs)

    @property
    def scales(self) -> tuple[float, ...]:
        """How noisy each case is, of the noisiest; powers of two, so that finals share bounds."""
        pairs = self.variances[..., *np.triu_indices(self.variances.shape[-1], 1)]
        scales = np.sqrt(np.median(pairs, axis=(0, -1)) * self.rounds)
        parts = np.clip(scales / max(scales.max(), np.finfo(float).tiny), QUIETEST, 1)
        return tuple((2.0 ** np.round(np.log2(parts))).tolist())

    @property
    def noise(self) -> Array:
        """(finals,): logarithm of what the default and the control differ by."""
        noise: Array = np.sqrt((self.centres[:, :, 0, -1] ** 2).mean(axis=-1))
        return noise

    def judge(self, layout: Layout, bound: float) -> Verdicts:
        """What the rule says of all contenders but the control."""
        finals = Comparisons(self.centres[..., :-1, :-1], self.variances[..., :-1, :-1], layout)
        return finals.judge(bound, self.noise)

    def rerun(self, seed: int) -> Evidence:
        """Other rounds of the first finals, many times: whole rounds drawn anew.

        Another run differs from this one by what this one is off and by what the other will be, so
        centres move twice as far in terms of variance.
        """
        rng = np.random.default_rng(seed)
        logs = []
        for x in self.logs:
            drawn = rng.integers(x.shape[-1], size=(RESAMPLES, x.shape[-1]))
            logs.append(x[0][:, drawn].swapaxes(0, 1))
        factors, steps = self.factors[:1], self.steps[:1]
        centres, variances = _compared(logs, factors, steps)
        spread = np.sqrt(2 * factors)[..., None, None]
        centres = self.centres[:1] + spread * (centres - self.centres[:1])
        return Evidence(tuple(logs), centres, variances, factors, steps)


def _compared(logs: Sequence[Array], factors: Array, steps: Array) -> tuple[Array, Array]:
    pairs = [compare(x) for x in logs]
    centres, variances = (np.stack(part, axis=1) for part in zip(*pairs, strict=True))
    # half a step as a standard error: one step apart is not apart
    clock = (steps[..., None, None] / 2) ** 2 * ~np.eye(centres.shape[-1], dtype=bool)
    return centres, variances * factors[..., None, None] + clock
