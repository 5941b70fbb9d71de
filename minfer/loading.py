"""Loading a model file: every check first, then its weights and an empty cell store (0.1, 3.2)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minfer import memory, rope, settings
from minfer.device import Device, DeviceKind
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.graph.weight import Weight
from minfer.kv.arena import cache_needs
from minfer.kv.checks import thread_count, whole_number
from minfer.kv.store import KvStore
from minfer.models import gguf
from minfer.models.fingerprint import fingerprint
from minfer.models.gguf import GgufFile
from minfer.models.hyperparameters import Hyperparameters
from minfer.models.tokenizer import Tokenizer
from minfer.models.weights import Planned, load_weights, parse_weights, plan_weights
from minfer.offload import DevicePlan, Need, Stretch, required
from minfer.ops import F32, check_activations

EMBEDDING, OUTPUT, LAYER = "token_embd.weight", "output.weight", re.compile(r"blk\.(\d+)\.")
DEFAULT_N_CTX = 4096
PREFILL_CHUNK = 512  # prompt tokens a batch; answers do not depend on it (contract 6.1)


@dataclass(frozen=True)
class LoadedModel:
    """What an engine is made of. fingerprint: of the file. weights: as `load_weights` gives them.

    activations, replay: see `Engine.load`.
    """

    file: GgufFile
    hp: Hyperparameters
    tokenizer: Tokenizer
    fingerprint: bytes
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
            device=old.device_plan,
            threads=old.threads,
            sanitize=old.sanitize,
        )
        return replace(self, store=new)


def load_model(
    path: str | Path,
    *,
    device: DevicePlan,
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
    for one in device.devices:
        one.package()
    asked = settings.cache_type() if cache_type is None else cache_type
    requested = KvFormat.parse(asked) if asked else None
    if threads is not None:
        threads = thread_count(threads)
    if n_ctx is not None:
        n_ctx = whole_number(n_ctx, "n_ctx", "10", low=1)
    wanted = parse_weights(weights)
    file = gguf.open_gguf(path)
    hp = Hyperparameters.from_gguf(file)
    stretches = device.stretches(hp.n_layer)
    heads = {"n_head_kv": hp.n_head_kv, "head_dim": hp.head_dim}
    fmt = device.resolve(requested, n_layer=hp.n_layer, **heads)
    cells = min(DEFAULT_N_CTX, hp.n_ctx_train) if n_ctx is None else n_ctx
    plan = placed(plan_weights(file, wanted), stretches)
    needs = [
        *(Need(on, "weights", sum(p.n_bytes for p in plan[on])) for on in plan),
        *cache_needs(stretches, fmt, cells, **heads),
        *(need for on in plan for need in _rows_and_tables(on, hp, cells)),
    ]
    with required(needs):
        memory.keep_freed_pages()
        tokenizer = Tokenizer.from_gguf(file.metadata)
        loaded: dict[str, Any] = {}
        for on, planned in plan.items():
            kernels = on.package()
            place = None if kernels.array_type() is np.ndarray else kernels.from_host
            loaded |= load_weights(file, planned, place=place, progress=progress)
        store = KvStore(
            n_layer=hp.n_layer,
            n_ctx=cells,
            **heads,
            cache_type=fmt,
            device=device,
            threads=threads,
            sanitize=sanitize,
        )
    # after the weights, while the file is in memory
    made = fingerprint(file)
    file.refuse_changed()
    return LoadedModel(file, hp, tokenizer, made, loaded, store, activations, replay)


def refuse_activations(activations: str, plan: DevicePlan) -> None:
    """Refuse words that name no activations, and narrow ones where kernels have f32 alone."""
    check_activations(activations)
    for device in plan.devices:
        if activations != F32 and device.kind is not DeviceKind.CUDA:
            raise Refusal(
                "0.3",
                f"device {device} keeps activations in f32; use device cuda for {activations}",
                {"activations": activations, "device": device.name},
            )


def placed(plan: Iterable[Planned], stretches: Sequence[Stretch]) -> dict[Device, list[Planned]]:
    """What each device holds: a layer's weights where it lies, embedding first, the rest last.

    An embedding that is the output head, too, is there twice if that lies on another device.
    """
    first, last = stretches[0].device, stretches[-1].device
    by_layer = [stretch.device for stretch in stretches for _ in stretch.layers]
    found: dict[Device, list[Planned]] = {device: [] for device in by_layer}
    arrays = {planned.name: planned for planned in plan}
    if first != last:
        arrays.setdefault(OUTPUT, replace(arrays[EMBEDDING], name=OUTPUT))
    for name, planned in arrays.items():
        layer = LAYER.match(name)
        on = by_layer[int(layer[1])] if layer else first if name == EMBEDDING else last
        found[on].append(planned)
    return found


def _rows_and_tables(device: Device, hp: Hyperparameters, cells: int) -> list[Need]:
    tables = sum(rope.table_bytes(cells, r.n_rot) for r in hp.ropes)
    rows = activation_bytes(hp, min(cells, PREFILL_CHUNK))
    return [Need(device, "rotary tables", tables), Need(device, "one chunk of a prompt", rows)]


def activation_bytes(hp: Hyperparameters, n_tokens: int) -> int:
    """Bytes of the rows that are alive at once while `n_tokens` pass one layer, as f32."""
    attention = 2 * (hp.n_head + 2 * hp.n_head_kv) * hp.head_dim
    widest = max(attention, 3 * hp.n_ff) + 4 * hp.n_embd
    return 4 * (n_tokens * widest + hp.n_vocab)
