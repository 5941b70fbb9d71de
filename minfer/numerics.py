"""The numeric fingerprint: what the bits of an answer depend on, weights and tokens aside (6.4)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path

from minfer import registry, tuned
from minfer.device import Device
from minfer.format import KvFormat
from minfer.ops import CELLS, F32, KINDS, OPS, PREFILL, WEIGHT, Shape
from minfer.registry import Choice

# Whose text decides which operations run and in which order, beside the kernel package.
SOURCES = ("graph", "models", "rope.py", "window.py")


def facts(
    device: Device,
    fmt: KvFormat,
    *,
    n_head: int,
    n_head_kv: int,
    head_dim: int,
    weights: Sequence[KvFormat] = (),
    activations: str = F32,
) -> dict[str, str]:
    """What numbers depend on, by name, in words.

    Versions of the libraries, instructions, the text of kernels, and of every op for each kind of
    tokens the variant with its numeric tunables. fmt: of the cache. weights: formats of matrices.
    """
    package = device.package()
    told = {"device": device.name, "cache type": fmt.value}
    told |= {"weights": " ".join(map(str, weights)), "activations": activations}
    told |= tuned.made_with(device)
    told["source"] = source_hash(package.__name__.rpartition(".")[2])
    formats = {CELLS: (fmt,), WEIGHT: weights, "": (fmt,)}
    config = {} if activations == F32 else {"activations": activations}
    shapes = [Shape(kind, 1, n_head, n_head_kv, head_dim) for kind in KINDS]
    for op in OPS.values():
        for of in formats[op.formats] if _has(device, op.name) else ():
            choices = [
                registry.select(op.name, device=device, fmt=of, shape=shape, config=config)
                for shape in shapes
            ]
            words = {
                shape.kind: _words(choice, of, device)
                for shape, choice in zip(shapes, choices, strict=True)
            }
            label = f"{op.name} {of}" if op.formats else op.name
            if len(set(words.values())) == 1:
                told[label] = words[PREFILL]
            else:
                told |= {f"{label} {kind}": word for kind, word in words.items()}
    return told


def fingerprint(of: Mapping[str, str]) -> bytes:
    """xxh3-128 of facts, in whatever order."""
    import xxhash

    return bytes(xxhash.xxh3_128_digest(json.dumps(dict(of), sort_keys=True).encode()))


@cache
def source_hash(package: str) -> str:
    """xxh3 of the text of a kernel package and of `SOURCES`, as it is when first asked for."""
    import xxhash

    root, hashed = Path(__file__).parent, xxhash.xxh3_64()
    for name in (package, *SOURCES):
        top = root / name
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            hashed.update(path.relative_to(root).as_posix().encode())
            hashed.update(path.read_bytes())
    return str(hashed.hexdigest())


def _has(device: Device, op: str) -> bool:
    return device.backend.package.rpartition(".")[2] in OPS[op].backends


def _words(choice: Choice, fmt: KvFormat, device: Device) -> str:
    """A variant, its numeric tunables, where it rounds, and the text of a user's."""
    space = choice.variant.space
    tunables = [
        f"{name}={value}"
        for name, value in choice.config.items()
        if name in space and space[name].numeric
    ]
    rounds = astuple(choice.variant.numerics(fmt))
    of_user = bool(tuned.module_of(choice.variant, device))
    text = [tuned.source_of(choice.variant)] if of_user else []
    return " ".join([choice.variant.name, *tunables, *rounds, *text])
