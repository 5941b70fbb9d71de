"""Every op: moves over the planes, the variants of the CPU over canonical copies.

planes  the rows of a move at once, plane by plane.
"""

from __future__ import annotations

import functools
from copy import deepcopy
from dataclasses import replace

from minfer import reference, registry
from minfer.format import Int32, Region
from minfer.kernels_numba._arguments import checked_moves
from minfer.ops import Config, Kernel, Variant, variant
from planes import over_canonical


@variant()
def move_cells_planes(region: Region, moves: Int32, *, config: Config) -> Region:
    """See `kernels_numba.cells.move_cells_rows`."""
    return reference.move_cells(deepcopy(region), checked_moves(region, moves))


def _adopt(original: Variant) -> Kernel:
    """A variant of the CPU as one of this package."""
    launch = functools.wraps(original.launch)(functools.partial(over_canonical, original.launch))
    launch.__module__ = __name__
    launch.__minfer_variant__ = replace(original, launch=launch)
    return launch


for _op, _variants in registry.collect("minfer.kernels_numba").items():
    if _op != "move_cells":
        globals().update({f"{_op}_{v.name}": _adopt(v) for v in _variants})
