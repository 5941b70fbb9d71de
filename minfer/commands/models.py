"""`minfer pull`: models by name."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from minfer import settings
from minfer.memory import human
from minfer.pull import MODELS, model_path
from minfer.pull import pull as fetch


def pull(args: argparse.Namespace) -> None:
    """Download a model, or list what can be pulled."""
    if args.name is None:
        _list(args.json)
        return
    if args.name in MODELS and MODELS[args.name].terms:
        print(MODELS[args.name].terms, file=sys.stderr)
    path = fetch(args.name, settings.cache_dir())
    print(json.dumps({"name": args.name, "path": str(path)}) if args.json else path)


def _list(as_json: bool) -> None:
    rows = [_row(name) for name in sorted(MODELS)]
    if as_json:
        print(json.dumps({"models": rows}))
        return
    for row in rows:
        there = "pulled" if row["pulled"] else ""
        print(
            f"{row['name']:12} {human(row['size']):>10} {there:7} {row['license']:20} "
            f"{MODELS[row['name']].origin}"
        )


def _row(name: str) -> dict[str, Any]:
    """size: bytes."""
    model = MODELS[name]
    return {
        "name": name,
        "file": model.file_name,
        "size": model.size,
        "sha256": model.sha256,
        "license": model.license,
        "terms": model.terms or None,
        "packages": [part.requirement for part in model.parts],
        "pulled": model_path(name, settings.cache_dir()).is_file(),
    }
