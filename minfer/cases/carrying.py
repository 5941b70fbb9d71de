"""Host values to a kernel package and back: numpy arrays, and regions in the canonical layout."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from minfer.format import Region


def arranged(package: ModuleType, region: Region) -> Region:
    """A copy of a canonical region, arranged as the package does."""
    cells = np.arange(region.n_cells, dtype=np.int32)
    sizes = (region.fmt, region.n_cells, region.n_head_kv, region.head_dim)
    made: Region = package.write_cells(package.empty_region(*sizes), cells, region.arrays[0])
    return made


def canonical(package: ModuleType, region: Region) -> Region:
    """A region of the package in the canonical layout."""
    cells = package.read_cells(region, np.arange(region.n_cells, dtype=np.int32))
    return Region(region.fmt, "canonical", region.n_head_kv, region.head_dim, (cells,))


def given(package: ModuleType, value: Any) -> Any:
    """A numpy array or a canonical region as the package takes it; anything else as it is."""
    if isinstance(value, Region):
        return arranged(package, value)
    return package.from_host(value) if isinstance(value, np.ndarray) else value


def returned(package: ModuleType, value: Any) -> Any:
    """An answer of the package in numpy and in the canonical layout."""
    if isinstance(value, tuple):
        return tuple(returned(package, part) for part in value)
    return canonical(package, value) if isinstance(value, Region) else package.to_host(value)
