"""Numbers as people read them."""

from __future__ import annotations


def counted(n: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def percent(share: float, digits: int = 3) -> str:
    """A share with so many digits, zeros at the end included: `0.0207 %`, `1.00 %`."""
    return f"{f'{100 * share:#.{digits}g}'.rstrip('.')} %"
