"""What launchers take, checked, as tensors where kernels run.

Host arrays (numpy) are looked at and copied. Tensors that lie where kernels run are taken as they
are: to look at their values would stop the GPU and cannot be done while a graph is captured, so
whoever made them has checked them (contract 7.5).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton import knobs
from triton.runtime import driver

from minfer.errors import Refusal
from minfer.format import KvFormat, Region, word
from minfer.ops import arguments, cell_arguments
from minfer.ops.arguments import host_int32s
from minfer.ops.cell_arguments import check_layout, check_planes
from minfer.planes import LAYOUT

STORED = {KvFormat.F32: torch.float32, KvFormat.F16: torch.float16, KvFormat.Q8_0: torch.uint8}
ACTIVATIONS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU."""
    return bool(knobs.runtime.interpret)


def home() -> torch.device:
    """Where kernels run: the current GPU, or the CPU under the interpreter."""
    if interpreted() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def multiprocessors() -> int:
    """Of the current GPU; a few for the interpreter, so that work is split there too."""
    here = home()
    return 2 if here.type == "cpu" else _multiprocessors(here)


@cache
def _multiprocessors(gpu: torch.device) -> int:
    return int(torch.cuda.get_device_properties(gpu).multi_processor_count)


def architecture() -> int:
    """What kernels are compiled for, 90 for sm_90; 0 in the interpreter."""
    return 0 if interpreted() else int(driver.active.get_current_target().arch)


def host(array: Any) -> bool:
    """Whether an array is on the host: anything but a tensor."""
    return not isinstance(array, torch.Tensor)


def _at_home(array: torch.Tensor, name: str) -> torch.Tensor:
    here = home()
    if array.device != here:
        raise Refusal(
            "10",
            f"{name} lies on {array.device} and kernels run on {here}; give it with .to('{here}')",
            {"name": name, "device": str(array.device)},
        )
    return array


def tensor(array: Any, name: str) -> torch.Tensor:
    """The array as a tensor where kernels run."""
    if isinstance(array, torch.Tensor):
        return _at_home(array, name)
    array = np.asarray(array)
    if not array.flags.writeable:  # torch warns of read-only memory, also where it copies
        array = array.copy()
    return torch.from_numpy(np.ascontiguousarray(array)).to(home())


def floats(array: Any, name: str, n_dims: int) -> torch.Tensor:
    """float32 of so many dimensions; another type is refused, not cast (contract 4.2)."""
    return _float32(array, name, n_dims).contiguous()


def rows(array: Any, name: str, n_dims: int) -> torch.Tensor:
    """`floats` of which only the rows are contiguous: they may be columns of a wider product."""
    given = _float32(array, name, n_dims)
    dense = all(
        given.stride(i) == given.stride(i + 1) * given.shape[i + 1] for i in range(1, n_dims - 1)
    )
    return given if dense and given.stride(-1) == 1 else given.contiguous()


def _float32(array: Any, name: str, n_dims: int) -> torch.Tensor:
    given = tensor(array, name)
    if given.dtype != torch.float32:
        arguments.refuse_type(name, "float32", word(given.dtype))
    if given.ndim != n_dims:
        arguments.refuse_dimensions(given.shape, name, n_dims)
    return given


def int32s(array: Any, name: str, n_dims: int | None = 1) -> torch.Tensor:
    """Whole numbers as a contiguous int32 tensor where kernels run."""
    if host(array):
        return tensor(host_int32s(array, name, n_dims), name)
    given = _at_home(array, name)
    if given.dtype != torch.int32:
        arguments.refuse_fractions(name, word(given.dtype))
    if n_dims is not None and given.ndim != n_dims:
        arguments.refuse_dimensions(given.shape, name, n_dims)
    return given.contiguous()


def blocks(given: torch.Tensor) -> torch.Tensor:
    """q8_0 bytes, contiguous, and at an even address: kernels read two at once."""
    given = given.contiguous()
    return given.clone() if given.data_ptr() % 2 else given


def stored(weight: Any, fmt: KvFormat) -> tuple[torch.Tensor, int]:
    """A matrix of `fmt`, contiguous, and its n_in.

    float32 and float16 are [n_out, n_in], q8_0 is uint8 [n_out, n_in / 32 * 34]: whole blocks
    without padding, as in a GGUF file.
    """
    given = tensor(weight, "weight")
    if given.dtype != STORED[fmt]:
        arguments.refuse_weight_type(fmt, word(STORED[fmt]), word(given.dtype))
    if given.ndim != 2:
        arguments.refuse_dimensions(given.shape, "weight", 2)
    n_in = arguments.n_in_of(given.shape, fmt)
    return (blocks(given) if fmt is KvFormat.Q8_0 else given.contiguous()), n_in


def product(weight: Any, x: Any, fmt: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """`stored` and rows f32 [n, n_in] of the same n_in, which may lie apart."""
    matrix, n_in = stored(weight, fmt)
    x = rows(x, "x", 2)
    arguments.check_product(fmt, len(matrix), n_in, x.shape)
    return matrix, x


# -- regions --------------------------------------------------------------------------------------


def check_region(region: Region, fmt: KvFormat) -> None:
    """Refuse a region of another format or layout, or whose arrays are not what its sizes say."""
    check_layout(region, fmt, LAYOUT)
    given = tuple((tuple(plane.shape), word(plane.dtype)) for plane in region.arrays)
    check_planes(region, given, all(plane.is_contiguous() for plane in region.arrays))
    for plane in region.arrays:
        _at_home(plane, "the region")


def planes(region: Region) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and scales of a region; rows again where there are no scales."""
    return region.arrays[0], region.arrays[-1]


def checked_cells(region: Region, cells: Any) -> torch.Tensor:
    """The cells as int32 [n]; a host array is refused if one is outside the region."""
    if not host(cells):
        return int32s(cells, "cells")
    return tensor(cell_arguments.host_cells(cells, region.n_cells), "cells")


def checked_moves(region: Region, moves: Any) -> NDArray[np.int32]:
    """The moves as int32 [n, 3] on the host, refused if one of them leaves the region."""
    return cell_arguments.host_moves(moves if host(moves) else moves.cpu().numpy(), region.n_cells)
