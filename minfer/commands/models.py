"""`minfer pull`: models by name."""

from __future__ import annotations

import argparse
import json

from minfer import settings
from minfer.pull import MODELS
from minfer.pull import pull as fetch


def pull(args: argparse.Namespace) -> None:
    """Download a model, or list what can be pulled."""
    if args.name is None:
        names = sorted(MODELS)
        print(json.dumps({"models": names}) if args.json else "\n".join(names))
        return
    path = fetch(args.name, settings.cache_dir())
    print(json.dumps({"name": args.name, "path": str(path)}) if args.json else path)
