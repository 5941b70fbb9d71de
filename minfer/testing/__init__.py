"""The store kit: random operations on a KV cache, checked against a plain model of it.

`machine` makes a test of any cache that has the four methods of `Cache`. Nothing here imports
hypothesis until a machine is made.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minfer.errors import Refusal
from minfer.testing.cache import Cache
from minfer.testing.checked import Checked

if TYPE_CHECKING:
    from minfer.testing.kv_store import KvStoreCache

__all__ = ["Cache", "Checked", "KvStoreCache", "machine"]


def machine(
    make_cache: Callable[[], Cache],
    *,
    examples: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    refusals: type[Exception] | tuple[type[Exception], ...] = Refusal,
) -> type[unittest.TestCase]:
    """A test that calls caches of `make_cache` at random and checks every row after every call.

    examples, steps: how many caches, and how many calls on each at most; None takes those of the
    hypothesis profile in force (100 and 50 where nothing else is set). seed: makes a run
    repeatable. refusals: what the cache raises when it refuses. The test's `tally` counts what
    was done. Refuses where hypothesis is missing.
    """
    try:
        from minfer.testing.rules import test_case
    except ModuleNotFoundError as missing:
        if missing.name != "hypothesis":
            raise
        raise Refusal(
            "10",
            "a machine needs hypothesis, which is not installed; pip install 'minfer[testing]'",
            {"missing": "hypothesis"},
        ) from None
    return test_case(make_cache, examples=examples, steps=steps, seed=seed, refusals=refusals)


def __getattr__(name: str) -> Any:
    if name == "KvStoreCache":
        from minfer.testing.kv_store import KvStoreCache

        return KvStoreCache
    raise AttributeError(f"module 'minfer.testing' has no attribute {name!r}")
