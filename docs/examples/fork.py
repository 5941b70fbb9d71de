"""Fork a prompt into several continuations that read its rows together.

    python docs/examples/fork.py
    python docs/examples/fork.py --prompt "The door opened and" --forks 4 -n 60 --temp 1.0

The prompt is prefilled once. Every continuation shares its rows, so only what it writes itself
takes cells, and one batch decodes all of them a step further. The same continuations are then made
one after the other: the tokens are the same, because an answer does not depend on who else is in
the batch or where rows lie.

Needs `minfer pull smollm2`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from minfer import Batch, Engine, Refusal, Sampler, Sampling
from minfer.memory import human
from minfer.pull import resolve_model

PROMPT = (
    "The old lighthouse keeper climbed the stairs every evening. He lit the lamp, wrote a line in "
    "his book, and watched the ships go by until the sun came up. In forty years not one ship had "
    "been lost on the rocks below, and he was proud of that. One night in November, when the wind "
    "blew from the north and the sea was white, the lamp went out. He felt his way down to the "
    "store room, and there, behind the oil barrels, he saw"
)
TRUNK = 2**31 - 2  # the sequence that holds the prompt until all share it


@dataclass
class Made:
    """Continuations by sequence, the seconds until all were there, and the cells they took."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    cells: int = 0

    @property
    def rate(self) -> float:
        """Generated tokens a second, the prompt's time included."""
        return sum(map(len, self.tokens.values())) / self.seconds


def samplers(engine: Engine, prompt: list[int], args: argparse.Namespace) -> dict[int, Sampler]:
    """One a continuation, each with a seed of its own."""
    found = {}
    for seq in range(args.forks):
        options = Sampling(temperature=args.temp, top_p=args.top_p, seed=args.seed + seq)
        found[seq] = Sampler(options, engine.n_vocab)
        found[seq].see(prompt)
    return found


def together(engine: Engine, prompt: list[int], n: int, args: argparse.Namespace) -> Made:
    """All continuations at once, over one copy of the prompt's rows."""
    store, choose = engine.store, samplers(engine, prompt, args)
    made, started = Made({seq: [] for seq in choose}), time.perf_counter()
    store.reserve(TRUNK, len(prompt))
    logits = engine.prefill(prompt, TRUNK)
    for seq in choose:
        store.reserve(seq, n)  # cells for its own rows only
        store.share_prefix(TRUNK, seq, len(prompt))
    store.release(TRUNK)  # its rows stay for those who read them
    stats = store.stats()
    made.cells = stats.reserved + stats.orphaned
    rows = dict.fromkeys(choose, logits)
    for _ in tqdm(range(n), desc="together", unit="token", disable=None, leave=False):
        for seq in rows:
            token = choose[seq].pick(rows[seq], position=store.written(seq) - 1)
            made.tokens[seq].append(token)
        going = [seq for seq in rows if not engine.tokenizer.is_end(made.tokens[seq][-1])]
        if not going or len(made.tokens[going[0]]) == n:
            break
        last = [made.tokens[seq][-1] for seq in going]
        batch = Batch(going, [store.written(seq) for seq in going], "decode", last)
        rows = dict(zip(going, engine.forward(batch), strict=True))
    made.seconds = time.perf_counter() - started
    for seq in choose:
        store.release(seq)
    return made


def apart(engine: Engine, prompt: list[int], n: int, args: argparse.Namespace) -> Made:
    """The same continuations one after the other, each with a prompt of its own."""
    made, started = Made(), time.perf_counter()
    choose = samplers(engine, [], args)  # `generate` shows them the prompt
    for seq in tqdm(choose, desc="one after the other", unit="run", disable=None, leave=False):
        engine.store.reserve(seq, len(prompt) + n)
        made.cells += engine.store.cap(seq)
        made.tokens[seq] = list(engine.generate(prompt, n, sampling=choose[seq], seq=seq))
        engine.store.release(seq)
    made.seconds = time.perf_counter() - started
    return made


def report(engine: Engine, prompt: list[int], one: Made, many: Made) -> dict[str, Any]:
    """Everything that is printed, as data."""
    each = engine.cache_bytes() // engine.store.n_ctx
    return {
        "prompt_tokens": len(prompt),
        "texts": [engine.tokenizer.decode(tokens) for tokens in one.tokens.values()],
        "same_tokens": one.tokens == many.tokens,
        "cells": {"together": one.cells, "copies": many.cells},
        "bytes": {"together": one.cells * each, "copies": many.cells * each},
        "seconds": {"together": one.seconds, "one_after_the_other": many.seconds},
        "tokens_per_second": {"together": one.rate, "one_after_the_other": many.rate},
    }


def show(found: dict[str, Any]) -> None:
    for number, text in enumerate(found["texts"], 1):
        print(f"{number}. ... {' '.join(text.split())}\n")
    cells, sizes, rates = found["cells"], found["bytes"], found["tokens_per_second"]
    together, apart = rates["together"], rates["one_after_the_other"]
    print(f"{found['prompt_tokens']} prompt tokens, {len(found['texts'])} continuations")
    print(
        f"cells      {cells['together']} with one shared prompt ({human(sizes['together'])}), "
        f"{cells['copies']} with copies ({human(sizes['copies'])})"
    )
    print(
        f"tokens/s   {together:.1f} together, {apart:.1f} one after the other: "
        f"{together / apart:.1f} times"
    )
    print(f"the same tokens both ways: {'yes' if found['same_tokens'] else 'NO'}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a pulled model or a GGUF file")
    parser.add_argument("--prompt", default=PROMPT, help="default: the opening of a story")
    parser.add_argument("--forks", type=int, default=8, help="how many; default %(default)s")
    parser.add_argument("-n", type=int, default=40, help="tokens of each; default %(default)s")
    parser.add_argument("--temp", type=float, default=0.9, help="default %(default)s")
    parser.add_argument("--top-p", type=float, default=0.95, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the first; default %(default)s")
    parser.add_argument("--cache-type", choices=("f32", "f16", "q8_0"), default="q8_0")
    parser.add_argument("--weights", choices=("f32", "f16", "q8_0"), default="q8_0")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.forks < 1 or args.n < 1:
        parser.error("--forks and -n are 1 or more")
    try:
        engine = Engine.load(
            resolve_model(args.model),
            cache_type=args.cache_type,
            weights=args.weights,
            progress=sys.stderr.isatty(),
        )
        prompt = engine.encode(args.prompt)
        for run in (together, apart):  # kernels are compiled at their first call
            run(engine, prompt, 2, args)
        one, many = (run(engine, prompt, args.n, args) for run in (together, apart))
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return int(refusal.exit_code)
    found = report(engine, prompt, one, many)
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
