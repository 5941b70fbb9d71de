"""The plain half of the emitter: constants, memory and control flow, sixteen lanes at a time.

Addresses are i64 and alignment is never assumed, because q8_0 blocks are 34 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils as _cgutils

cgutils: Any = _cgutils  # Numba's own hints are partial and differ between versions

F32, F16 = ir.FloatType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
LANES = 16


def vector(element: Any, count: int = LANES) -> Any:
    """The LLVM type of `count` elements."""
    return ir.VectorType(element, count)


VF, VI, VH, VB = vector(F32), vector(I32), vector(I16), vector(I8, 64)


class Isa(NamedTuple):
    """Instructions of the compile target that have a portable twin with the same bits."""

    dot: bool  # u8 x s8 byte products summed to int32 (AVX-512 VNNI)
    half: bool  # f16 conversion

    @classmethod
    def of(cls, codegen: Any) -> Isa:
        """What Numba compiles for, NUMBA_CPU_NAME and NUMBA_CPU_FEATURES included."""
        triple, _cpu, features = codegen.magic_tuple()
        has = frozenset(features.split(","))
        arm = triple.startswith(("aarch64", "arm64"))
        return cls({"+avx512vnni", "+avx512f"} <= has, arm or "+f16c" in has)

    def __str__(self) -> str:
        half = "hardware f16" if self.half else "portable f16"
        return f"{'avx512vnni' if self.dot else 'portable byte products'}, {half}"


class Block:
    """Writes IR at the end of one basic block."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context = context
        self.builder = builder
        self.isa = Isa.of(context.codegen())

    # -- values ---------------------------------------------------------------------------------

    def const(self, kind: Any, value: Any) -> Any:
        """A constant; a vector takes one value per lane or one for all lanes."""
        if not isinstance(kind, ir.VectorType):
            return ir.Constant(kind, value)
        lanes = list(value) if hasattr(value, "__len__") else [value] * kind.count
        return ir.Constant(kind, [ir.Constant(kind.element, lane) for lane in lanes])

    def index(self, value: Any) -> Any:
        """`value` as i64: an IR value as it is, a Python int as a constant."""
        return value if isinstance(value, ir.Value) else ir.Constant(I64, int(value))

    def add(self, *terms: Any) -> Any:
        """Sum of i64 terms; Python ints fold."""
        constant = sum(term for term in terms if isinstance(term, int))
        total = None
        for term in terms:
            if not isinstance(term, int):
                total = term if total is None else self.builder.add(total, term)
        if total is None:
            return self.index(constant)
        return self.builder.add(total, self.index(constant)) if constant else total

    def mul(self, a: Any, b: Any) -> Any:
        """Product of i64 values or Python ints."""
        if isinstance(a, int) and isinstance(b, int):
            return self.index(a * b)
        return self.builder.mul(self.index(a), self.index(b))

    def splat(self, scalar: Any, count: int = LANES) -> Any:
        """The scalar in every lane."""
        empty = ir.Constant(vector(scalar.type, count), ir.Undefined)
        one = self.builder.insert_element(empty, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, empty, self.const(vector(I32, count), 0))

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Lanes of `a` (0..n-1) and `b` (n..2n-1) in the given order."""
        return self.builder.shuffle_vector(a, b, self.const(vector(I32, len(lanes)), lanes))

    def concat(self, a: Any, b: Any) -> Any:
        """The lanes of `a`, then those of `b`."""
        return self.shuffle(a, b, range(2 * a.type.count))

    def lane(self, value: Any, index: int) -> Any:
        """One lane as a scalar."""
        return self.builder.extract_element(value, ir.Constant(I32, index))

    # -- memory ---------------------------------------------------------------------------------

    def load(self, kind: Any, address: Any, offset: Any = 0) -> Any:
        """A value of LLVM type `kind` at address + offset bytes."""
        pointer = self.builder.inttoptr(self.add(address, offset), kind.as_pointer())
        value = self.builder.load(pointer)
        value.align = 1
        return value

    def store(self, value: Any, address: Any, offset: Any = 0) -> None:
        """Write `value` at address + offset bytes."""
        pointer = self.builder.inttoptr(self.add(address, offset), value.type.as_pointer())
        self.builder.store(value, pointer).align = 1

    def load_splat(self, kind: Any, address: Any, offset: Any = 0, count: int = LANES) -> Any:
        """The scalar at address + offset in every lane."""
        return self.splat(self.load(kind, address, offset), count)

    def load_head(self, address: Any, offset: Any, count: Any) -> Any:
        """The first `count` (i64, below 16) floats at address + offset, zero in other lanes."""
        pointer = self.builder.inttoptr(self.add(address, offset), VF.as_pointer())
        lanes = self._first_lanes(count)
        zero = self.const(VF, 0.0)
        return self.call("llvm.masked.load.v16f32.p0", VF, pointer, self.const(I32, 1), lanes, zero)

    def store_head(self, value: Any, address: Any, offset: Any, count: Any) -> None:
        """Write the first `count` (i64, below 16) lanes of <16 x float> at address + offset."""
        pointer = self.builder.inttoptr(self.add(address, offset), VF.as_pointer())
        lanes, name = self._first_lanes(count), "llvm.masked.store.v16f32.p0"
        self.call(name, ir.VoidType(), value, pointer, self.const(I32, 1), lanes)

    def _first_lanes(self, count: Any) -> Any:
        limit = self.splat(self.builder.trunc(count, I32))
        return self.builder.icmp_unsigned("<", self.const(VI, range(LANES)), limit)

    def strips(self, n: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Emit the caller's body twice: for whole groups of 16 floats of n, and for the rest.

        Yields (byte offset, load(address, offset), store(value, address, offset)); loads of the
        rest give zero past n, so that an element's bits do not depend on where a row ends.
        """
        whole, rest = self.builder.udiv(n, self.index(16)), self.builder.urem(n, self.index(16))
        with self.loop(whole) as i:
            yield self.mul(i, 4 * LANES), lambda a, at: self.load(VF, a, at), self.store
        with self.when(self.builder.icmp_unsigned("!=", rest, self.index(0))):
            yield (
                self.mul(whole, 4 * LANES),
                lambda a, at: self.load_head(a, at, rest),
                lambda value, a, at: self.store_head(value, a, at, rest),
            )

    def gather(self, kind: Any, addresses: Sequence[Any], offset: Any = 0) -> Any:
        """One scalar from each address, lane by lane."""
        value = ir.Constant(vector(kind, len(addresses)), ir.Undefined)
        for lane, address in enumerate(addresses):
            scalar = self.load(kind, address, offset)
            value = self.builder.insert_element(value, scalar, ir.Constant(I32, lane))
        return value

    def rows(self, address: Any, stride: Any, count: int = LANES) -> list[Any]:
        """Addresses of `count` rows `stride` bytes apart."""
        return [self.add(address, self.mul(stride, row) if row else 0) for row in range(count)]

    def prefetch(self, address: Any, offset: Any = 0, locality: int = 2) -> None:
        """Ask for the line at address + offset; locality 3 is L1, 2 is L2."""
        pointer = self.builder.inttoptr(self.add(address, offset), I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        flags = [ir.Constant(I32, value) for value in (0, locality, 1)]
        self.builder.call(function, [pointer, *flags])

    def fetch_add(self, address: Any, step: int = 1) -> Any:
        """Atomically add to the int64 at address; returns what it was."""
        pointer = self.builder.inttoptr(address, I64.as_pointer())
        return self.builder.atomic_rmw("add", pointer, self.index(step), "seq_cst")

    def variable(self, initial: Any) -> Any:
        """A stack slot holding `initial`; LLVM keeps it in a register."""
        slot = cgutils.alloca_once(self.builder, initial.type)
        self.builder.store(initial, slot)
        return slot

    def get(self, slot: Any) -> Any:
        """The value of a `variable`."""
        return self.builder.load(slot)

    def set(self, slot: Any, value: Any) -> None:
        """Assign a `variable`."""
        self.builder.store(value, slot)

    # -- control --------------------------------------------------------------------------------

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        """Emit the body once, run it for index 0 .. count-1 (i64)."""
        with cgutils.for_range(self.builder, self.index(count), intp=I64) as body:
            yield body.index

    @contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        """Emit the body under an i1 condition."""
        with self.builder.if_then(condition):
            yield

    def call(self, name: str, result: Any, *args: Any) -> Any:
        """Call an LLVM intrinsic by name."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, args)
