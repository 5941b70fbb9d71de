"""A Gluon kernel run program by program in numpy: values as on a GPU, layouts ignored.

Gluon has no interpreter. The Python functions of a kernel run with numpy arrays for tensors and a
plain copy for an asynchronous one, so indices, reshapes, masks and loops are tested without a GPU.
What it cannot see are layouts, races and the compiler.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from triton.language import constexpr
from triton.runtime.jit import ConstexprFunction

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
        div_rn=lambda a, b: tensor(np.float32(a) / np.float32(b)),
        exp2=np.exp2,
        fma=lambda a, b, c: tensor((a.astype(np.float64) * b + c).astype(np.float32)),
        reshape=lambda a, shape: tensor(np.reshape(a, shape)),
        permute=lambda a, order: tensor(np.transpose(a, order)),
        join=lambda a, b: tensor(np.stack([a, b], -1)),
        split=lambda a: (a[..., 0], a[..., 1]),
        convert_layout=lambda a, layout, **_: a,
        inline_asm_elementwise=assembly,
    )  # fmt: skip


def kernel(jitted: Any, program: int, n_warps: int) -> Any:
    """A jitted kernel as a Python function that runs one program."""
    gl = language(program, n_warps)
    copying = SimpleNamespace(
        async_copy_global_to_shared=copy, commit_group=lambda: None, wait_group=lambda n: None
    )
    replaced = {"gl": gl, "tl": gl, "mma_v2": mma, "async_copy": copying}
    return _function(jitted, replaced, {})


def _function(jitted: Any, replaced: dict[str, Any], spaces: dict[int, Any]) -> Any:
    """The function of a jitted one, with the names it uses replaced, here and in what it calls."""
    function = jitted.fn
    space = spaces.setdefault(id(function.__globals__), {})
    if not space:
        space.update(function.__globals__)
        for name, value in function.__globals__.items():
            if isinstance(value, ConstexprFunction):
                space[name] = lambda *_: None  # a layout
            elif isinstance(value, constexpr):
                space[name] = value.value
            elif hasattr(value, "fn"):
                space[name] = _function(value, replaced, spaces)
        space.update(replaced)
    return FunctionType(function.__code__, space, function.__name__, function.__defaults__)
