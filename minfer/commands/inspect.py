"""`minfer explain | variants | devices`: what would run here, and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from typing import Any

import minfer
from minfer import memory, receipt, registry, settings, tuned
from minfer.device import Device, DeviceKind, cores
from minfer.errors import Refusal
from minfer.ops import DECODE, OPS, PREFILL, Shape, Variant
from minfer.settings import SETTINGS

LIBRARIES = (
    *("numpy", "numba", "llvmlite", "torch", "triton", "mlx"),
    *("gguf", "tokenizers", "jinja2", "huggingface_hub"),
)


def explain(args: argparse.Namespace) -> None:
    """Print the receipt of one choice."""
    shape = Shape(
        kind=args.kind or (DECODE if args.n_q == 1 else PREFILL),
        n_q=args.n_q,
        n_head=args.n_head,
        n_head_kv=args.n_head_kv,
        head_dim=args.head_dim,
    )
    receipt = registry.explain(
        args.op,
        device=args.device,
        fmt=args.fmt,
        shape=shape,
        variant=args.variant,
    )
    print(json.dumps(receipt.as_dict()) if args.json else receipt)


def variants(args: argparse.Namespace) -> None:
    """Print every variant of one op, or of all."""
    ops = [args.op] if args.op else list(OPS)
    rows = [_variant_row(v) for op in ops for v in registry.variants(op, args.device)]
    if args.json:
        print(json.dumps({"device": args.device, "variants": rows}))
        return
    for row in rows:
        formats = " ".join(row["formats"]) or "any"
        print(
            f"{row['op'] + '_' + row['variant']:28} {formats:14} {row['takes']:52} {row['source']}"
        )


def _variant_row(v: Variant) -> dict[str, Any]:
    file, line = v.source
    takes = []
    if v.limits.kinds:
        takes.append("/".join(v.limits.kinds))
    if v.limits.head_dims:
        takes.append(f"head_dim {', '.join(map(str, v.limits.head_dims))}")
    if v.limits.head_dim_multiple > 1:
        takes.append(f"head_dim a multiple of {v.limits.head_dim_multiple}")
    if v.limits.max_head_dim:
        takes.append(f"head_dim up to {v.limits.max_head_dim}")
    if v.limits.max_group:
        takes.append(f"up to {v.limits.max_group} query heads a KV head")
    if v.limits.capability:
        takes.append(f"compute capability {'.'.join(map(str, v.limits.capability))}")
    return {
        "op": v.op,
        "variant": v.name,
        "formats": [fmt.value for fmt in v.formats] if OPS[v.op].formats else [],
        "takes": "; ".join(takes) or "every shape",
        "space": {
            name: {"default": t.default, "values": list(t.values), "numeric": t.numeric}
            for name, t in v.space.items()
        },
        "invariant": v.invariant,
        "source": f"{receipt.short_path(file)}:{line}",
    }


def devices(args: argparse.Namespace) -> None:
    """Print what this machine offers."""
    rows = {kind.label: _device_row(Device(kind)) for kind in DeviceKind}
    libraries = {name: _version(name) for name in LIBRARIES}
    free, in_force = memory.free_bytes(), settings.values()
    report = {
        "minfer": minfer.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": cores(),
        "memory_free": free,
        "devices": rows,
        "libraries": libraries,
        "settings": in_force,
    }
    if args.json:
        print(json.dumps(report))
        return
    print(f"minfer {report['minfer']}, Python {report['python']}, {report['platform']}")
    known = "unknown (pip install psutil)" if free is None else memory.human(free)
    print(f"cores {report['cores']}, memory free {known}")
    for name, row in rows.items():
        told = {"kind": row["kind"], **row["environment"]}
        facts = row["unavailable"] or ", ".join(f"{k} {v}" for k, v in told.items())
        print(f"  {name:6} {'no ' if row['unavailable'] else 'yes'} {facts}")
    print("libraries")
    for name, version in libraries.items():
        print(f"  {name:15} {version or 'absent'}")
    print("settings")
    for setting in SETTINGS:
        print(f"  {setting.name}={in_force[setting.name]}  ({setting.meaning})")


def _device_row(device: Device) -> dict[str, Any]:
    try:
        told = device.package().environment()
        return {"unavailable": None, "kind": tuned.device_kind(device), "environment": told}
    except Refusal as refusal:
        return {"unavailable": refusal.message, "kind": None, "environment": {}}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
