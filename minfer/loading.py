"""Loading a model file: every check first, then its weights and an empty cell store (0.1, 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minfer import format as kv_format
from minfer import memory, rope, settings
from minfer.device import Device, DeviceKind
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.graph.weight import Weight
from minfer.kv.checks import thread_count, whole_number
from minfer.kv.store import KvStore
from minfer.models import gguf
from minfer.models.gguf import GgufFile
from minfer.models.hyperparameters import Hyperparameters
from minfer.models.tokenizer import Tokenizer
from minfer.models.weights import load_weights, parse_weights, plan_weights
from minfer.ops import F32, check_activations

DEFAULT_N_CTX = 4096
PREFILL_CHUNK = 512  # prompt tokens a batch; answers do not depend on it (contract 6.1)


@dataclass(frozen=True)
class LoadedModel:
    """What an engine is made of. weights: what `models.weights.load_weights` gives.

    activations, replay: see `Engine.load`.
    """

    file: GgufFile
    hp: Hyperparameters
    tokenizer: Tokenizer
    weights: dict[str, Any]
    store: KvStore
    activations: str
    replay: bool

    @property
    def weight_formats(self) -> tuple[KvFormat, ...]:
        """The formats of its matrices, each once."""
        parts = (
            w
            for held in self.weights.values()
            for w in (held if isinstance(held, tuple) else (held,))
        )
        found = {weight.fmt for weight in parts if isinstance(weight, Weight)}
        return tuple(sorted(found, key=str))

    def with_cache(self, cache_type: str | KvFormat, n_ctx: int | None) -> LoadedModel:
        """The same weights beside an empty store of another format or size."""
        old = self.store
        new = KvStore(
            n_layer=old.n_layer,
            n_ctx=old.n_ctx if n_ctx is None else n_ctx,
            n_head_kv=old.n_head_kv,
            head_dim=old.head_dim,
            cache_type=cache_type,
            device=old.device,
            threads=old.threads,
            sanitize=old.sanitize,
        )
        return replace(self, store=new)


def load_model(
    path: str | Path,
    *,
    device: Device,
    cache_type: str | KvFormat | None,
    n_ctx: int | None,
    threads: int | None,
    weights: str | KvFormat | None,
    activations: str,
    replay: bool,
    sanitize: bool | None,
    progress: bool,
) -> LoadedModel:
    """Load a GGUF file; arguments and refusals are those of `Engine.load`."""
    refuse_activations(activations, device)
    kernels = device.package()
    asked = settings.cache_type() if cache_type is None else cache_type
    requested = KvFormat.parse(asked) if asked else None
    if threads is not None:
        threads = thread_count(threads)
    if n_ctx is not None:
        n_ctx = whole_number(n_ctx, "n_ctx", "10", low=1)
    wanted = parse_weights(weights)
    file = gguf.open_gguf(path)
    hp = Hyperparameters.from_gguf(file)
    sizes = {"n_layer": hp.n_layer, "n_head_kv": hp.n_head_kv, "head_dim": hp.head_dim}
    fmt = kv_format.resolve(
        requested, device_kind=device.name, reads_packed_kv=kernels.READS_PACKED_KV, **sizes
    )
    cells = min(DEFAULT_N_CTX, hp.n_ctx_train) if n_ctx is None else n_ctx
    sizes["n_ctx"] = cells
    plan = plan_weights(file, wanted)
    needs = {
        "weights": sum(planned.n_bytes for planned in plan),
        f"{fmt} KV cache of {cells} cells": KvStore.memory_bytes(**sizes, fmt=fmt),
        "rotary tables": sum(rope.table_bytes(cells, r.n_rot) for r in hp.ropes),
        "one chunk of a prompt": activation_bytes(hp, min(cells, PREFILL_CHUNK)),
    }
    with memory.required(needs, device.free_bytes):
        memory.keep_freed_pages()
        tokenizer = Tokenizer.from_gguf(file.metadata)
        place = None if kernels.array_type() is np.ndarray else kernels.from_host
        loaded = load_weights(file, plan, place=place, progress=progress)
        store = KvStore(**sizes, cache_type=fmt, device=device, threads=threads, sanitize=sanitize)
    return LoadedModel(file, hp, tokenizer, loaded, store, activations, replay)


def refuse_activations(activations: str, device: Device) -> None:
    """Refuse words that name no activations, and narrow ones where kernels have f32 alone."""
    check_activations(activations)
    if activations != F32 and device.kind is not DeviceKind.CUDA:
        raise Refusal(
            "0.3",
            f"device {device} keeps activations in f32; use device cuda for {activations}",
            {"activations": activations, "device": device.name},
        )


def activation_bytes(hp: Hyperparameters, n_tokens: int) -> int:
    """Bytes of the rows that are alive at once while `n_tokens` pass one layer, as f32."""
    attention = 2 * (hp.n_head + 2 * hp.n_head_kv) * hp.head_dim
    widest = max(attention, 3 * hp.n_ff) + 4 * hp.n_embd
    return 4 * (n_tokens * widest + hp.n_vocab)
