"""A Gluon kernel run program by program in numpy: values as on a GPU, layouts ignored.

Gluon has no interpreter. The source of a kernel file is executed with numpy arrays for tensors
and a plain copy for an asynchronous one, so indices, reshapes, masks and loops are tested without
a GPU. What it cannot see are layouts, races and the compiler.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

DTYPES = ("int8", "int16", "int32", "int64", "uint32", "float16", "float32")


class Tensor(np.ndarray):
    """An array with the methods kernels use; scalars are arrays without dimensions."""

    type = SimpleNamespace(layout=None)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: Any = False) -> Any:
        return np.asarray(array).view(Tensor)

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(np.asarray(self)[key]).view(Tensor)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        array = np.ascontiguousarray(self).reshape(self.shape)
        return array.view(dtype).view(Tensor) if bitcast else array.astype(dtype).view(Tensor)

    def broadcast_to(self, shape: list[int]) -> Any:
        return tensor(np.broadcast_to(np.asarray(self), shape))


def tensor(array: Any) -> Any:
    return np.array(array).view(Tensor)


class Pointer:
    """Element `at` of a flat array."""

    def __init__(self, array: Any, at: Any = 0) -> None:
        self.array, self.at = array, at
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.array, self.at + np.asarray(step).astype(np.int64))


class Shared:
    """A shared array; `index` is a view."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def index(self, i: Any) -> Shared:
        return Shared(self.array[int(i)])

    def load(self, layout: Any) -> Any:
        return tensor(self.array)


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    at = np.asarray(pointer.at)
    mask = np.broadcast_to(np.asarray(mask), at.shape)
    found = np.full(at.shape, other, pointer.array.dtype)
    found[mask] = pointer.array[at[mask]]
    return tensor(found)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, value, mask = np.broadcast_arrays(pointer.at, value, mask)
    pointer.array[at[mask]] = value[mask]


def copy(shared: Shared, pointer: Pointer, mask: Any) -> None:
    shared.array[...] = load(pointer, np.broadcast_to(mask, shared.array.shape))


def mma(a: Any, b: Any, c: Any) -> Any:
    wide = np.int64 if a.dtype == np.int8 else np.float32
    return tensor((np.matmul(a.astype(wide), b.astype(wide)) + c).astype(c.dtype))


def assembly(text: str, constraints: str, args: list[Any], **_: Any) -> Any:
    """The three pieces of assembly that are used."""
    if text.startswith("mov.b32 $0, $1"):  # four equal words in a row: their four bytes
        words = np.asarray(args[0]).reshape(-1, 4)
        assert (words == words[:, :1]).all()
        return tensor(np.ascontiguousarray(words[:, 0]).view(np.int8).reshape(args[0].shape))
    if text.startswith("mov.b32 {$0, $1}"):  # low and high half
        halves = np.ascontiguousarray(args[0]).view(np.float16).reshape(*args[0].shape, 2)
        return tensor(halves[..., 0]), tensor(halves[..., 1])
    *words, scales = (np.ascontiguousarray(a)[..., None] for a in args)
    codes = [w.view(np.int8).astype(np.float16) for w in words]
    pairs = np.stack(codes, -1) * scales.view(np.float16)[..., None, :]
    pairs = np.ascontiguousarray(pairs).view(np.int32)[..., 0]
    return tuple(tensor(pairs[..., i]) for i in range(4))


def language(program: int, n_warps: int) -> SimpleNamespace:
    """What `gl` and `tl` are to a kernel."""

    def reducer(function: Any) -> Any:
        return lambda a, axis: tensor(function(a, axis=axis, keepdims=False).astype(a.dtype))

    def where(condition: Any, a: Any, b: Any) -> Any:
        kept = np.asarray(a).dtype if isinstance(a, np.ndarray) else np.asarray(b).dtype
        return tensor(np.where(condition, a, b).astype(kept))

    return SimpleNamespace(
        **{name: np.dtype(name) for name in DTYPES},
        **{name: lambda *_, **__: None for name in (
            "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "BlockedLayout",
            "DistributedLinearLayout", "SharedLinearLayout", "SwizzledSharedLayout")},
        constexpr=lambda x: x,
        static_range=range,
        program_id=lambda axis: tensor(np.int32(program)),
        num_warps=lambda: n_warps,
        arange=lambda a, b, layout=None: tensor(np.arange(a, b, dtype=np.int32)),
        zeros=lambda shape, dtype, layout=None: tensor(np.zeros(shape, dtype)),
        full=lambda shape, value, dtype, layout=None: tensor(np.full(shape, value, dtype)),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(np.zeros(shape, dtype)),
        load=load,
        store=store,
        where=where,
        minimum=lambda a, b: tensor(np.minimum(a, b)),
        maximum=lambda a, b: tensor(np.fmax(a, b)),
        max=reducer(np.fmax.reduce),
        sum=reducer(np.add.reduce),
        abs=np.abs,
        exp2=np.exp2,
        fma=lambda a, b, c: tensor((a.astype(np.float64) * b + c).astype(np.float32)),
        reshape=lambda a, shape: tensor(np.reshape(a, shape)),
        permute=lambda a, order: tensor(np.transpose(a, order)),
        join=lambda a, b: tensor(np.stack([a, b], -1)),
        split=lambda a: (a[..., 0], a[..., 1]),
        convert_layout=lambda a, layout, **_: a,
        inline_asm_elementwise=assembly,
    )  # fmt: skip


def functions(path: Path, names: dict[str, Any]) -> dict[str, Any]:
    """The functions of a kernel file, its imports replaced by `names`."""
    source = re.sub(r"^(import|from) .*\n", "", path.read_text(), flags=re.M)
    space = dict(names)
    exec(compile(source, str(path), "exec"), space)
    return space


def kernels(program: int, n_warps: int, folder: Path, **constants: Any) -> dict[str, Any]:
    """`_ring.py` of `folder` for one program, over `_gather.py` beside it."""

    def jit(function: Any = None, **_: Any) -> Any:
        return jit if function is None else function

    gl = language(program, n_warps)
    gathered = functions(folder / "_gather.py", {"tl": gl, "triton": SimpleNamespace(jit=jit)})
    copying = SimpleNamespace(
        async_copy_global_to_shared=copy, commit_group=lambda: None, wait_group=lambda n: None
    )
    names = {
        "gl": gl,
        "tl": gl,
        "gluon": SimpleNamespace(jit=jit, constexpr_function=jit),
        "mma_v2": mma,
        "async_copy": copying,
        "_gather": SimpleNamespace(
            **{n: SimpleNamespace(fn=f) for n, f in gathered.items() if callable(f)}
        ),
    }
    return functions(folder / "_ring.py", names | constants)
