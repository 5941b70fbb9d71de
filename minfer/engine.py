"""A loaded model: the format gate, a cell store and graphs in one place (contract 3.2, 10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from minfer import generation, resuming
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import Floats, KvFormat
from minfer.generation import Generation
from minfer.graph.run import fill_batch_inputs, output_rows
from minfer.kv.batch import Batch
from minfer.kv.checks import INT32_MAX, whole_number
from minfer.kv.store import KvStore
from minfer.loading import PREFILL_CHUNK, LoadedModel, load_model
from minfer.models import chat_prompt
from minfer.models.fingerprint import full
from minfer.models.graphs import ModelGraphs
from minfer.models.sampling import Sampler, Sampling
from minfer.models.text_stream import TextStream
from minfer.ops import DECODE, F32, PREFILL
from minfer.prompts import checked_prompt, refuse_overflow
from minfer.receipt import Receipt
from minfer.resuming import Accept, Resumed
from minfer.timing import Timing

WARM_UP_SEQ = INT32_MAX


class Engine:
    """One model on one device with one cache format.

    Two engines with two formats live in one process: nothing here is global.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        metadata = loaded.file.metadata
        self._loaded = loaded
        self.path, self.hp, self.store = loaded.file.path, loaded.hp, loaded.store
        self.tokenizer = loaded.tokenizer
        self.chat_template = metadata.get("tokenizer.chat_template")
        self._graphs = ModelGraphs(
            self.hp,
            loaded.weights,
            self.store,
            self.path.name,
            activations=loaded.activations,
            replay=loaded.replay,
        )
        self.store.identity = cache(partial(resuming.identity_of, loaded))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str | Device = "cpu",
        cache_type: str | KvFormat | None = None,
        n_ctx: int | None = None,
        threads: int | None = None,
        weights: str | KvFormat | None = None,
        activations: str = F32,
        replay: bool = True,
        sanitize: bool | None = None,
        progress: bool = False,
    ) -> Engine:
        """Load a GGUF model.

        cache_type: f32, f16 or q8_0; else MINFER_CACHE_TYPE, else the device's default.
        n_ctx: cells of the cache; default 4096, or what the model was trained for if that is less.
        threads: workers of every kernel, default the cores this process may use. weights: format
        of the matrices, f32, f16 or q8_0; None or auto: Q8_0 ones as they are, others as f32.
        activations: f32, or on cuda f16 or bf16, what operands of products are rounded to.
        replay: record a decoded token's launches once where the device can; False for measuring.
        sanitize: trace an attention that is not finite to a cell; None for MINFER_SANITIZE_CELLS.
        progress: show a bar on stderr while weights are decoded.

        Refuses before loading: a bad file, an unknown format, q8_0 on odd head sizes, a device
        that is not there or too old, and what would not fit in memory.
        """
        loaded = load_model(
            path,
            device=Device.parse(device),
            cache_type=cache_type,
            n_ctx=n_ctx,
            threads=threads,
            weights=weights,
            activations=activations,
            replay=replay,
            sanitize=sanitize,
            progress=progress,
        )
        return cls(loaded)

    def save(self, path: str | Path, host: Mapping[str, Any] | None = None) -> None:
        """Write a session file: every sequence, with `host`, what JSON can hold (contract 8).

        Atomic: `path` is the old file or the new one. Refused: a host that is no plain JSON, and
        what `KvStore.save` refuses.
        """
        resuming.save(self, path, host)

    def resume(self, path: str | Path, accept: Accept | None = None) -> Resumed:
        """Hold what a session file holds, instead of all that is held now; nothing is computed.

        accept: is shown the host's state of a sound file, and may refuse it by raising. Refuses
        what `KvStore.load` refuses, saying what differs and what to do; nothing has changed then.
        """
        return resuming.resume(self, path, accept)

    def with_cache(self, cache_type: str | KvFormat, n_ctx: int | None = None) -> Engine:
        """Another engine over the same weights, with an empty cache of its own."""
        return Engine(self._loaded.with_cache(cache_type, n_ctx))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the model's start token where it wants one."""
        return [*self.tokenizer.prompt_start, *self.tokenizer.encode(text)]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation in the model's own chat template, up to the answer.

        messages: {"role": ..., "content": ...} each, both text. Control tokens that they spell stay
        text. Refuses a model without a template, and what `chat_prompt.encode` refuses.
        """
        if not isinstance(self.chat_template, str):
            raise Refusal(
                "0.3",
                f"{self.path.name} has no chat template; use a plain prompt",
                {"path": str(self.path)},
            )
        return chat_prompt.encode(messages, self.chat_template, self.tokenizer)

    @property
    def n_vocab(self) -> int:
        return self.hp.n_vocab

    @cached_property
    def model_hash(self) -> str:
        """xxh3 of all weights, "" if their file is not what was loaded; it is read once."""
        try:
            return full(self._loaded.file).hex()
        except (OSError, Refusal):
            return ""

    @property
    def graphs_built(self) -> int:
        """How many graphs were built so far; decoding at new positions builds none."""
        return self._graphs.built

    def cache_bytes(self, fmt: KvFormat | None = None) -> int:
        """Bytes of the K and V regions, in the engine's format or another."""
        store = self.store
        return KvStore.memory_bytes(
            n_layer=store.n_layer,
            n_ctx=store.n_ctx,
            n_head_kv=store.n_head_kv,
            head_dim=store.head_dim,
            fmt=fmt or store.fmt,
        )

    def receipts(self) -> list[Receipt]:
        """Which variant every op of the graphs built so far got, and why."""
        all_of = [receipt for graph in self._graphs for receipt in graph.receipts]
        return list({(r.op, r.variant, r.fmt, r.shape.kind): r for r in all_of}.values())

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
            step.lasts = resuming.last_rows(batch, rows, logits)
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

    def generate(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        *,
        sampling: Sampling | Sampler | None = None,
        seq: int = 0,
        timing: Timing | None = None,
    ) -> Iterator[int]:
        """Continue `tokens`, one id at a time, until an end token or `max_tokens`.

        Greedily without `sampling`; a `Sampler` goes on where it stands and tells its seed. Without
        `max_tokens` it goes on to the last cell. Refuses, before anything runs, an empty prompt,
        one that does not fit and biases for tokens that are none; stops with an error at logits
        that are not finite. The sequence is reserved if it is not there yet and keeps its rows.
        """
        return generation.token_ids(self, tokens, max_tokens, sampling, seq, timing)

    def stream(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        continues: bool = False,
        sampling: Sampling | Sampler | None = None,
        seq: int = 0,
        timing: Timing | None = None,
    ) -> Generation:
        """The text that `generate` gives, in pieces, up to a stop string.

        The token after a stop string is never run. continues: the text goes on from the prompt's,
        rather than being an answer of its own: a space in front of it is kept. Refuses also an
        empty stop string.
        """
        text = TextStream(self.tokenizer, stop, continues=continues)
        ids = self.generate(tokens, max_tokens, sampling=sampling, seq=seq, timing=timing)
        return Generation(ids, text, self.tokenizer.is_end, bounded=max_tokens is not None)

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
