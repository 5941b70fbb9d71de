"""Loading a model as the options of a command say."""

from __future__ import annotations

import argparse
import sys

from minfer.engine import Engine
from minfer.format import KvFormat
from minfer.pull import resolve_model


def load_engine(
    args: argparse.Namespace, cache_type: str | KvFormat | None, n_ctx: int | None
) -> Engine:
    """The engine of `args.model`, with a bar on a terminal's stderr while weights are decoded."""
    return Engine.load(
        resolve_model(args.model),
        device=args.device,
        cache_type=cache_type,
        n_ctx=n_ctx,
        threads=args.threads,
        weights=args.weights,
        activations=args.activations,
        progress=shows_bar(args),
    )


def shows_bar(args: argparse.Namespace) -> bool:
    """Whether work that takes a while shows a bar on stderr."""
    return not args.json and sys.stderr.isatty()


def note_long_context(engine: Engine) -> None:
    """Say on stderr if the cache has more positions than the model was trained for."""
    trained = engine.hp.n_ctx_train
    if engine.store.n_ctx > trained:
        print(f"note: the model was trained for {trained} positions", file=sys.stderr)
