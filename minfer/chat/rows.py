"""The rows of a conversation: one sequence of an engine, and the stream it holds."""

from __future__ import annotations

import time
from collections.abc import Iterator

from minfer.chat.events import Fed
from minfer.chat.stream import Mark, Stream, common
from minfer.engine import Engine
from minfer.format import Floats
from minfer.ops import DECODE, PREFILL
from minfer.timing import Timing

CHUNK = 256  # prompt tokens between two moments at which a conversation can be stopped


class Rows:
    """stream: what the rows stand for, a token a row at all times. turn: where the last turn began.

    logits: after the last token that was fed.
    """

    def __init__(self, engine: Engine, seq: int) -> None:
        """Reserves the whole cache for `seq`, or empties the cells it holds."""
        if engine.store.has(seq):
            engine.store.truncate(seq, 0)
        else:
            engine.store.reserve(seq, engine.store.n_ctx)
        self.engine, self.seq = engine, seq
        self.stream = Stream()
        self.turn = 0
        self.logits: Floats | None = None

    @property
    def written(self) -> int:
        return self.engine.store.written(self.seq)

    @property
    def cap(self) -> int:
        return self.engine.store.cap(self.seq)

    def replace(self, stream: Stream) -> None:
        """Keep the rows of `stream`, which are the first ones, and no more."""
        self.engine.store.truncate(self.seq, len(stream.tokens))
        self.stream = stream
        self.turn = min(self.turn, len(stream.tokens))

    def remove(self, start: Mark, end: Mark) -> None:
        """Take the rows from one control token up to another out of the middle (contract 5.7)."""
        self.engine.remove(self.seq, start.at, end.at - start.at)
        self.stream = self.stream.without(start, end)
        self.turn = max(start.at, self.turn - (end.at - start.at))

    def feed(self, target: Stream, keep: int, timing: Timing) -> Iterator[Fed]:
        """Make the rows those of `target`; at most `keep` of the rows that fit already stay."""
        kept = min(keep, common(target.tokens, self.stream.tokens))
        self.replace(target.first(kept))
        total = len(target.tokens) - kept
        for first in range(kept, len(target.tokens), CHUNK):
            part, started = target.tokens[first : first + CHUNK], time.perf_counter()
            try:
                self.logits = self.engine.prefill(part, self.seq)
            finally:
                self.stream.tokens[:] = target.tokens[: self.written]
            timing.add(PREFILL, len(part), time.perf_counter() - started)
            yield Fed(first + len(part) - kept, total)

    def decode(self, token: int, timing: Timing) -> None:
        """Feed one generated token."""
        started = time.perf_counter()
        self.stream.tokens.append(token)
        try:
            self.logits = self.engine.decode(token, self.seq)
        finally:
            del self.stream.tokens[self.written :]
        timing.add(DECODE, 1, time.perf_counter() - started)
