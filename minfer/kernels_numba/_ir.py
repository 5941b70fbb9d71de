"""Emitted loops as Numba intrinsics.

Numba has no f16 arithmetic, no byte dot product and no say over vector shape, so the innermost
loops are emitted as IR through `Emitter` and become functions that a kernel calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import cgutils as _cgutils
from numba.core import types as _types
from numba.extending import intrinsic

from minfer.kernels_numba._emit import I8, I64, Emitter

# Numba's own hints are partial and differ between versions.
cgutils: Any = _cgutils
types: Any = _types
NUMBA_TYPES = {"p": types.intp, "i": types.int32, "f": types.float32, "v": types.void}


def intrinsic_of(signature: str, emit: Callable[..., Any]) -> Any:
    """A Numba intrinsic whose body is written by `emit(emitter, *args)`.

    signature: argument letters, a colon, the result: p intp, i int32, f float32, v nothing;
    "ppf:v" takes two addresses and a float. `emit` returns the result's IR value.
    """
    letters, result = signature.split(":")
    typed = NUMBA_TYPES[result](*(NUMBA_TYPES[letter] for letter in letters))

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = emit(Emitter(context, builder), *args)
        return context.get_dummy_value() if result == "v" else value

    # Numba reads the arity from the function's own signature, so it is spelled out here.
    names = ", ".join(f"a{i}" for i in range(len(letters)))
    space: dict[str, Any] = {"typed": typed, "codegen": codegen}
    exec(f"def emitted(typing_context, {names}): return typed, codegen", space)
    return intrinsic(space["emitted"])


def _address(_typing_context: Any, array: Any) -> Any:

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, I64)

    return types.intp(array), codegen


# address(array): where an array's first element lies, intp; the caller keeps the array alive.
address: Any = intrinsic(_address)
# fetch_add(address): atomically adds 1 to the int64 there and returns what it was.
fetch_add = intrinsic_of("p:p", lambda e, counter: e.fetch_add(counter))
# exp2(t): `Emitter.exp2` of one f32.
exp2 = intrinsic_of("f:f", lambda e, t: e.lane(e.exp2(e.splat(t)), 0))
# fma(a, b, c): a * b + c with one rounding, f32.
fma = intrinsic_of("fff:f", lambda e, a, b, c: e.fma(a, b, c))


def _pointer(e: Emitter, at: Any) -> Any:
    return e.builder.inttoptr(at, I8.as_pointer())


def _copy_bytes(e: Emitter, source: Any, target: Any, size: Any) -> None:
    cgutils.raw_memcpy(e.builder, _pointer(e, target), _pointer(e, source), size, 1)


def _move_bytes(e: Emitter, source: Any, target: Any, size: Any) -> None:
    cgutils.raw_memmove(e.builder, _pointer(e, target), _pointer(e, source), size, 1)


def _zero_bytes(e: Emitter, target: Any, size: Any) -> None:
    cgutils.memset(e.builder, _pointer(e, target), size, 0)


copy_bytes = intrinsic_of("ppp:v", _copy_bytes)  # source, target, size
move_bytes = intrinsic_of("ppp:v", _move_bytes)  # the same, for ranges that may overlap
zero_bytes = intrinsic_of("pp:v", _zero_bytes)  # target, size
