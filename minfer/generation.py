"""Continuing a prompt: token after token, and as text that says why it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from minfer.errors import Refusal
from minfer.models.sampling import Sampler, Sampling
from minfer.models.text_stream import TextStream
from minfer.ops import DECODE, PREFILL
from minfer.prompts import budget, checked_prompt
from minfer.timing import Timing

if TYPE_CHECKING:
    from minfer.engine import Engine

END, STOP, LENGTH, CACHE = "end", "stop", "length", "cache"  # why a generation ended


def token_ids(
    engine: Engine,
    tokens: Sequence[int],
    max_tokens: int | None,
    sampling: Sampling | Sampler | None,
    seq: int,
    timing: Timing | None,
) -> Iterator[int]:
    """`Engine.generate`: every check, then a generator of ids that has run nothing yet."""
    ids = checked_prompt(tokens, engine.n_vocab)
    limit = budget(engine.store, len(ids), max_tokens, seq)
    sampler = sampler_of(sampling, engine.n_vocab)
    return _run(engine, ids, limit, seq, sampler, Timing() if timing is None else timing)


def _run(
    engine: Engine, tokens: list[int], limit: int, seq: int, sampler: Sampler, timing: Timing
) -> Iterator[int]:
    """A token is fed when the one after it is asked for: who stops asking runs nothing more."""
    if not engine.store.has(seq):
        engine.store.reserve(seq, engine.store.n_ctx)
    started = time.perf_counter()
    logits = engine.prefill(tokens, seq)
    timing.add(PREFILL, len(tokens), time.perf_counter() - started)
    sampler.see(tokens)
    for count in range(limit):
        started = time.perf_counter()
        token = sampler.pick(logits, position=engine.store.written(seq) - 1)
        choosing = time.perf_counter() - started
        yield token
        if engine.tokenizer.is_end(token) or count + 1 == limit:
            return
        started = time.perf_counter()
        logits = engine.decode(token, seq)
        timing.add(DECODE, 1, choosing + time.perf_counter() - started)


def sampler_of(sampling: Sampling | Sampler | None, n_vocab: int) -> Sampler:
    """A new sampler of options, or the given one; None is greedy. Refuses another vocabulary's."""
    if isinstance(sampling, Sampling | None):
        return Sampler(sampling or Sampling(), n_vocab)
    given = sampling.n_vocab if isinstance(sampling, Sampler) else None
    if given != n_vocab:
        what = f"{type(sampling).__name__} of {given} tokens" if given else repr(sampling)
        raise Refusal(
            "10",
            f"sampling is {what}; give a Sampling, or a Sampler of {n_vocab} tokens",
            {"n_vocab": n_vocab, "given": given},
        )
    return sampling


class Generation:
    """The text of one continuation: iterate for its pieces as they come.

    tokens, text: what came so far; the tokens of a stop string and an end token are among `tokens`
    and not in `text`. finish_reason: None while it runs, then "end" (an end token), "stop" (a stop
    string, which is `stop`), "length" (max_tokens) or "cache" (the last cell).
    """

    def __init__(
        self,
        ids: Iterator[int],
        stream: TextStream,
        is_end: Callable[[int], bool],
        *,
        bounded: bool,
    ) -> None:
        """bounded: whether a number of tokens ends `ids`, rather than the last cell."""
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._stream, self._is_end = stream, is_end
        self._pieces = self._run(ids, LENGTH if bounded else CACHE)

    @property
    def stop(self) -> str | None:
        """The stop string that was met."""
        return self._stream.stopped

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece, never empty."""
        piece = next(self._pieces)
        self.text += piece
        return piece

    def _run(self, ids: Iterator[int], reason: str) -> Iterator[str]:
        for token in ids:
            self.tokens.append(token)
            if self._is_end(token):
                reason = END
            elif piece := self._stream.push(token):
                yield piece
            if self.stop:
                break
        if piece := self._stream.finish():
            yield piece
        self.finish_reason = STOP if self.stop else reason
