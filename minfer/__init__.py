"""minfer: attention kernels over a cell-addressed KV cache.

Public names are resolved on first use, so that `import minfer` loads no kernel language, no torch
and compiles nothing (contract 10).
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "KvFormat": "minfer.format",
    "Region": "minfer.format",
    "Rope": "minfer.rope",
    "Causal": "minfer.window",
    "Span": "minfer.window",
    "Runs": "minfer.window",
    "Refusal": "minfer.errors",
    "Damaged": "minfer.errors",
    "Device": "minfer.device",
    "KvStore": "minfer.kv.store",
    "Step": "minfer.kv.step",
    "Batch": "minfer.kv.batch",
    "Slot": "minfer.kv.runs",
    "Move": "minfer.kv.runs",
    "Stats": "minfer.kv.runs",
    "Engine": "minfer.engine",
    "Sampler": "minfer.models.sampling",
    "Sampling": "minfer.models.sampling",
    "attention": "minfer.functional",
    "quantize": "minfer.functional",
    "dequantize": "minfer.functional",
    "variant": "minfer.ops",
    "Limits": "minfer.ops",
    "Shape": "minfer.ops",
    "Tunable": "minfer.ops",
    "explain": "minfer.registry",
    "variants": "minfer.registry",
}
_MODULES = ("registry", "window", "ops", "testing")

__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"minfer.{name}")
    raise AttributeError(f"module 'minfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
