"""Feeding windows of a text to engines, and scoring what they predict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from minfer.engine import Engine
from minfer.errors import Refusal
from minfer.format import Floats
from minfer.kv.batch import DECODE_ROWS_MAX, Batch
from minfer.kv.checks import INT32_MAX
from minfer.loading import PREFILL_CHUNK
from minfer.ops import DECODE, PREFILL, check_kind
from minfer.perplexity.scores import Scores, score
from minfer.perplexity.windows import Window
from minfer.prompts import checked_prompt

SEQ = INT32_MAX - 1  # a sequence of its own in every engine's store
LOGITS_BYTES = 256 << 20  # of all engines' logits that are alive at once


def measure(
    engines: Sequence[Engine],
    tokens: Sequence[int],
    windows: Sequence[Window],
    kind: str = PREFILL,
) -> Iterator[list[Scores]]:
    """Feed windows of a text to every engine; gives, a window, one `Scores` an engine.

    tokens: what `Engine.encode` gives for the text. Where the model wants a start token, every
    window has it in place of its first token. kind: whose numerics are measured; `decode` feeds
    every token as a generated one, up to 8 rows a batch, each equal to the row alone (6.2).
    Every engine needs as many free cells as a window has tokens; they are given back.

    Refuses ids outside the vocabulary, vocabularies of different sizes, windows outside the text,
    and, when they come, logits that are not finite (contract 4.2).
    """
    check_kind(kind)
    sizes = sorted({engine.n_vocab for engine in engines})
    if len(sizes) != 1:
        message = f"engines with vocabularies of {sizes} tokens; give one or more of one model"
        raise Refusal("10", message, {"n_vocab": sizes})
    ids = checked_prompt(tokens, sizes[0])
    for window in windows:
        if not 0 <= window.start < window.first < window.stop <= len(ids):
            message = f"{window} does not lie in a text of {len(ids)} tokens; use cut"
            raise Refusal("10", message, {"window": window, "tokens": len(ids)})
    return _measure(engines, ids, windows, kind)


def _measure(
    engines: Sequence[Engine], ids: list[int], windows: Sequence[Window], kind: str
) -> Iterator[list[Scores]]:
    start = engines[0].tokenizer.prompt_start
    longest = max((window.stop - window.start for window in windows), default=1)
    with reserved(engines, longest):
        for window in windows:
            text = [*start, *ids[window.start + len(start) : window.stop]]
            parts = scored_pieces(engines, text, window, kind)
            yield [Scores.join(own) for own in zip(*parts, strict=True)]


@contextmanager
def reserved(engines: Sequence[Engine], n: int) -> Iterator[None]:
    """While the block runs, `n` cells of every engine are those of sequence `SEQ`."""
    held: list[Engine] = []
    try:
        for engine in engines:
            engine.store.reserve(SEQ, n)
            held.append(engine)
        yield
    finally:
        for engine in held:
            engine.store.release(SEQ)


def scored_pieces(
    engines: Sequence[Engine], text: list[int], window: Window, kind: str
) -> Iterator[list[Scores]]:
    """Feed `text`, the tokens of a window, to `SEQ` of every engine; a piece, one `Scores` each."""
    limit = max(1, LOGITS_BYTES // (4 * engines[0].n_vocab * len(engines)))
    for piece in _pieces(window, limit, kind):
        yield _score_piece(engines, text, piece, kind, window.start)


class Piece(NamedTuple):
    """Positions [begin, end) of a window, fed at once; the last `n_out` of them give scores."""

    begin: int
    end: int
    n_out: int


def _pieces(window: Window, limit: int, kind: str) -> Iterator[Piece]:
    """A window in order, at most `limit` scored rows at a time; its last token is never fed."""
    rows = DECODE_ROWS_MAX if kind == DECODE else PREFILL_CHUNK
    begin, n, first = 0, window.stop - window.start - 1, window.first - window.start - 1
    while begin < n:
        end = min(n, begin + rows, max(begin, first) + limit)
        yield Piece(begin, end, max(0, end - max(begin, first)))
        begin = end


def _score_piece(
    engines: Sequence[Engine], text: list[int], piece: Piece, kind: str, start: int
) -> list[Scores]:
    """Feed a piece to every engine. start: where the window begins in the text."""
    logits = [_logits(engine, text, piece, kind, start) for engine in engines]
    return score(logits, text[piece.end - piece.n_out + 1 : piece.end + 1])


def _logits(engine: Engine, text: list[int], piece: Piece, kind: str, start: int) -> Floats:
    """Feed a piece to one engine; its logits [n_out, n_vocab]."""
    begin, end, n_out = piece
    batch = Batch([SEQ] * (end - begin), range(begin, end), kind, text[begin:end])
    rows = engine.forward(batch, max(1, n_out))
    logits = rows[len(rows) - n_out :]
    finite = np.isfinite(logits).all(axis=1)
    if not finite.all():
        position = end - n_out + int(np.argmin(finite))
        raise Refusal(
            "4.2",
            f"logits after token {start + position} of the text (position {position} of its "
            f"window) are not finite with a cache of {engine.store.fmt}: the weights hold damaged "
            "values, or rows of the cache overflow; try an f32 cache",
            {"token": start + position, "position": position, "fmt": engine.store.fmt.value},
        )
    return logits
