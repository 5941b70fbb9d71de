"""A model over a cell store: batches of tokens in, logits out (contract 7, 10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from minfer import engine_session
from minfer.engine_session import Accept, Resumed
from minfer.errors import Refusal
from minfer.format import Floats, KvFormat
from minfer.graph.run import fill_batch_inputs, output_rows
from minfer.kv.batch import Batch
from minfer.kv.checks import INT32_MAX, whole_number
from minfer.loading import PREFILL_CHUNK, LoadedModel
from minfer.models.fingerprint import full_hash
from minfer.models.graphs import ModelGraphs
from minfer.ops import DECODE, PREFILL
from minfer.prompts import checked_prompt, refuse_overflow
from minfer.receipt import Receipt

WARM_UP_SEQ = INT32_MAX


class Inference:
    """What an engine computes and keeps: forward, sessions, removal; no text."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.path, self.hp, self.store = loaded.file.path, loaded.hp, loaded.store
        self._graphs = ModelGraphs(
            self.hp,
            loaded.weights,
            self.store,
            self.path.name,
            activations=loaded.activations,
            replay=loaded.replay,
        )
        self.store.identity = cache(partial(engine_session.identity_of, loaded))

    @property
    def n_vocab(self) -> int:
        return self.hp.n_vocab

    @cached_property
    def model_hash(self) -> str:
        """xxh3 of all weights, "" if their file is not what was loaded; it is read once."""
        try:
            return full_hash(self._loaded.file).hex()
        except (OSError, Refusal):
            return ""

    @property
    def graphs_built(self) -> int:
        """How many graphs were built so far; decoding at new positions builds none."""
        return self._graphs.built

    def cache_bytes(self, fmt: KvFormat | None = None) -> int:
        """Bytes of the K and V regions, in the engine's format or another."""
        return sum(need.n_bytes for need in self.store.needs(fmt or self.store.fmt))

    def receipts(self) -> list[Receipt]:
        """Which variant every op of the graphs built so far got, and why."""
        all_of = [receipt for graph in self._graphs for receipt in graph.receipts]
        seen = {(r.op, r.device, r.variant, r.fmt, r.shape.kind): r for r in all_of}
        return list(seen.values())

    def forward(self, batch: Batch, n_out: int = 1) -> Floats:
        """Run one batch and keep its rows; returns float32 logits (contract 7.3).

        A decode batch gives every row, [n_tokens, n_vocab]. A prefill batch of one sequence gives
        its last `n_out` rows, of several sequences each one's last row.
        """
        if batch.tokens is None:
            raise Refusal("7.5", "a model needs Batch(tokens=...)")
        rows = output_rows(batch, n_out)
        with self.store.step(batch) as step:
            graph = self._graphs.of(step.inputs, len(rows))
            inputs = fill_batch_inputs(graph, step.inputs, batch.tokens, rows, self.store.n_ctx)
            logits = self._graphs.run(graph, inputs, step)
            step.lasts = engine_session.last_rows(batch, rows, logits)
            return logits

    def prefill(self, tokens: Sequence[int], seq: int = 0, chunk: int = PREFILL_CHUNK) -> Floats:
        """Feed a prompt to `seq` from its end on, in chunks; the last token's logits [n_vocab].

        Refuses, before the first chunk, an empty prompt, ids outside the vocabulary and more
        tokens than `seq` has cells left.
        """
        chunk = whole_number(chunk, "chunk", "10", low=1)
        ids, start = checked_prompt(tokens, self.n_vocab), self.store.written(seq)
        end = start + len(ids)
        refuse_overflow(self.store, seq, end, f"{end} prompt tokens need")
        for first in range(0, len(ids), chunk):
            part = ids[first : first + chunk]
            positions = range(start + first, start + first + len(part))
            logits = self.forward(Batch([seq] * len(part), positions, PREFILL, part))
        last: Floats = logits[-1]
        return last

    def decode(self, token: int, seq: int = 0) -> Floats:
        """Feed one generated token to `seq`; the logits [n_vocab] after it."""
        batch = Batch([seq], [self.store.written(seq)], DECODE, [token])
        logits: Floats = self.forward(batch)[0]
        return logits

    def warm_up(self) -> None:
        """Compile, or load, the kernels that a prompt and its continuation need.

        Otherwise the first tokens wait for them. Uses two cells of a sequence of its own where
        they are free, and gives them back.
        """
        if self.store.stats().largest_free_run >= 2 and not self.store.has(WARM_UP_SEQ):
            self.store.reserve(WARM_UP_SEQ, 2)
            try:
                self.prefill([0], WARM_UP_SEQ)
                self.decode(0, WARM_UP_SEQ)
            finally:  # an interrupt while kernels compile
                self.store.release(WARM_UP_SEQ)

    def remove(self, seq: int, start: int, length: int) -> None:
        """Drop positions [start, start + length) of `seq`; later rows move down (contract 5.7).

        Their keys are turned back by `length` positions, each layer's by its own rope. What those
        rows saw when they were computed stays in them: the text as it was. Refuses an f16 cache,
        rows in a share, rows that others read, and positions past the last one.
        """
        self.store.remove(
            seq,
            start,
            length,
            rope=[self.hp.rope_of(layer) for layer in range(self.hp.n_layer)],
            pairing=self.hp.architecture.rope_pairing,
        )

    def shift(self, seq: int, drop: int) -> None:
        """`remove` the first `drop` positions of `seq`."""
        self.remove(seq, 0, drop)

    def save(self, path: str | Path, host: Mapping[str, Any] | None = None) -> None:
        """Write a session file: every sequence, with `host`, what JSON can hold (contract 8).

        Atomic: `path` is the old file or the new one. Refused: a host that is no plain JSON, and
        what `KvStore.save` refuses.
        """
        engine_session.save(self, path, host)

    def resume(self, path: str | Path, accept: Accept | None = None) -> Resumed:
        """Hold what a session file holds, instead of all that is held now; nothing is computed.

        accept: is shown the host's state of a sound file, and may refuse it by raising. Refuses
        what `KvStore.load` refuses, saying what differs and what to do; nothing has changed then.
        """
        return engine_session.resume(self, path, accept)
