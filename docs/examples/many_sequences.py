"""A store of 10,000 short sequences: what bookkeeping costs, and what compaction does.

    python docs/examples/many_sequences.py
    python docs/examples/many_sequences.py --sequences 1000 --cache-type q8_0

Every sequence reads one common prompt and appends rows of its own. A fifth of them are forked, some
write into the prompt (copy-on-write parts them from it), half are released, and the holes they
leave are packed away. All rows are checked at the end. The rows are small, so the time is the
store's own and not that of attention.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from tqdm import tqdm

from minfer import Batch, KvStore, Refusal

PROMPT_ROWS, OWN_CELLS = 32, 12
HEADS, HEAD_DIM = 1, 32
TOGETHER = 64  # sequences of one step, where they are fed together
PROMPT = 0  # the sequence that holds the common prompt until all share it


def value(seq: int, position: int) -> float:
    """The element of every row: exact in all formats, different for neighbours."""
    return float((seq * 31 + position * 7) % 127)


class Bench:
    """A store, and the seconds and calls of each kind of operation on it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.origin: dict[int, dict[int, int]] = {}  # by sequence: who wrote which position
        self.operations: dict[str, dict[str, float]] = {}

    def each(self, name: str, call: Callable[[Any], object], items: Iterable[Any], n: int) -> None:
        """Time `call` over all items; n operations in all."""
        bar = tqdm(list(items), desc=name, unit="op", disable=None, leave=False)
        started = time.perf_counter()
        for item in bar:
            call(item)
        seconds = time.perf_counter() - started
        self.operations[name] = {"n": n, "seconds": seconds, "per_second": n / seconds}

    def feed(self, seqs: list[int], position: Callable[[int], int]) -> None:
        """One step: a row for each sequence, at the position it gives."""
        at = [position(seq) for seq in seqs]
        rows = np.array([value(seq, pos) for seq, pos in zip(seqs, at, strict=True)], np.float32)
        k = np.broadcast_to(rows[:, None, None], (len(seqs), HEADS, HEAD_DIM)).copy()
        with self.store.step(Batch(seqs, at, "decode")) as step:
            step.write(0, k=k, v=k)
        for seq, pos in zip(seqs, at, strict=True):
            self.origin[seq][pos] = seq

    def check(self) -> int:
        """Every readable row is what was written; how many there are."""
        self.store.check()
        rows = 0
        for seq in self.store.sequences():
            got = self.store.export(seq, 0)[:, 0, 0]
            wrote = [value(self.origin[seq][pos], pos) for pos in range(len(got))]
            if np.abs(got - wrote).max() > 0.01 * 127:
                raise AssertionError(f"sequence {seq} reads back wrong rows")
            rows += len(got)
        return rows


def groups(seqs: list[int]) -> Iterator[list[int]]:
    """Sequences in parts of TOGETHER."""
    yield from (seqs[i : i + TOGETHER] for i in range(0, len(seqs), TOGETHER))


def prompt(bench: Bench) -> None:
    """Sequence PROMPT, as an import would bring it."""
    bench.store.reserve(PROMPT, PROMPT_ROWS)
    rows = np.array([value(PROMPT, pos) for pos in range(PROMPT_ROWS)], np.float32)
    k = np.broadcast_to(rows[None, :, None, None], (1, PROMPT_ROWS, HEADS, HEAD_DIM)).copy()
    bench.store.import_rows(PROMPT, k, k)
    bench.origin[PROMPT] = dict.fromkeys(range(PROMPT_ROWS), PROMPT)


def run(bench: Bench, n: int, draw: random.Random) -> dict[str, Any]:
    """All phases; statistics before and after the compaction."""
    store, seqs = bench.store, list(range(1, n + 1))

    def share(seq: int, parent: int = PROMPT) -> None:
        store.share_prefix(parent, seq, PROMPT_ROWS)
        bench.origin[seq] = dict(bench.origin[PROMPT])

    def fork(child: int) -> None:
        parent = parents[child]
        store.reserve(child, OWN_CELLS)
        share(child, parent)
        store.copy_prefix(parent, child, store.written(parent))  # its own rows only
        bench.origin[child] = dict(bench.origin[parent])

    prompt(bench)
    bench.each("reserve", lambda s: store.reserve(s, draw.randint(4, OWN_CELLS)), seqs, n)
    bench.each("share_prefix", share, seqs, n)
    store.release(PROMPT)  # its rows stay, an orphan, for those who read them
    bench.each("append, one a step", lambda s: bench.feed([s], store.written), seqs, n)
    name = f"append, {TOGETHER} a step"
    bench.each(name, lambda some: bench.feed(some, store.written), groups(seqs), n)
    children = range(n + 1, n + 1 + n // 5)
    parents = dict(zip(children, draw.sample(seqs, n // 5), strict=True))
    bench.each("fork (reserve, share, copy)", fork, children, len(children))
    writers = draw.sample(seqs, n // 10)
    bench.each(
        "copy-on-write step",
        lambda s: bench.feed([s], lambda _: PROMPT_ROWS - 1),
        writers,
        len(writers),
    )
    gone = draw.sample(seqs, n // 2)
    bench.each("release", store.release, gone, len(gone))
    before = asdict(store.stats())
    moved: list[Any] = []
    bench.each("defrag", lambda _: moved.extend(store.defrag()), [None], 1)
    return {"before": before, "after": asdict(store.stats()), "runs_moved": len(moved)}


def show(found: dict[str, Any]) -> None:
    print(f"{'operation':30} {'calls':>8} {'a second':>12} {'us each':>10}")
    for name, one in found["operations"].items():
        each = one["seconds"] / one["n"] * 1e6
        print(f"{name:30} {one['n']:8} {one['per_second']:12,.0f} {each:10,.1f}")
    print(f"\n{'statistics':22} {'before defrag':>14} {'after':>10}")
    for name, before in found["before"].items():
        print(f"{name:22} {before:14,} {found['after'][name]:10,}")
    print(f"\n{found['runs_moved']:,} runs moved; {found['rows_checked']:,} rows read back right")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=10_000, help="default %(default)s")
    parser.add_argument("--cache-type", choices=("f32", "f16", "q8_0"), default="f32")
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    n = args.sequences
    if n < 10:
        parser.error("--sequences is 10 or more")
    try:
        for size in (10, n):  # kernels are compiled in the first, small one
            cells = PROMPT_ROWS + (size + size // 5) * OWN_CELLS
            bench = Bench(KvStore(1, cells, HEADS, HEAD_DIM, cache_type=args.cache_type))
            found = run(bench, size, random.Random(args.seed))
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return int(refusal.exit_code)
    found |= {"operations": bench.operations, "rows_checked": bench.check()}
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
