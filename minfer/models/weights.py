"""The weights of a model as arrays by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minfer.models.gguf import GgufFile

# Matrices that read the same rows lie one below the other, so that decode reads them in one launch.
STACKED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
}


def decoded_bytes(file: GgufFile) -> int:
    """Bytes the weights take once decoded to f32; other F32 tensors stay in the mapped file."""
    stacked = {part for parts in STACKED.values() for part in parts}
    infos = ((name, file.tensor_info(name)) for name in file.tensor_names)
    return sum(
        4 * math.prod(info.shape)
        for name, info in infos
        if info.type != "F32" or name.split(".")[-2] in stacked
    )


def decode_weights(file: GgufFile, *, progress: bool = False) -> dict[str, Any]:
    """Every tensor as float32 by its name, stacked ones under `STACKED` names instead.

    progress: show a bar on stderr.
    """
    from tqdm import tqdm

    weights: dict[str, Any] = {}
    names = tqdm(
        file.tensor_names, desc="weights", unit="tensor", disable=not progress, leave=False
    )
    for name in names:
        weights[name] = file.tensor(name)
        _stack(weights, name)
    return weights


def _stack(weights: dict[str, Any], last: str) -> None:
    """Stack the matrices that the tensor `last` completes, and drop the single ones."""
    *block, part, kind = last.split(".")
    for name, parts in STACKED.items():
        full = [".".join([*block, p, kind]) for p in parts]
        if part in parts and all(n in weights for n in full):
            weights[".".join([*block, name, kind])] = np.concatenate([weights.pop(n) for n in full])
