"""One parallel loop for every kernel that runs on threads.

A parallel kernel makes Numba compile its body again and again, once per wrapper. So the one loop
stands alone here and calls workers by the address of their compiled code; their arguments travel
as the address of a tuple on the launching thread's stack. Each worker is compiled once.

    @Worker
    @kernel
    def _double_kernel(t, n_threads, pointer):
        x, out = read(pointer)
        begin, end = share(t, n_threads, x.size)
        for i in range(begin, end):
            out[i] = 2 * x[i]
        return 0

    run(threads, _double_kernel, None, (x, out))
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import numba as _numba
import numpy as np
from numba import _dispatcher, prange
from numba.core import cgutils as _cgutils
from numba.core import types as _types
from numba.extending import intrinsic

from minfer.errors import Refusal
from minfer.kernels_numba._emit import I64
from minfer.kernels_numba._jit import kernel
from minfer.ops import Tunable

# Numba's own hints are partial and differ between versions.
numba: Any = _numba
cgutils: Any = _cgutils
types: Any = _types

THREADS = Tunable(numba.config.NUMBA_NUM_THREADS, (1, 2, 4, 8, 16, 32, 64), searched=False)

# Work that one worker does alone: waking another costs more than it saves.
ALONE_PRODUCTS = 1 << 18  # attention: up to so many multiply-adds of scores
ALONE_BYTES = 1 << 19  # matvec: fewer bytes of weight, times the rows of x
ALONE_ELEMENTS = 1 << 14  # what works row by row: fewer elements of the rows


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


@kernel
def share(t, n_threads, n):
    """The part [begin, end) of n equal items that worker t of n_threads takes."""
    return t * n // n_threads, (t + 1) * n // n_threads


@kernel(parallel=True)
def _loop(n_threads, work, join, args):
    done = np.empty(n_threads, np.intp)
    for t in prange(n_threads):
        done[t] = _call(work, np.intp(t), n_threads, args)
    if join != 0:
        for t in prange(n_threads):
            done[t] = _call(join, np.intp(t), n_threads, args)


@kernel
def _start(n_threads, work, join, args):
    pointer = _on_stack(args)
    if n_threads > 1:
        _loop(n_threads, work, join, pointer)
        return
    _call(work, 0, 1, pointer)
    if join != 0:
        _call(join, 0, 1, pointer)


class Worker:
    """A kernel (t, n_threads, pointer to args) -> intp that `run` calls by address.

    Its argument types are those of the first call. Launchers see to it that no item type and no
    number of dimensions ever differs, and that arrays are C-contiguous and of one mutability.
    """

    def __init__(self, compiled: Any) -> None:
        self.kernel = compiled
        self.address = 0
        self.fingerprint = b""

    def resolve(self, args: Any, fingerprint: bytes) -> int:
        """Address of the code for `args`, compiled or read from disk at the first call."""
        if not self.address:
            kinds = (types.intp, types.intp, types.CPointer(numba.typeof(args)))
            self.kernel.compile(kinds)
            result = self.kernel.overloads[kinds]
            self.fingerprint = fingerprint
            self.address = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
        elif fingerprint != self.fingerprint:
            raise TypeError(
                f"{self.kernel.__name__} was compiled for other types than {numba.typeof(args)}"
            )
        return self.address


_fingerprint: Any = _dispatcher.compute_fingerprint  # of the types of a value, as bytes


def n_workers(threads: object) -> int:
    """`threads` as a number of workers, refused unless it is a whole number of at least 1."""
    if type(threads) is not int or threads < 1:
        raise Refusal(
            "0.3", f"threads {threads!r} is no whole number of at least 1", {"threads": threads}
        )
    return threads


def row_threads(elements: int, config: Mapping[str, Any]) -> int:
    """`threads` of config, or 1 where there are few elements."""
    threads = n_workers(config["threads"])
    return threads if elements >= ALONE_ELEMENTS else 1


# The workqueue layer aborts the process when two threads launch at once; the others do not.
_workqueue_lock = threading.Lock()


def run(threads: int, work: Worker, join: Worker | None, args: Any) -> None:
    """Call work(t, threads, args) for every t < threads, then join likewise if there is one.

    They run on as many threads, at most those of Numba's pool; one runs on the calling thread.
    The mask is that of the calling thread and is restored. Checks belong before: kernels do not
    raise.
    """
    n_threads = n_workers(threads)
    kinds = _fingerprint(args) if __debug__ else b""
    first, second = work.resolve(args, kinds), join.resolve(args, kinds) if join else 0
    if n_threads == 1:
        _start(1, first, second, args)
        return
    before = numba.get_num_threads()
    mask = min(n_threads, numba.config.NUMBA_NUM_THREADS)
    if mask != before:
        numba.set_num_threads(mask)
    try:
        with _workqueue_lock if _is_workqueue() else contextlib.nullcontext():
            _start(n_threads, first, second, args)
    finally:
        if mask != before:
            numba.set_num_threads(before)


def _is_workqueue() -> bool:
    """Whether Numba runs on its own pool; before the first launch nobody knows, so yes."""
    try:
        return bool(numba.threading_layer() == "workqueue")
    except ValueError:
        return True
