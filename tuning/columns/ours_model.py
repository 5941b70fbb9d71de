"""Whole models through `minfer.Engine`, for the columns of this project."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from minfer.engine import Engine
from minfer.format import Floats
from tuning.bench.cases import FORMATS, Case, Model
from tuning.bench.prompts import CHUNK, DECODED, prompt_tokens, room
from tuning.bench.protocol import Message
from tuning.columns.subjects import Measure, Subject

SEQ = 0


@lru_cache(maxsize=1)
def load(path: str, **options: Any) -> Engine:
    """An engine whose weights others share, held until another file is asked for."""
    return Engine.load(path, n_ctx=CHUNK, **options)


def model(case: Case, how: Message, *, chunk: int = CHUNK, **options: Any) -> Subject:
    """A prompt, and one token behind it, through prefill and decode of an engine.

    chunk: prompt tokens a batch. options: more for `Engine.load`.
    """
    assert isinstance(case, Model)
    n_ctx = room(case.depth)
    weights = case.read_as or (case.weights if case.weights in FORMATS else None)
    engine = load(case.path, weights=weights, threads=how["threads"], **options)
    engine = engine.with_cache(how["fmt"], n_ctx)
    engine.warm_up()
    engine.store.reserve(SEQ, n_ctx)
    tokens = prompt_tokens(case.depth)
    logits: list[Floats] = []

    def prefill() -> None:
        logits[:] = [engine.prefill(tokens, SEQ, chunk)]

    measures = {
        "prefill": Measure([prefill], lambda: engine.store.truncate(SEQ, 0), most=1),
        "decode": Measure(
            [lambda: engine.decode(tokens[0], SEQ)],
            lambda: engine.store.truncate(SEQ, case.depth),
            most=DECODED // 2,
        ),
    }
    if options:  # on a GPU kernels compile for many rows, and a call is short
        measures["prefill"].sample(1)
    seconds = measures["prefill"].sample(1)
    return Subject(measures, logits[0], "Engine", seconds={"prefill": seconds})
