"""Take a turn out of the middle of a chat and go on, without feeding the rest again.

    python docs/examples/edit_chat.py
    python docs/examples/edit_chat.py --drop 1 --question "What did I ask you first?"

The rows of a chat lie in the cache. Dropping a turn moves the later rows down and turns their keys
to the new positions; only the next question has to be fed. The plain way is to render the shorter
chat and prefill all of it. Both are timed up to the first token of the answer.

The answers may differ: the rows that stay were computed when the dropped turn was still in sight
and keep what they saw of it. Where that must not be, render afresh.

Needs `minfer pull smollm2`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from minfer import Engine, Refusal
from minfer.generation import Generation
from minfer.pull import resolve_model

TURNS = (
    ("I am planning a week of hiking in the Alps. What should I pack?",
     "Pack layers: a warm fleece, a rain jacket, light trousers and good socks. Wear boots that "
     "you have walked in before. Take a map, a head torch, a small first aid kit, sun cream and "
     "enough water for half a day. Keep the whole bag below ten kilos."),
    ("Tell me about the history of the printing press.",
     "Johannes Gutenberg built a press with movable metal type in Mainz around 1450. A page was "
     "set from single letters, inked and pressed on paper, then the letters were used again. "
     "Within fifty years presses stood in more than two hundred towns, and books that had cost a "
     "house cost a week's wages. Ideas travelled faster than anyone could stop them."),
    ("Which food keeps well on the way?",
     "Hard cheese, dark bread, nuts, dried fruit and chocolate keep for days without cooling. "
     "Couscous needs only hot water. Buy fresh fruit in the villages you pass."),
)  # fmt: skip
QUESTION = "Name three things from your advice that I must not forget."
SEQ = 0


def messages(turns: Sequence[tuple[str, str]], question: str | None = None) -> list[dict[str, str]]:
    """A chat as the template takes it; with a question, up to the answer."""
    found = []
    for asked, answered in turns:
        found += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*found, {"role": "user", "content": question}] if question else found


def in_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def first_piece(engine: Engine, tokens: list[int], n: int) -> tuple[Generation, str]:
    """An answer that has begun, and its first piece of text."""
    answer = engine.stream(tokens, n, seq=SEQ)
    return answer, next(answer, "")


def edited(engine: Engine, turns: list[tuple[str, str]], drop: int, args: Any) -> dict[str, Any]:
    """Turn `drop` leaves the cache; what is rendered afterwards is fed from where rows end."""
    kept = [turn for i, turn in enumerate(turns) if i != drop]
    before = engine.encode_chat(messages(turns, args.question))
    after = engine.encode_chat(messages(kept, args.question))
    held = before[: in_common(before, engine.encode_chat(messages(turns)))]  # the chat so far
    engine.store.reserve(SEQ, len(before) + args.n)
    engine.prefill(held, SEQ)

    started = time.perf_counter()
    length = len(before) - len(after)
    start = min(in_common(before, after), len(held) - length)
    if held[:start] + held[start + length :] != after[: len(held) - length]:
        raise SystemExit("this template renders the other turns in other tokens: render afresh")
    engine.remove(SEQ, start, length)
    removing = time.perf_counter() - started
    rest = after[engine.store.written(SEQ) :]
    answer, piece = first_piece(engine, rest, args.n)
    seconds = time.perf_counter() - started
    return {
        "cached": len(held),
        "removed": length,
        "fed": len(rest),
        "seconds": seconds,
        "remove_seconds": removing,
        "text": piece + "".join(answer),
    }


def rendered(engine: Engine, turns: list[tuple[str, str]], drop: int, args: Any) -> dict[str, Any]:
    """The shorter chat from the first token on."""
    kept = [turn for i, turn in enumerate(turns) if i != drop]
    tokens = engine.encode_chat(messages(kept, args.question))
    engine.store.reserve(SEQ, len(tokens) + args.n)
    started = time.perf_counter()
    answer, piece = first_piece(engine, tokens, args.n)
    seconds = time.perf_counter() - started
    return {"fed": len(tokens), "seconds": seconds, "text": piece + "".join(answer)}


def show(found: dict[str, Any]) -> None:
    edit, plain = found["edited"], found["rendered"]
    print(f"dropped: {found['dropped']}\nasked:   {found['question']}\n")
    print(f"from the edited cache: {edit['text'].strip()}\n")
    print(f"rendered afresh:       {plain['text'].strip()}\n")
    print(
        f"edited    {edit['removed']} of {edit['cached']} rows removed in "
        f"{edit['remove_seconds'] * 1e3:.1f} ms, {edit['fed']} tokens fed, first text after "
        f"{edit['seconds'] * 1e3:.0f} ms"
    )
    print(
        f"rendered  {plain['fed']} tokens fed, first text after {plain['seconds'] * 1e3:.0f} ms: "
        f"{plain['seconds'] / edit['seconds']:.1f} times as long"
    )
    if edit["text"] != plain["text"]:
        print("The answers differ: rows that stayed were computed with the dropped turn in sight.")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a pulled model or a GGUF file")
    parser.add_argument("--drop", type=int, default=2, metavar="TURN", choices=range(1, 4),
                        help="which turn, 1 to 3; default %(default)s")  # fmt: skip
    parser.add_argument("--question", default=QUESTION, help="asked after the edit")
    parser.add_argument("--repeat", type=int, default=1, help="every turn so often: a longer chat")
    parser.add_argument("-n", type=int, default=60, help="tokens of an answer; default %(default)s")
    parser.add_argument("--cache-type", choices=("f32", "f16", "q8_0"), default="q8_0",
                        help="f16 refuses: it cannot turn keys; default %(default)s")  # fmt: skip
    parser.add_argument("--weights", choices=("f32", "f16", "q8_0"), default="q8_0")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.repeat < 1 or args.n < 1:
        parser.error("--repeat and -n are 1 or more")
    turns, drop = list(TURNS) * args.repeat, args.drop - 1
    found: dict[str, Any] = {"dropped": turns[drop][0], "question": args.question}
    try:
        engine = Engine.load(
            resolve_model(args.model),
            cache_type=args.cache_type,
            weights=args.weights,
            progress=sys.stderr.isatty(),
        )
        for _ in range(2):  # kernels are compiled in the first round
            for way in (edited, rendered):
                found[way.__name__] = way(engine, turns, drop, args)
                engine.store.release(SEQ)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return int(refusal.exit_code)
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
