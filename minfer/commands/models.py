"""`minfer pull`: models by name."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from minfer import settings
from minfer.memory import human
from minfer.pull import MODELS, model_path, pulled_from_hub
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
    """The known models, then files of the hub that were pulled."""
    rows = [_row(name) for name in sorted(MODELS)]
    rows += [_hub_row(name) for name in pulled_from_hub(settings.cache_dir())]
    if as_json:
        print(json.dumps({"models": rows}))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        there = "pulled" if row["pulled"] else ""
        origin = MODELS[row["name"]].origin if row["name"] in MODELS else ""
        line = f"{human(row['size']):>10} {there:7} {row['license'] or '':20} {origin}"
        print(f"{row['name']:{width}} {line}".rstrip())


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


def _hub_row(name: str) -> dict[str, Any]:
    """The same of a file from the hub, which says no more of it."""
    path = model_path(name, settings.cache_dir())
    told = dict.fromkeys(("sha256", "license", "terms"))
    size = path.stat().st_size
    return {"name": name, "file": path.name, "size": size, **told, "packages": [], "pulled": True}
