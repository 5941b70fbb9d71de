"""How long a generation took."""

from __future__ import annotations

from dataclasses import dataclass, field

from minfer.ops import DECODE, PREFILL


@dataclass
class Timing:
    """Tokens and seconds of one `generate`, by kind."""

    tokens: dict[str, int] = field(default_factory=lambda: {PREFILL: 0, DECODE: 0})
    seconds: dict[str, float] = field(default_factory=lambda: {PREFILL: 0.0, DECODE: 0.0})

    def add(self, kind: str, tokens: int, seconds: float) -> None:
        self.tokens[kind] += tokens
        self.seconds[kind] += seconds

    def rate(self, kind: str) -> float:
        """Tokens a second, 0 before the first one."""
        return self.tokens[kind] / self.seconds[kind] if self.seconds[kind] else 0.0
