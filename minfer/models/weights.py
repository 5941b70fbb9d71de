"""The weights of a model as arrays by name."""

from __future__ import annotations

import math
from typing import Any

from minfer.models.gguf import GgufFile


def decoded_bytes(file: GgufFile) -> int:
    """Bytes the weights take once decoded to f32; F32 tensors stay in the mapped file."""
    infos = (file.tensor_info(name) for name in file.tensor_names)
    return sum(4 * math.prod(shape) for kind, shape in infos if kind != "F32")


def decode_weights(file: GgufFile, *, progress: bool = False) -> dict[str, Any]:
    """Every tensor as float32, by name. progress: show a bar on stderr."""
    from tqdm import tqdm

    names = tqdm(
        file.tensor_names, desc="weights", unit="tensor", disable=not progress, leave=False
    )
    return {name: file.tensor(name) for name in names}
