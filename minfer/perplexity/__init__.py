"""Perplexity of a text, and how far one engine's predictions lie from another's.

A text is cut into windows; each is fed to an empty sequence, and some of its tokens are scored by
the logits before them.

    windows = cut(len(tokens), n_ctx)
    results = summarize(list(measure([engine, engine.with_cache("q8_0")], tokens, windows)))
"""

from __future__ import annotations

from minfer.perplexity.feeding import measure
from minfer.perplexity.scores import Result, Scores, Versus, score, summarize
from minfer.perplexity.windows import DEFAULT_WINDOW, Window, cut

__all__ = [
    "DEFAULT_WINDOW",
    "Result",
    "Scores",
    "Versus",
    "Window",
    "cut",
    "measure",
    "score",
    "summarize",
]
