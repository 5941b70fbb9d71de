"""Variants from a user's own file: `--add FILE.py`."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from minfer import registry
from minfer.errors import Refusal


def add(files: Sequence[str], device: str) -> list[str]:
    """Import each file and add its variants on `device`; returns their names.

    What a file prints goes to stderr: stdout holds results, and in a worker answers.
    """
    return [name for file in files for name in _add(Path(file), device)]


def _add(file: Path, device: str) -> list[str]:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        what = f"--add {file}: no such Python file; give the path of a module with variants"
        raise Refusal("6.6", what, {"path": str(file)})
    if file.stem in sys.modules:
        what = f"--add {file}: a module {file.stem} is loaded already; rename the file"
        raise Refusal("6.6", what, {"path": str(file)})
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        del sys.modules[file.stem]
        what = f"--add {file} does not import: {type(error).__name__}: {error}"
        raise Refusal("6.6", what, {"path": str(file)}) from error
    return registry.add(module, device=device)
