"""A loaded model: the format gate, a cell store and graphs in one place (contract 3.2, 10)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minfer import format as kv_format
from minfer import memory, rope, settings
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.graph.builder import Graph, GraphBuilder, Heads
from minfer.graph.cache import GraphCache
from minfer.graph.params import GraphParams
from minfer.graph.run import execute, fill_batch_inputs, output_rows
from minfer.kv.batch import Batch
from minfer.kv.store import KvStore
from minfer.models import chat_template, gguf, llama
from minfer.models.gguf import GgufFile
from minfer.models.hyperparameters import Hyperparameters
from minfer.models.sampling import greedy
from minfer.models.tokenizer import Tokenizer
from minfer.models.weights import decode_weights, decoded_bytes
from minfer.ops import DECODE, PREFILL
from minfer.registry import Receipt

DEFAULT_N_CTX = 4096
PREFILL_CHUNK = 512  # prompt tokens a batch; answers do not depend on it (contract 6.1)

Logits: TypeAlias = NDArray[np.float32]


@dataclass
class Timing:
    """Tokens and seconds of one `generate`, by kind."""

    tokens: dict[str, int] = field(default_factory=lambda: {PREFILL: 0, DECODE: 0})
    seconds: dict[str, float] = field(default_factory=lambda: {PREFILL: 0.0, DECODE: 0.0})

    def add(self, kind: str, tokens: int, seconds: float) -> None:
        self.tokens[kind] += tokens
        self.seconds[kind] += seconds

    def rate(self, kind: str) -> float:
        """Tokens a second, 0 before the first one."""
        return self.tokens[kind] / self.seconds[kind] if self.seconds[kind] else 0.0


class Engine:
    """One model on one device with one cache format.

    Two engines with two formats live in one process: nothing here is global.
    """

    def __init__(
        self,
        file: GgufFile,
        hp: Hyperparameters,
        weights: dict[str, Any],
        store: KvStore,
        *,
        threads: int,
    ) -> None:
        self.hp, self.store, self.threads = hp, store, threads
        self.tokenizer = Tokenizer.from_gguf(file.metadata)
        self.chat_template = file.metadata.get("tokenizer.chat_template")
        self.path = file.path
        self._weights = weights
        self._rope = rope.tables(store.n_ctx, hp.n_rot, hp.rope_base)
        self._graphs = GraphCache()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str | Device = "cpu",
        cache_type: str | None = None,
        n_ctx: int | None = None,
        threads: int | None = None,
        progress: bool = False,
    ) -> Engine:
        """Load a GGUF model.

        cache_type: f32, f16 or q8_0; else MINFER_CACHE_TYPE, else the device's default.
        n_ctx: cells of the cache; default 4096, or what the model was trained for if that is less.
        threads: workers of every kernel, default the cores this process may use. progress: show a
        bar on stderr while weights are decoded.

        Refuses before loading: a bad file, an unknown format, q8_0 on odd head sizes, a device
        that is not there, and what would not fit in memory.
        """
        parsed = Device.parse(device)
        package = parsed.package()
        asked = cache_type if cache_type is not None else settings.cache_type()
        if asked:
            KvFormat.parse(asked)
        workers = threads if threads is not None else len(os.sched_getaffinity(0))
        _at_least_one("threads", workers)
        file = gguf.open_gguf(path)
        hp = Hyperparameters.from_gguf(file)
        cells = n_ctx if n_ctx is not None else min(DEFAULT_N_CTX, hp.n_ctx_train)
        _at_least_one("n_ctx", cells)
        sizes = {"n_layer": hp.n_layer, "n_head_kv": hp.n_head_kv, "head_dim": hp.head_dim}
        fmt = kv_format.resolve(
            asked, device_kind=parsed.name, reads_packed_kv=package.READS_PACKED_KV, **sizes
        )
        sizes["n_ctx"] = cells
        memory.require(
            {
                "weights": decoded_bytes(file),
                f"{fmt} KV cache of {cells} cells": KvStore.memory_bytes(**sizes, fmt=fmt),
            }
        )
        weights = decode_weights(file, progress=progress)
        store = KvStore(**sizes, cache_type=fmt, device=parsed, threads=workers)
        return cls(file, hp, weights, store, threads=workers)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the model's start token where it wants one."""
        start = [self.tokenizer.bos] if self.tokenizer.add_bos else []
        return [*(t for t in start if t is not None), *self.tokenizer.encode(text)]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation in the model's own chat template, up to the answer.

        messages: {"role": ..., "content": ...} each. Refuses a model without a template, and
        a message that spells a control token: it would end the turn it stands in.
        """
        for index, message in enumerate(messages):
            found = self.tokenizer.control_in(str(message["content"]))
            if found is not None:
                raise Refusal(
                    "0.3", f"message {index} holds the control token {found!r}; take it out", {}
                )
        if not isinstance(self.chat_template, str):
            raise Refusal("0.3", f"{self.path.name} has no chat template; use a plain prompt", {})
        bos, eos = (
            "" if token is None else self.tokenizer.decode([token], special=True)
            for token in (self.tokenizer.bos, self.tokenizer.eos)
        )
        text = chat_template.render(
            messages, self.chat_template, add_generation_prompt=True, bos=bos, eos=eos
        )
        return self.tokenizer.encode(text, special=True)

    @property
    def n_vocab(self) -> int:
        return self.hp.n_vocab

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
        seen: dict[tuple[str, str, str], Receipt] = {}
        for graph in self._graphs:
            for receipt in graph.receipts:
                seen[receipt.op, receipt.variant, receipt.shape.kind] = receipt
        return list(seen.values())

    def forward(self, batch: Batch, n_out: int = 1) -> Logits:
        """Run one batch and keep its rows; returns float32 logits (contract 7.3).

        A decode batch gives every row, [n_tokens, n_vocab]. A prefill batch of one sequence gives
        its last `n_out` rows, of several sequences each one's last row.
        """
        if batch.tokens is None:
            raise Refusal("7.5", "a model needs Batch(tokens=...)", {})
        rows = output_rows(batch, n_out)
        with self.store.step(batch) as step:
            params = self._params(batch, step.inputs.mode, len(rows))
            graph = self._graphs.get(params, self._build)
            inputs = fill_batch_inputs(graph, step.inputs, batch.tokens, rows, self.store.n_ctx)
            logits: Logits = execute(graph, inputs, step)
        return logits

    def prefill(self, tokens: Sequence[int], seq: int = 0, chunk: int = PREFILL_CHUNK) -> Logits:
        """Feed a prompt to `seq` from its end on, in chunks; the last token's logits [n_vocab]."""
        start = self.store.written(seq)
        logits: Logits | None = None
        for first in range(0, len(tokens), chunk):
            part = list(tokens[first : first + chunk])
            positions = range(start + first, start + first + len(part))
            logits = self.forward(Batch([seq] * len(part), list(positions), PREFILL, part))
        if logits is None:
            raise Refusal("1", "a prompt needs at least one token", {"seq": seq})
        last: Logits = logits[-1]
        return last

    def decode(self, token: int, seq: int = 0) -> Logits:
        """Feed one generated token to `seq`; the logits [n_vocab] after it."""
        batch = Batch([seq], [self.store.written(seq)], DECODE, [token])
        logits: Logits = self.forward(batch)[0]
        return logits

    def generate(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        *,
        seq: int = 0,
        timing: Timing | None = None,
    ) -> Iterator[int]:
        """Greedily continue `tokens`, one id at a time, until an end token or `max_tokens`.

        Without `max_tokens` it goes on to the last cell. Refuses, before anything runs, an empty
        prompt and one that does not fit; stops with an error at logits that are not finite. The
        sequence is reserved if it is not there yet and keeps its rows afterwards.
        """
        timing = timing if timing is not None else Timing()
        budget = self._budget(tokens, max_tokens, seq)
        return self._generate(list(tokens), budget, seq, timing)

    def _budget(self, tokens: Sequence[int], max_tokens: int | None, seq: int) -> int:
        """How many tokens may be generated; the last one needs no cell of its own."""
        if not tokens:
            raise Refusal(
                "1", "the prompt has no tokens; give at least one character", {"tokens": 0}
            )
        if max_tokens is not None:
            _at_least_one("max_tokens", max_tokens)
        known = self.store.has(seq)
        used = self.store.written(seq) if known else 0
        room = (self.store.cap(seq) if known else self.store.n_ctx) - used - len(tokens)
        wanted = 1 if max_tokens is None else max_tokens
        if room < wanted - 1:
            raise Refusal(
                "2.5",
                f"{used + len(tokens)} prompt tokens and {wanted} to generate need "
                f"{used + len(tokens) + wanted - 1} cells and n_ctx is {self.store.n_ctx}; "
                "use a larger --n-ctx, a smaller -n or a shorter prompt",
                {"prompt": len(tokens), "written": used, "n_ctx": self.store.n_ctx},
            )
        if not known:
            self.store.reserve(seq, self.store.n_ctx)
        return room + 1 if max_tokens is None else max_tokens

    def _generate(self, tokens: list[int], budget: int, seq: int, timing: Timing) -> Iterator[int]:
        started = time.perf_counter()
        logits = self.prefill(tokens, seq)
        timing.add(PREFILL, len(tokens), time.perf_counter() - started)
        for count in range(budget):
            token = greedy(logits, position=self.store.written(seq) - 1)
            yield token
            if self.tokenizer.is_end(token) or count + 1 == budget:
                return
            started = time.perf_counter()
            logits = self.decode(token, seq)
            timing.add(DECODE, 1, time.perf_counter() - started)

    def _params(self, batch: Batch, mode: Any, n_out: int) -> GraphParams:
        return GraphParams(
            n_tokens=len(batch.positions),
            n_out=n_out,
            kind=batch.kind,
            devices=(self.store.device.name,) * self.hp.n_layer,
            kv_format=self.store.fmt,
            layout=self.store.layout,
            windows=((mode, 0),) * self.hp.n_layer,
            variants=self.store.named_variants(),
        )

    def _build(self, params: GraphParams) -> Graph:
        heads = Heads(self.hp.n_head, self.hp.n_head_kv, self.hp.head_dim)
        builder = GraphBuilder(params, heads, self.n_vocab, self.threads)
        return builder.finish(llama.forward(builder, self.hp, self._weights, self._rope))


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise Refusal("0.3", f"{name} is {value}; it must be at least 1", {name: value})
