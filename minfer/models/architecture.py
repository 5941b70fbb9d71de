"""What minfer knows about an architecture, and which ones there are.

A new one is a module with an `ARCHITECTURE` and a line in `MODULES`; docs/models.md shows how.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from minfer.errors import Refusal

if TYPE_CHECKING:
    from minfer.graph.nodes import Value
    from minfer.models.blocks import Model
    from minfer.models.hyperparameters import Hyperparameters
    from minfer.models.keys import Keys

Shapes = Mapping[str, tuple[int, ...]]

MODULES = {  # general.architecture -> the module that knows it
    "llama": "minfer.models.llama",
    "qwen2": "minfer.models.qwen2",
    "qwen3": "minfer.models.qwen3",
    "gemma3": "minfer.models.gemma3",
}


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    rope_pairing: which dimensions of a head turn together, as the rows of q and k lie in a file.
    layer_tensors: names in a layer, without `blk.<i>.`, and row-major shapes. forward: the nodes of
    the graph, in order; returns the logits. keys: metadata keys beyond the common ones, without
    the prefix; `read` puts what they say into the hyperparameters.
    """

    name: str
    rope_pairing: str
    layer_tensors: Callable[[Hyperparameters], Shapes]
    forward: Callable[[Model], Value]
    keys: tuple[str, ...] = ()
    read: Callable[[Keys, Hyperparameters], Hyperparameters] = lambda keys, hp: hp


def find_architecture(name: str, path: Path) -> Architecture:
    """The architecture of that name, for the model at `path`; refuses one not in `MODULES`."""
    if name not in MODULES:
        raise Refusal(
            "0.3",
            f"{path} has the architecture {name!r}; supported: {', '.join(MODULES)}",
            {"architecture": name, "supported": tuple(MODULES)},
        )
    return cast(Architecture, importlib.import_module(MODULES[name]).ARCHITECTURE)
