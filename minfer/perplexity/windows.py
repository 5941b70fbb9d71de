"""Which tokens of a text are read together, and which of them are scored."""

from __future__ import annotations

from typing import NamedTuple

from minfer.errors import Refusal
from minfer.kv.checks import whole_number

DEFAULT_WINDOW = 512


class Window(NamedTuple):
    """Tokens [start, stop) of a text are read; of these, [first, stop) are scored."""

    start: int
    first: int
    stop: int


def cut(n_tokens: int, n_ctx: int, stride: int | None = None) -> list[Window]:
    """Windows of `n_ctx` tokens over a text of `n_tokens`.

    Without `stride` windows lie side by side and the second half of each is scored, so that every
    scored token has at least n_ctx / 2 tokens before it; a rest that fills no window is left out
    (the convention of llama.cpp's perplexity tool). With `stride` a window begins every `stride`
    tokens and scores what no window before it scored: every token but the first (the sliding
    window of Hugging Face's page on perplexity of fixed-length models). The first token of a
    window is never scored.

    Refuses n_ctx below 2, a stride outside [1, n_ctx], and a text without a token to score.
    """
    n_ctx = whole_number(n_ctx, "n_ctx", "10", low=2)
    if n_tokens < 2:
        raise Refusal(
            "1",
            f"the text has {n_tokens} tokens and a score needs 2: one that is predicted and one "
            "before it; give a longer text",
            {"tokens": n_tokens},
        )
    if stride is not None:
        stride = whole_number(
            stride, "stride", "10", low=1, high=n_ctx, way_out=f"n_ctx is {n_ctx}"
        )
        return _sliding(n_tokens, n_ctx, stride)
    if n_tokens < n_ctx:
        raise Refusal(
            "1",
            f"the text has {n_tokens} tokens and a window {n_ctx}; give a longer text, a smaller "
            "--n-ctx, or a --stride, which takes windows that are not full",
            {"tokens": n_tokens, "n_ctx": n_ctx},
        )
    context = min(n_ctx // 2 + 1, n_ctx - 1)
    starts = range(0, n_tokens - n_ctx + 1, n_ctx)
    return [Window(start, start + context, start + n_ctx) for start in starts]


def _sliding(n_tokens: int, n_ctx: int, stride: int) -> list[Window]:
    windows, scored = [], 1
    for start in range(0, n_tokens, stride):
        stop, first = min(start + n_ctx, n_tokens), max(scored, start + 1)
        if first < stop:
            windows.append(Window(start, first, stop))
        scored = stop
        if stop == n_tokens:
            break
    return windows
