"""`python -m minfer.testing`: the machine over a cell store, or over a cache of one's own."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from minfer.testing import machine
from minfer.testing.cache import Cache


def main() -> int:
    """Run the machine, print what it did; an error, with the calls that led to it, leaves by 1."""
    args = _parser().parse_args()
    make = _named(args.cache) if args.cache else _store(args)
    case: Any = machine(make, examples=args.examples, steps=args.steps, seed=args.seed)
    start = time.monotonic()
    case("runTest").debug()
    print(table(case.tally))
    print(f"{args.examples} caches, up to {args.steps} calls each, seed {args.seed}: ", end="")
    print(f"no contradiction; {time.monotonic() - start:.1f} s")
    return 0


def table(tally: Counter[tuple[str, str]]) -> str:
    """How often each operation was done and refused, and what was seen inside."""
    lines = []
    for name in sorted({name for name, _ in tally}):
        counts = [f"{outcome} {tally[name, outcome]}" for outcome in ("done", "refused", "seen")]
        lines.append(f"{name:36}" + ", ".join(c for c in counts if not c.endswith(" 0")))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minfer.testing", description=__doc__)
    parser.add_argument("cache", nargs="?", help="module:function that makes a cache")
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache-type", default="f32", choices=("f32", "f16", "q8_0"))
    parser.add_argument("--n-ctx", type=int, default=16)
    parser.add_argument("--sanitize", action="store_true")
    return parser


def _named(target: str) -> Callable[[], Cache]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _store(args: argparse.Namespace) -> Callable[[], Cache]:
    from minfer.kv.store import KvStore
    from minfer.testing.kv_store import KvStoreCache

    def make() -> Cache:
        store = KvStore(
            n_layer=2,
            n_ctx=args.n_ctx,
            n_head_kv=3,
            head_dim=32,
            cache_type=args.cache_type,
            threads=1,
            sanitize=args.sanitize,
        )
        return KvStoreCache(store)

    return make


if __name__ == "__main__":
    sys.exit(main())
