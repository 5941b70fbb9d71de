"""The machine of minfer.testing over a cell store, up to the first contradiction; see README.md.

Run with a faulted copy of minfer on PYTHONPATH. Prints a line of JSON: where minfer came from, the
number of the first cache that contradicts its models (null if none does) and what is wrong.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import hypothesis

import minfer
from minfer import testing
from minfer.kv.store import KvStore
from minfer.testing.kv_store import KvStoreCache

STEPS = 50

# A failure is reported as it came: making it small takes longer than finding it.
FIRST = hypothesis.settings(
    phases=[hypothesis.Phase.generate],
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n-ctx", type=int, default=16)
    parser.add_argument("--sanitize", action="store_true")
    args = parser.parse_args()
    made = 0

    def make() -> testing.Cache:
        nonlocal made
        made += 1
        store = KvStore(2, args.n_ctx, 3, 32, cache_type="f32", threads=1, sanitize=args.sanitize)
        return KvStoreCache(store)

    hypothesis.settings.register_profile("first", FIRST)
    hypothesis.settings.load_profile("first")
    case: Any = testing.machine(make, examples=args.examples, steps=STEPS, seed=args.seed)
    found, message = None, ""
    try:
        case("runTest").debug()
    except Exception as error:
        found = made - 1  # hypothesis ran the last one twice
        message = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    print(json.dumps({"minfer": minfer.__file__, "found": found, "message": message}))


if __name__ == "__main__":
    main()
