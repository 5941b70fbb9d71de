"""`minfer run`: one prompt, one continuation."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from minfer.engine import Engine
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.kv.checks import whole_number
from minfer.memory import human
from minfer.ops import DECODE, PREFILL
from minfer.pull import resolve_model
from minfer.timing import Timing


def run(args: argparse.Namespace) -> None:
    """Generate and print: text as it comes and a summary, or one JSON object."""
    whole_number(args.max_tokens, "-n", "10", low=1)
    started, prompt = time.perf_counter(), _prompt(args)
    if not prompt:
        raise Refusal("1", "the prompt has no tokens; give at least one character", {"tokens": 0})
    engine = Engine.load(
        resolve_model(args.model),
        device=args.device,
        cache_type=args.cache_type,
        n_ctx=args.n_ctx,
        threads=args.threads,
        weights=args.weights,
        progress=not args.json and sys.stderr.isatty(),
    )
    tokens = _tokens(engine, prompt, args)
    generated = engine.generate(tokens, args.max_tokens, timing=(timing := Timing()))
    engine.warm_up()
    loaded = time.perf_counter() - started
    made: list[int] = []
    stream = engine.tokenizer.stream()
    text = ""
    for token in generated:
        made.append(token)
        if not engine.tokenizer.is_end(token):
            text += _show(stream.push(token), args)
    text += _show(stream.finish(), args)
    if args.json:
        report = _report(engine, tokens, made, text, timing)
        print(json.dumps({**report, "load_seconds": loaded}))
    else:
        print(flush=True)
        print(f"loaded in {loaded:.1f} s; {_summary(engine, timing)}", file=sys.stderr)
        trained = engine.hp.n_ctx_train
        if engine.store.n_ctx > trained:
            print(f"note: the model was trained for {trained} positions", file=sys.stderr)
        if args.receipt:
            print(*dict.fromkeys(map(str, engine.receipts())), sep="\n", file=sys.stderr)


def _prompt(args: argparse.Namespace) -> str:
    if args.file is None:
        return str(args.prompt)
    try:
        if args.file == "-":
            return sys.stdin.read() if sys.stdin else ""
        return Path(args.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            "0.2", f"cannot read the prompt from {args.file}: {error}", {"path": args.file}
        ) from error


def _tokens(engine: Engine, prompt: str, args: argparse.Namespace) -> list[int]:
    if not args.chat and args.system is None:
        return engine.encode(prompt)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    return engine.encode_chat([*messages, {"role": "user", "content": prompt}])


def _show(piece: str, args: argparse.Namespace) -> str:
    if not args.json:
        print(piece, end="", flush=True)
    return piece


def _summary(engine: Engine, timing: Timing) -> str:
    have, full = engine.cache_bytes(), engine.cache_bytes(KvFormat.F32)
    cache = f"cache {engine.store.fmt} {human(have)} for {engine.store.n_ctx} cells"
    if have != full:
        cache += f" ({full / have:.2f} times smaller than f32's {human(full)})"
    speed = "; ".join(
        f"{kind} {timing.tokens[kind]} tokens, {timing.rate(kind):.1f}/s"
        for kind in (PREFILL, DECODE)
    )
    return f"{speed}; {cache}"


def _report(
    engine: Engine, tokens: list[int], made: list[int], text: str, timing: Timing
) -> dict[str, Any]:
    return {
        "prompt_tokens": tokens,
        "tokens": made,
        "text": text,
        "cache_type": engine.store.fmt.value,
        "cache_bytes": engine.cache_bytes(),
        "cache_bytes_f32": engine.cache_bytes(KvFormat.F32),
        "prefill_tokens_per_second": timing.rate(PREFILL),
        "decode_tokens_per_second": timing.rate(DECODE),
        "receipts": [receipt.as_dict() for receipt in engine.receipts()],
    }
