"""The functions of ggml that the column calls, through ctypes, from llama-cpp-python's wheel.

Signatures and enumerations are those of ggml.h and ggml-cpu.h.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

POINTER, INT, INT64, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
PREC_F32 = 10
ALIGN = 1 << 12  # more than any tensor's header and padding take
WORK_BYTES = 64 << 20


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class Functions(NamedTuple):
    """Functions by their names without `ggml_`."""

    init: Any
    free: Any
    reset: Any
    new_tensor_4d: Any
    get_data: Any
    flash_attn_ext: Any
    flash_attn_ext_set_prec: Any
    mul_mat: Any
    new_graph: Any
    build_forward_expand: Any
    quantize_chunk: Any
    graph_compute_with_ctx: Any


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "init": (POINTER, (InitParams,)),
    "free": (None, (POINTER,)),
    "reset": (None, (POINTER,)),
    "new_tensor_4d": (POINTER, (POINTER, INT, INT64, INT64, INT64, INT64)),
    "get_data": (POINTER, (POINTER,)),
    "flash_attn_ext": (POINTER, (POINTER,) * 5 + (FLOAT,) * 3),
    "flash_attn_ext_set_prec": (None, (POINTER, INT)),
    "mul_mat": (POINTER, (POINTER,) * 3),
    "new_graph": (POINTER, (POINTER,)),
    "build_forward_expand": (None, (POINTER, POINTER)),
    "quantize_chunk": (ctypes.c_size_t, (INT, POINTER, POINTER, INT64, INT64, INT64, POINTER)),
    "graph_compute_with_ctx": (INT, (POINTER, POINTER, INT)),
}


@cache
def ggml() -> Functions:
    """The library of this interpreter's llama-cpp-python, loaded once."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    suffix = next(folder.glob("libggml-base.*")).suffixes[0]
    libraries = [
        ctypes.CDLL(str(folder / f"libggml-{part}{suffix}"), mode=ctypes.RTLD_GLOBAL)
        for part in ("base", "cpu")
    ]
    libraries[1].ggml_cpu_init()
    found = {}
    for name, (result, arguments) in SIGNATURES.items():
        library = next(lib for lib in libraries if hasattr(lib, f"ggml_{name}"))
        function = getattr(library, f"ggml_{name}")
        function.restype, function.argtypes = result, arguments
        found[name] = function
    return Functions(**found)


class Context:
    """A ggml context of `size` bytes for tensors; `put` fills one, `read` reads one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.pointer = ggml().init(InitParams(size, None, False))
        if not self.pointer:
            raise MemoryError(f"ggml has no {size} bytes")

    def __del__(self) -> None:
        ggml().free(self.pointer)

    def tensor(self, kind: str, *sizes: int) -> Any:
        """A tensor of up to four sizes, the innermost first."""
        return ggml().new_tensor_4d(
            self.pointer, TYPES[kind], *sizes, *(1 for _ in range(4 - len(sizes)))
        )

    def put(self, kind: str, rows: NDArray[Any]) -> Any:
        """A tensor of `kind` that holds float32 `rows`, the last axis innermost."""
        lib, tensor = ggml(), self.tensor(kind, *reversed(rows.shape))
        target, rows = lib.get_data(tensor), np.ascontiguousarray(rows)
        if kind == "q8_0":
            n_in = rows.shape[-1]
            source = rows.ctypes.data
            lib.quantize_chunk(TYPES[kind], source, target, 0, rows.size // n_in, n_in, None)
        else:
            stored = rows.astype({"f32": np.float32, "f16": np.float16}[kind], copy=False)
            ctypes.memmove(target, stored.ctypes.data, stored.nbytes)
        return tensor

    @staticmethod
    def read(tensor: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A copy of a float32 tensor."""
        count = int(np.prod(shape))
        data = (ctypes.c_float * count).from_address(ggml().get_data(tensor))
        return np.ctypeslib.as_array(data).reshape(shape).copy()


class Graph:
    """One node to compute, with working memory of its own that every run starts afresh."""

    _work: Context | None = None

    def __init__(self, context: Context, node: Any, threads: int) -> None:
        lib = ggml()
        self.context, self.node, self.threads = context, node, threads
        self._graph = lib.new_graph(context.pointer)
        lib.build_forward_expand(self._graph, node)
        if Graph._work is None:
            Graph._work = Context(WORK_BYTES)

    def run(self) -> None:
        """Compute; raises where ggml reports a failure."""
        assert Graph._work is not None
        lib = ggml()
        lib.reset(Graph._work.pointer)
        status = lib.graph_compute_with_ctx(Graph._work.pointer, self._graph, self.threads)
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute gives {status}")
