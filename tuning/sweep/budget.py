"""How long a sweep may go on: a number of trials, or a time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from minfer.errors import Refusal

TRIALS = re.compile("[0-9]{1,9}")
TIME = re.compile("(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,6})s)?")
EXAMPLES = "200 (trials), 10m, 1h30m or 45s"


@dataclass(frozen=True)
class Budget:
    """One of the two is a number, the other None."""

    trials: int | None = None
    seconds: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A budget as `--budget` takes it; refuses what is none."""
        found = TIME.fullmatch(text)
        trials = int(text) if TRIALS.fullmatch(text) else None
        hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0,) * 3
        time = 3600 * hours + 60 * minutes + seconds
        if not (trials or time):
            raise Refusal(
                "0.3", f"--budget {text!r} is none; give {EXAMPLES}", {"budget": text, "least": 1}
            )
        return cls(trials, None if trials else time)

    def share(self, trials: int, seconds: float) -> float:
        """How much of it is used up, 0 to 1."""
        used = trials / self.trials if self.trials else seconds / (self.seconds or 1)
        return min(1.0, used)

    def spent(self, trials: int, seconds: float) -> bool:
        """Whether no further trial may begin."""
        return self.share(trials, seconds) >= 1

    def text(self, trials: int, seconds: float) -> str:
        """One phrase for a progress bar: `12 of 200 trials`, `1m05s of 10m`."""
        if self.trials:
            return f"{trials} of {self.trials} trials"
        return f"{clock(int(seconds))} of {clock(self.seconds or 0)}"


def clock(seconds: int) -> str:
    """Seconds as `--budget` takes them: `1h30m`, `1m05s`, `0s`."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "m"), (rest, "s")]
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    while len(parts) > 1 and not parts[-1][0]:
        parts.pop()
    (first, unit), *others = parts
    return f"{first}{unit}" + "".join(f"{number:02d}{unit}" for number, unit in others)
