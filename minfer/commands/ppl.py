"""`minfer ppl`: perplexity of a text with one cache format, or with several side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minfer.commands.columns import aligned
from minfer.commands.loading import load_engine, note_long_context
from minfer.commands.reading import read_text
from minfer.engine import Engine
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.kv.checks import whole_number
from minfer.offload import required
from minfer.ops import DECODE, PREFILL
from minfer.perplexity import DEFAULT_WINDOW, Result, Scores, Window, cut, measure, summarize


@dataclass(frozen=True)
class Task:
    """What is measured: one engine a format, the reference first."""

    file: str
    kind: str
    stride: int | None
    engines: list[Engine]
    tokens: list[int]
    windows: list[Window]

    @property
    def n_fed(self) -> int:
        """Tokens that all engines read together."""
        return sum(w.stop - w.start - 1 for w in self.windows) * len(self.engines)


def ppl(args: argparse.Namespace) -> None:
    """Measure and print: a table, or one JSON object.

    Interrupted, it prints the table of the windows that were finished, and leaves as interrupted.
    """
    task = _task(args)
    scores: list[list[Scores]] = []
    started = time.perf_counter()
    try:
        _measure(task, scores, show=not args.json and sys.stderr.isatty())
    except (KeyboardInterrupt, SystemError):
        if scores and not args.json:
            print(_table(task, scores))
        raise
    seconds = time.perf_counter() - started
    if args.json:
        print(json.dumps(_report(task, scores, seconds)))
        return
    print(_table(task, scores))
    print(f"{seconds:.1f} s, {task.n_fed / seconds:.0f} tokens/s", file=sys.stderr)
    note_long_context(task.engines[0])


def _task(args: argparse.Namespace) -> Task:
    """Every check that needs no model first, then the model."""
    if args.n_ctx is not None:
        whole_number(args.n_ctx, "n_ctx", "10", low=2)
    if args.max_tokens is not None:
        whole_number(args.max_tokens, "--max-tokens", "10", low=2)
    formats, text = _formats(args), _text(args.file)
    engines = _engines(args, formats)
    tokens = engines[0].encode(text)[: args.max_tokens]
    windows = cut(len(tokens), engines[0].store.n_ctx, args.stride)
    kind = DECODE if args.decode else PREFILL
    return Task(args.file, kind, args.stride, engines, tokens, windows)


def _formats(args: argparse.Namespace) -> list[str | KvFormat | None]:
    """The formats to measure, the reference first; None is the device's default."""
    if args.compare is None:
        return [args.cache_type]
    if args.cache_type is not None:
        raise Refusal(
            "0.3",
            f"--cache-type {args.cache_type} and --compare {args.compare} both name cache types; "
            "give one of the two",
            {"cache_type": args.cache_type, "compare": args.compare},
        )
    formats = [KvFormat.parse(name) for name in args.compare.split(",")]
    for fmt in formats:
        times = formats.count(fmt)
        if times > 1:
            what = f"--compare {args.compare} names {fmt} {times} times; name it once"
            raise Refusal("0.3", what, {"fmt": fmt.value, "times": times})
    return [*formats]


def _text(name: str) -> str:
    text = read_text(name)
    if not text:
        raise Refusal("1", f"{name} is empty; give a text", {"path": name})
    return text


def _engines(args: argparse.Namespace, formats: Sequence[str | KvFormat | None]) -> list[Engine]:
    """One engine a format, over the same weights."""
    first = load_engine(args, formats[0], args.n_ctx or DEFAULT_WINDOW)
    if args.n_ctx is None and first.hp.n_ctx_train < DEFAULT_WINDOW:
        first = first.with_cache(first.store.fmt, first.hp.n_ctx_train)
    others = [KvFormat.parse(fmt) for fmt in formats[1:] if fmt is not None]
    with required(need for fmt in others for need in first.store.needs(fmt)):
        return [first, *(first.with_cache(fmt) for fmt in others)]


def _measure(task: Task, scores: list[list[Scores]], *, show: bool) -> None:
    """Append the scores of every window to `scores`. show: a bar on stderr."""
    from tqdm import tqdm

    nll, n = 0.0, 0
    with tqdm(total=len(task.windows), unit="window", disable=not show, leave=False) as bar:
        for own in measure(task.engines, task.tokens, task.windows, task.kind):
            scores.append(own)
            nll, n = nll + float(own[0].nll.sum()), n + len(own[0].nll)
            bar.set_postfix_str(f"{nll / n:.4f} nats a token", refresh=False)
            bar.update()


def _report(task: Task, scores: list[list[Scores]], seconds: float) -> dict[str, Any]:
    return {
        "model": str(task.engines[0].path),
        "file": task.file,
        "kind": task.kind,
        "n_ctx": task.engines[0].store.n_ctx,
        "stride": task.stride,
        "tokens": len(task.tokens),
        "windows": len(task.windows),
        "seconds": seconds,
        "tokens_per_second": task.n_fed / seconds,
        "results": [
            {
                "cache_type": engine.store.fmt.value,
                **asdict(result),
                "receipts": [receipt.as_dict() for receipt in engine.receipts()],
            }
            for engine, result in zip(task.engines, summarize(scores), strict=True)
        ],
    }


def _table(task: Task, scores: list[list[Scores]]) -> str:
    """What was measured, then one line a format."""
    results, reference = summarize(scores), task.engines[0].store
    n, planned = len(scores), len(task.windows)
    windows = str(n) if n == planned else f"the first {n} of {planned}"
    rows = [["cache", "perplexity", f"against {reference.fmt}"]]
    rows[0] += ["KL mean", "KL max", "top-1", "RMS dp"]
    for engine, result in zip(task.engines, results, strict=True):
        rows.append([str(engine.store.fmt), *_cells(result)])
    if len(results) == 1:
        rows = [row[:2] for row in rows]
    return (
        f"{results[0].n_scored} of {len(task.tokens)} tokens of {task.file} scored by {task.kind}; "
        f"windows of {reference.n_ctx} tokens: {windows}\n{aligned(rows)}"
    )


def _cells(result: Result) -> list[str]:
    cells = [f"{result.perplexity:.4f}{_error(result.perplexity_error)}"]
    v = result.versus
    if v is None:
        return [*cells, *[""] * 5]
    change = f"{100 * (v.ratio - 1):+.4f}{_error(v.ratio_error, 100)} %"
    shares = [f"{100 * v.top1_agreement:.2f} %", f"{100 * v.prob_rms:.4f} %"]
    return [*cells, change, f"{v.kl_mean:.2e}", f"{v.kl_max:.2e}", *shares]


def _error(error: float | None, times: float = 1.0) -> str:
    return "" if error is None else f" +/- {times * error:.4f}"
