"""RoPE scaling as a model file states it: by metadata keys, or by a tensor of factors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minfer.errors import Refusal
from minfer.models.gguf import GgufFile
from minfer.models.gguf_guard import damaged
from minfer.models.keys import Keys, check_shape
from minfer.rope import Divided, Linear, Llama3, Rope, Scaling, Yarn, yarn_temperature

FACTORS = "rope_freqs.weight"
TYPES: dict[str, tuple[str, ...]] = {  # rope.scaling.type -> the keys rope.scaling.* that it has
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_context_length"),
    "yarn": (
        "factor",
        "original_context_length",
        "attn_factor",
        "yarn_attn_factor",
        "yarn_ext_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
    ),
}
# `finetuned` says how a model was made; it changes no answer.
SCALING_KEYS = sorted({"type", "finetuned"}.union(*TYPES.values()))
ROPE_KEYS = ("dimension_count", "freq_base", *(f"scaling.{key}" for key in SCALING_KEYS))


def read_rope(keys: Keys, head_dim: int) -> Rope:
    """The rope of the layers that see the whole context.

    Refuses a type of scaling that is none of `TYPES`, and a key that its type does not have.
    """
    n_rot = keys.count("rope.dimension_count", head_dim)
    if n_rot % 2 or n_rot > head_dim:
        what = f"rope turns {n_rot} dimensions of a head of {head_dim}"
        message = f"{keys.file.path} contradicts itself: {what}; use another model"
        raise Refusal("0.3", message, {"path": str(keys.file.path), "problem": what})
    return Rope(n_rot, read_base(keys, "rope.freq_base"), _scaling(keys, n_rot))


def read_base(keys: Keys, key: str) -> float:
    """The base of a rope; Damaged if its frequencies would not fall."""
    base = keys.positive(key, 10000.0)
    if base <= 1:
        raise damaged(keys.file.path, f"its {key} is {base} and must be above 1")
    return base


def _scaling(keys: Keys, n_rot: int) -> Scaling | None:
    kind = keys.text("rope.scaling.type", "none")
    if kind not in TYPES:
        raise keys.unsupported("rope.scaling.type")
    by_tensor = FACTORS in keys.file.tensor_names
    if by_tensor and kind != "none":
        raise keys.unsupported("rope.scaling.type")
    for key in SCALING_KEYS:
        name = f"rope.scaling.{key}"
        if keys.has(name) and key not in ("type", "finetuned", *TYPES[kind]):
            raise keys.unsupported(name)
    if by_tensor:
        return _divided(keys.file, n_rot)
    return _BY_KEYS[kind](keys)


def _divided(file: GgufFile, n_rot: int) -> Divided:
    check_shape(file, FACTORS, (n_rot // 2,))
    factors = file.tensor(FACTORS)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise damaged(file.path, f"tensor {FACTORS!r} holds a factor that is not positive")
    return Divided(tuple(factors.tolist()))


def _linear(keys: Keys) -> Linear:
    return Linear(keys.positive("rope.scaling.factor"))


def _ordered(keys: Keys, low: str, high: str, *defaults: float) -> tuple[float, float]:
    """Two keys of which the first is below the second. defaults: of both, if they have any."""
    values = [
        keys.positive(f"rope.scaling.{key}", *default)
        for key, default in zip((low, high), [defaults[:1], defaults[1:]], strict=True)
    ]
    if values[0] >= values[1]:
        message = f"its {low} {values[0]} is not below its {high} {values[1]}"
        raise damaged(keys.file.path, message)
    return values[0], values[1]


def _llama3(keys: Keys) -> Llama3:
    low, high = _ordered(keys, "low_freq_factor", "high_freq_factor")
    factor = keys.positive("rope.scaling.factor")
    return Llama3(factor, low, high, keys.count("rope.scaling.original_context_length"))


def _yarn(keys: Keys) -> Yarn:
    """The temperature: `yarn_attn_factor` replaces the paper's, `attn_factor` multiplies it."""
    factor = keys.positive("rope.scaling.factor")
    if keys.positive("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise keys.unsupported("rope.scaling.yarn_ext_factor")
    temperature = keys.positive("rope.scaling.yarn_attn_factor", yarn_temperature(factor))
    slow, fast = _ordered(keys, "yarn_beta_slow", "yarn_beta_fast", 1.0, 32.0)
    return Yarn(
        factor,
        keys.count("rope.scaling.original_context_length"),
        temperature * keys.positive("rope.scaling.attn_factor", 1.0),
        fast,
        slow,
    )


_BY_KEYS: dict[str, Callable[[Keys], Scaling | None]] = {
    "none": lambda keys: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
