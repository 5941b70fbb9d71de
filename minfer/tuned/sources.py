"""The code that a variant is made of."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from minfer.ops import Variant
from minfer.tuned.code import code_of

ROOT = Path(__file__).parent.parent  # of the package minfer


@cache
def source_of(variant: Variant) -> str:
    """xxh3 of the code of the file a variant is in and of the kernel modules it is made of.

    16 hex digits. Code is what runs (`code_of`). The modules are those of minfer's kernel packages
    that the file imports, and they in turn; other files of a user are not followed. As it is when
    first asked for. Raises OSError, ValueError or SyntaxError where there is none to read.
    """
    import xxhash

    texts: dict[str, str] = {}
    waiting = [("", Path(variant.source[0]))]
    while waiting:
        name, path = waiting.pop()
        if name in texts:
            continue
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        texts[name] = code_of(text, tree)
        named = _kernel_modules(tree, _package(path))
        waiting += [(name, _file(name)) for name in named]
    hashed = xxhash.xxh3_64()
    for name, text in sorted(texts.items()):
        for part in (name, text):
            hashed.update(f"{len(part)} {part}".encode())
    return str(hashed.hexdigest())


def _package(path: Path) -> str:
    """The package that a file of minfer is in, "" for a user's file."""
    folder = path.parent
    return ".".join(["minfer", *folder.relative_to(ROOT).parts]) if ROOT in path.parents else ""


def _kernel_modules(tree: ast.Module, package: str) -> Iterator[str]:
    """Modules of kernel packages that a file imports, anywhere in it.

    package: what its relative imports start from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_kernel_module(alias.name))
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            module = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(module, package)
            for alias in node.names:  # of a package, a module or what its own file defines
                either = (f"{module}.{alias.name}", module)
                yield from [name for name in either if _is_kernel_module(name)][:1]


def _is_kernel_module(name: str) -> bool:
    return name.startswith("minfer.kernels_") and _file(name).is_file()


def _file(name: str) -> Path:
    """Where a module below `minfer` is."""
    path = ROOT.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
