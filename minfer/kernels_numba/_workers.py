"""One parallel loop for every attention kernel.

A parallel kernel makes Numba compile its body again and again, once per wrapper. So the one loop
stands alone here and calls workers by the address of their compiled code; their arguments travel
as the address of a tuple on the launching thread's stack. Each worker is compiled once.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import prange
from numba.core import cgutils, types
from numba.extending import intrinsic

from minfer.kernels_numba._ir import I64
from minfer.kernels_numba._jit import granted, kernel, launch


def _emit_on_stack(_typing_context: Any, args: Any) -> Any:
    """Address of a copy of `args` that lives as long as the calling function runs."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        model = context.data_model_manager[signature.args[0]]
        slot = cgutils.alloca_once_value(builder, model.as_data(builder, values[0]))
        return builder.ptrtoint(slot, I64)

    return types.intp(args), codegen


def _uncounted(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """`value` with its arrays cut from their reference counts, through nested tuples."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()
    if hasattr(kind, "types"):  # a tuple of any kind
        parts = [
            _uncounted(context, builder, part, builder.extract_value(value, i))
            for i, part in enumerate(kind.types)
        ]
        return context.make_tuple(builder, kind, parts)
    return value


def _emit_read(_typing_context: Any, pointer: Any) -> Any:
    """The tuple a worker's argument points to.

    The launching thread holds its arrays. Workers do not count references: every view of a
    shared array would otherwise pull the count's cache line from core to core.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = signature.return_type
        model = context.data_model_manager[kind]
        data = builder.bitcast(values[0], model.get_data_type().as_pointer())
        value = model.load_from_data_pointer(builder, data)
        return _uncounted(context, builder, kind, value)

    return pointer.dtype(pointer), codegen


def _emit_call(_typing_context: Any, worker: Any, t: Any, n_threads: Any, args: Any) -> Any:
    """worker(t, n_threads, address of args) -> intp, by the address of its code."""

    def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kinds = (types.intp, types.intp, types.voidptr)
        kind = context.call_conv.get_function_type(types.intp, kinds)
        worker = builder.inttoptr(values[0], kind.as_pointer())
        pointer = builder.inttoptr(values[3], context.get_value_type(types.voidptr))
        _, result = context.call_conv.call_function(
            builder, worker, types.intp, kinds, [values[1], values[2], pointer]
        )
        return result

    return types.intp(types.intp, types.intp, types.intp, types.intp), codegen


_on_stack: Any = intrinsic(_emit_on_stack)
read: Any = intrinsic(_emit_read)
_call: Any = intrinsic(_emit_call)


@kernel(parallel=True)
def _loop(n_threads, work, join, args, done):
    for t in prange(n_threads):
        done[t] = _call(work, np.intp(t), n_threads, args)
    if join != 0:
        for t in prange(n_threads):
            done[t] += _call(join, np.intp(t), n_threads, args)


@kernel
def _start(n_threads, work, join, args, done):
    _loop(n_threads, work, join, _on_stack(args), done)


class Worker:
    """A kernel (t, n_threads, pointer to args) -> intp that `run` calls by address.

    Its argument types are those of the first call. Launchers see to it that no item type and no
    number of dimensions ever differs and that arrays are C-contiguous, which is all the code uses.
    """

    def __init__(self, compiled: Any) -> None:
        self.kernel = compiled
        self.address = 0

    def resolve(self, args: Any) -> int:
        """Address of the code for `args`, compiled or read from disk at the first call."""
        if not self.address:
            kinds = (types.intp, types.intp, types.CPointer(numba.typeof(args)))
            self.kernel.compile(kinds)
            result = self.kernel.overloads[kinds]
            self.address = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
        return self.address


def run(threads: int, work: Worker, join: Worker | None, args: Any) -> None:
    """Call work(t, n, args) for every t < n in parallel, then join likewise if there is one."""
    done = np.empty(granted(threads), np.intp)
    first, second = work.resolve(args), join.resolve(args) if join else 0
    launch(_start, threads, first, second, args, done)
