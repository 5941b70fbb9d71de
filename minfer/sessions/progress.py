"""A bar for work that takes a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[int], object]


@contextmanager
def bar(total: int, what: str, unit: str, *, show: bool) -> Iterator[Update]:
    """A bar on stderr while the block runs; gives what is called with the units that were done."""
    if not show:
        yield lambda done: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit, unit_scale=True, leave=False) as shown:
        yield shown.update
