"""A tiny model over a store on any device, made without a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import N_CTX, RMS_EPS, Tiny, tiny_weights

from minfer import Batch, KvStore
from minfer.graph.run import fill_batch_inputs, output_rows
from minfer.graph.weight import Weight
from minfer.models.architecture import find_architecture
from minfer.models.graphs import ModelGraphs
from minfer.models.hyperparameters import Hyperparameters
from minfer.models.weights import STACKED
from minfer.rope import Rope

CELLS = 64


class Model:
    """A tiny Llama over a store of its own."""

    def __init__(
        self,
        device: str,
        cache_type: str = "f32",
        *,
        n_layer: int = 2,
        n_ctx: int = CELLS,
        **how: Any,
    ) -> None:
        tiny = Tiny(n_layer=n_layer, tied=True)
        weights = tiny_weights(tiny)
        self.hp = Hyperparameters(
            architecture=find_architecture("llama", Path("tiny")),
            n_layer=tiny.n_layer,
            n_ctx_train=N_CTX,
            n_embd=tiny.n_embd,
            n_ff=tiny.n_ff,
            n_head=tiny.n_head,
            n_head_kv=tiny.n_head_kv,
            head_dim=tiny.head_dim,
            rms_eps=RMS_EPS,
            n_vocab=len(weights["token_embd.weight"]),
            tied_embeddings=True,
            rope=Rope(tiny.head_dim, tiny.rope_base),
        )
        sizes = (self.hp.n_layer, n_ctx, self.hp.n_head_kv, self.hp.head_dim)
        sanitize = how.pop("sanitize", False)
        self.store = KvStore(*sizes, cache_type=cache_type, device=device, sanitize=sanitize)
        placed = {n: self.placed(array) for n, array in stacked(weights, tiny.n_layer).items()}
        self.graphs = ModelGraphs(self.hp, placed, self.store, "tiny", **how)

    def placed(self, array: Any) -> Any:
        there = self.store.kernels.from_host(array)
        return Weight(there) if array.ndim == 2 else there

    def forward(self, batch: Batch) -> Any:
        """As `Engine.forward`."""
        rows = output_rows(batch, 1)
        with self.store.step(batch) as step:
            graph = self.graphs.of(step.inputs, len(rows))
            inputs = fill_batch_inputs(
                graph, step.inputs, batch.tokens or (), rows, self.store.n_ctx
            )
            return self.graphs.run(graph, inputs, step)

    def feed(self, seq: int, tokens: list[int], kind: str = "decode") -> Any:
        t, n = self.store.written(seq), len(tokens)
        return self.forward(Batch([seq] * n, range(t, t + n), kind, tokens))

    @property
    def recorded(self) -> int:
        return self.graphs._runner.recorded


def stacked(weights: Mapping[str, Any], n_layer: int) -> dict[str, Any]:
    """Matrices that read the same rows, one below the other."""
    made = dict(weights)
    for layer in range(n_layer):
        for name, parts in STACKED.items():
            rows = [made.pop(f"blk.{layer}.{part}.weight") for part in parts]
            made[f"blk.{layer}.{name}.weight"] = np.concatenate(rows)
    return made
