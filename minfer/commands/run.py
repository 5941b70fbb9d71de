"""`minfer run`: one prompt, one continuation."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import Any

from minfer.commands.loading import load_engine, note_long_context
from minfer.commands.options import biases_of, sampling_of
from minfer.commands.reading import read_text
from minfer.engine import Engine
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.generation import CACHE, END, LENGTH, STOP, Generation
from minfer.kv.checks import whole_number
from minfer.memory import human
from minfer.models.sampling import Sampler, Sampling
from minfer.ops import DECODE, PREFILL
from minfer.timing import Timing

FEW = 8  # tokens


def run(args: argparse.Namespace) -> None:
    """Generate and print: text as it comes and a summary, or one JSON object."""
    whole_number(args.max_tokens, "-n", "10", low=1)
    sampling, started = sampling_of(args), time.perf_counter()
    prompt = args.prompt if args.file is None else read_text(args.file)
    if not prompt:
        raise Refusal("1", "the prompt has no tokens; give at least one character", {"tokens": 0})
    engine = load_engine(args, args.cache_type, args.n_ctx)
    biases = biases_of(args, engine.tokenizer)
    sampler = Sampler(replace(sampling, logit_bias=biases), engine.n_vocab)
    tokens, timing = _tokens(engine, prompt, args), Timing()
    generation = engine.stream(
        tokens,
        args.max_tokens,
        stop=args.stop,
        continues=not _chat(args),
        sampling=sampler,
        timing=timing,
    )
    engine.warm_up()
    loaded = time.perf_counter() - started
    for piece in generation:
        if not args.json:
            print(piece, end="", flush=True)
    if args.json:
        report = _report(engine, tokens, generation, sampler.sampling, timing)
        print(json.dumps({**report, "load_seconds": loaded}))
    else:
        print(flush=True)
        seed = sampler.sampling.seed
        drawn = "" if seed is None else f"seed {seed}; "
        ended = f"ended by {_ended(generation)}; {_summary(engine, timing)}"
        print(f"loaded in {loaded:.1f} s; {drawn}{ended}", file=sys.stderr)
        note_long_context(engine)
        if args.receipt:
            print(*dict.fromkeys(map(str, engine.receipts())), sep="\n", file=sys.stderr)


def _chat(args: argparse.Namespace) -> bool:
    return args.chat or args.system is not None


def _tokens(engine: Engine, prompt: str, args: argparse.Namespace) -> list[int]:
    if not _chat(args):
        return engine.encode(prompt)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    return engine.encode_chat([*messages, {"role": "user", "content": prompt}])


def _ended(generation: Generation) -> str:
    """Why the text ends where it does, and the option that moves the end."""
    stop = f"--stop {generation.stop!r}"
    reasons = {END: "the model", STOP: stop, LENGTH: "-n", CACHE: "--n-ctx"}
    return reasons[generation.finish_reason or END]


def _summary(engine: Engine, timing: Timing) -> str:
    have, full = engine.cache_bytes(), engine.cache_bytes(KvFormat.F32)
    cache = f"cache {engine.store.fmt} {human(have)} for {engine.store.n_ctx} cells"
    if have != full:
        cache += f" ({full / have:.2f} times smaller than f32's {human(full)})"
    return "; ".join([*(_speed(timing, kind) for kind in (PREFILL, DECODE)), cache])


def _speed(timing: Timing, kind: str) -> str:
    """Few tokens say nothing about speed."""
    n = timing.tokens[kind]
    counted = f"{kind} {n} token{'' if n == 1 else 's'}"
    return counted if n < FEW else f"{counted}, {timing.rate(kind):.1f}/s"


def _report(
    engine: Engine, tokens: list[int], made: Generation, sampling: Sampling, timing: Timing
) -> dict[str, Any]:
    return {
        "prompt_tokens": tokens,
        "tokens": made.tokens,
        "text": made.text,
        "finish_reason": made.finish_reason,
        "stop": made.stop,
        "seed": sampling.seed,
        "sampling": sampling.as_dict(),
        "cache_type": engine.store.fmt.value,
        "cache_bytes": engine.cache_bytes(),
        "cache_bytes_f32": engine.cache_bytes(KvFormat.F32),
        "prefill_tokens_per_second": timing.rate(PREFILL),
        "decode_tokens_per_second": timing.rate(DECODE),
        "receipts": [receipt.as_dict() for receipt in engine.receipts()],
    }
