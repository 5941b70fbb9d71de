"""`python -m minfer.testing`: the machine over a cell store, or over a cache of one's own."""

from __future__ import annotations

import argparse
import builtins
import importlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from minfer.errors import Refusal
from minfer.testing import machine
from minfer.testing.cache import Cache


def main() -> int:
    """Run the machine, print what it did; an error, with the calls that led to it, leaves by 1."""
    args = _parser().parse_args()
    start = time.monotonic()
    try:
        make = _counted(_named(args.cache) if args.cache else _store(args), args.examples)
        kinds: tuple[type[Exception], ...] = (
            Refusal,
            *(_exception(name) for name in args.refusals),
        )
        how = {"examples": args.examples, "steps": args.steps, "seed": args.seed}
        case: Any = machine(make, refusals=kinds, **how)
    except Refusal as refusal:
        print(f"python -m minfer.testing: {refusal}", file=sys.stderr)
        return refusal.exit_code
    case("runTest").debug()
    print(table(case.tally))
    print(f"{args.examples} caches, up to {args.steps} calls each, seed {args.seed}: ", end="")
    print(f"no contradiction; {time.monotonic() - start:.1f} s")
    return 0


def _counted(make: Callable[[], Cache], examples: int) -> Callable[[], Cache]:
    """`make`, telling a terminal how far the run is. Shorter failures make more caches."""
    made = itertools.count(1)

    def counted() -> Cache:
        n = next(made)
        if n % 10 == 0 and sys.stderr.isatty():
            print(f"\r{n} of {examples} caches ", end="", file=sys.stderr, flush=True)
        return make()

    return counted


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
    add = parser.add_argument
    add("--examples", type=_positive, default=300, help="caches to run over (300)")
    add("--steps", type=_positive, default=50, help="calls on each cache at most (50)")
    add(
        "--refusals",
        nargs="*",
        default=[],
        help="what the cache refuses with: ValueError, mine:Full",
    )
    add("--seed", type=int, default=0, help="another one makes other calls (0)")
    store = parser.add_argument_group("the store, where no cache is named").add_argument
    store("--cache-type", default="f32", choices=("f32", "f16", "q8_0"))
    store("--device", default="cpu", help="where its kernels run (cpu)")
    store("--n-ctx", type=_positive, default=16, help="cells (16); few make operations collide")
    store("--sanitize", action="store_true", help="NaN in every cell that nobody may read")
    return parser


def _positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _named(target: str) -> Callable[[], Cache]:
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        message = f"{target!r} names no function: {error}; give module:function, importable here"
        raise Refusal("10", message, {"cache": target}) from None


def _exception(name: str) -> type[Exception]:
    """An exception of Python, or `module:Class`."""
    found: object = _named(name) if ":" in name else getattr(builtins, name, None)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        message = f"--refusals {name!r} names no exception; give ValueError, or module:Class"
        raise Refusal("10", message, {"refusals": name})
    return found


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
            device=args.device,
            threads=1,
            sanitize=args.sanitize,
        )
        return KvStoreCache(store)

    return make


if __name__ == "__main__":
    sys.exit(main())
