"""What a chat shows: text for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import sys
from typing import Any, Protocol, TextIO

from minfer.chat.answer import Answer
from minfer.chat.events import Dropped, Event, Fed, Token
from minfer.chat.rows import CHUNK
from minfer.errors import Refusal
from minfer.ops import DECODE, PREFILL
from minfer.timing import Timing

WIDTH = len("prefill tokens per second")
LONG = 2 * CHUNK  # tokens to feed from which on a terminal shows a bar
# What a terminal takes for commands, but for line ends and tabs, and what turns text around.
TURNING = {0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
CONTROLS = {*range(32), *range(127, 160), *TURNING} - {9, 10}
SAFE = dict.fromkeys(CONTROLS, "\ufffd") | {13: ""}


class Show(Protocol):
    """Where a chat tells what happens."""

    def start(self, facts: dict[str, Any]) -> None: ...
    def event(self, event: Event) -> None: ...
    def answer(self, answer: Answer) -> None: ...
    def note(self, text: str) -> None: ...
    def stats(self, facts: dict[str, Any]) -> None: ...
    def saved(self, path: str, tokens: int) -> None: ...
    def error(self, refusal: Refusal) -> None: ...


class Text:
    """Answers on one stream, remarks on another. terminal: both are one, in front of a person."""

    def __init__(self, out: TextIO, remarks: TextIO, *, terminal: bool) -> None:
        self._out, self._remarks, self._terminal = out, remarks, terminal
        self._bar: Any = None
        self._open = False  # a line of an answer has begun

    def start(self, facts: dict[str, Any]) -> None:
        begun = {
            "new": "new chat",
            "resumed": f"resumed {facts['tokens']} tokens",
            "rendered": f"rendered {facts['tokens']} tokens again",
        }[facts["state"]]
        if facts["state"] == "rendered" and not facts["tokens"]:
            begun = "no turns yet"
            if facts["messages"]:
                begun = "nothing was fed; the next message brings what fits of the history"
        where = f"{facts['session']}: " if facts["session"] else ""
        seed = "" if facts["seed"] is None else f"; seed {facts['seed']}"
        cache = f"cache {facts['cache_type']} for {facts['n_ctx']} cells"
        self.note(f"{facts['model']}; {cache}; {where}{begun}{seed}")
        if self._terminal:
            self.note("/help lists commands")

    def event(self, event: Event) -> None:
        if isinstance(event, Fed):
            self._progress(event)
        elif isinstance(event, Dropped):
            self.note(str(event))
        elif event.text:
            shown = event.text.translate(SAFE) if self._terminal else event.text
            print(shown, end="", file=self._out, flush=True)
            self._open = True

    def _progress(self, fed: Fed) -> None:
        if self._terminal and fed.total >= LONG:
            from tqdm import tqdm

            if self._bar is None:
                self._bar = tqdm(total=fed.total, unit="token", leave=False, file=self._remarks)
            self._bar.update(fed.done - self._bar.n)
            if fed.done == fed.total:
                self._bar.close()
                self._bar = None

    def answer(self, answer: Answer) -> None:
        self._open = False
        print(file=self._out, flush=True)
        if answer.finish_reason not in ("end", "stop"):
            why = {"length": "-n", "cache": "a full context", "interrupted": "you"}
            self.note(f"(cut off by {why[str(answer.finish_reason)]})")

    def note(self, text: str) -> None:
        """A line of its own; an answer that is under way goes on in a new one.

        Whatever file its text is from, it steers no terminal.
        """
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._open:
            self._open = False
            print(file=self._out, flush=True)
        print(text.translate(SAFE), file=self._remarks, flush=True)

    def stats(self, facts: dict[str, Any]) -> None:
        for name, value in facts.items():
            if name != "cache_bytes":  # `cache` has them for people
                self.note(f"{name.replace('_', ' '):{WIDTH}} {value}")

    def saved(self, path: str, tokens: int) -> None:
        self.note(f"saved {path} and {path}.kv, {tokens} tokens")

    def error(self, refusal: Refusal) -> None:
        self.note(f"minfer: {refusal}")


class Json:
    """Every event as a line of JSON. Progress is not told."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def _tell(self, event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **facts}), file=self._out, flush=True)

    def start(self, facts: dict[str, Any]) -> None:
        self._tell("start", **facts)

    def event(self, event: Event) -> None:
        if isinstance(event, Token):
            self._tell("token", token=event.token, text=event.text)
        elif isinstance(event, Dropped):
            self.note(str(event))

    def answer(self, answer: Answer) -> None:
        self._tell(
            "answer",
            text=answer.text,
            tokens=answer.tokens,
            finish_reason=answer.finish_reason,
            stop=answer.stopped,
            **speeds(answer.timing),
        )

    def note(self, text: str) -> None:
        self._tell("note", text=text)

    def stats(self, facts: dict[str, Any]) -> None:
        self._tell("stats", **facts)

    def saved(self, path: str, tokens: int) -> None:
        self._tell("saved", path=path, tokens=tokens)

    def error(self, refusal: Refusal) -> None:
        self._tell("error", message=refusal.message, rule=refusal.rule, exit_code=refusal.exit_code)


def speeds(timing: Timing) -> dict[str, Any]:
    """Tokens by kind, and tokens a second."""
    return {
        "prefill_tokens": timing.tokens[PREFILL],
        "decode_tokens": timing.tokens[DECODE],
        "prefill_tokens_per_second": round(timing.rate(PREFILL), 1),
        "decode_tokens_per_second": round(timing.rate(DECODE), 1),
    }


def show(*, as_json: bool, terminal: bool) -> Show:
    """Where this process shows a chat."""
    return Json(sys.stdout) if as_json else Text(sys.stdout, sys.stderr, terminal=terminal)
