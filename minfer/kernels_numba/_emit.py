"""The emitter of inner loops: LLVM IR for sixteen lanes at integer addresses.

Every operation has one result on every target: where the compile target has an instruction
(AVX-512 VNNI, F16C) it is used, elsewhere integer code gives the same bits. Alignment is never
assumed, because q8_0 blocks are 34 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils as _cgutils

cgutils: Any = _cgutils  # Numba's own hints are partial and differ between versions

F32, F16 = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
LANES = 16


def vector(element: Any, count: int = LANES) -> Any:
    """The LLVM type of `count` elements."""
    return ir.VectorType(element, count)


VF, VI, VH, VB = vector(F32), vector(I32), vector(I16), vector(I8, 64)

# 2**r on [-1/2, 1/2], degree 6, constant term 1: the polynomial of least maximal relative error
# (Lawson's reweighted least squares in float64), each coefficient rounded to f32. Together with
# f32 evaluation the relative error is at most 8.0e-8 (0.67 units of 2**-23) on [-126, 0].
EXP2 = (
    1.0,
    float.fromhex("0x1.62e430p-1"),
    float.fromhex("0x1.ebfbdcp-3"),
    float.fromhex("0x1.c6aee8p-5"),
    float.fromhex("0x1.3b2d4cp-7"),
    float.fromhex("0x1.5f3e52p-10"),
    float.fromhex("0x1.41fbbcp-13"),
)
LOG2E = float.fromhex("0x1.715476p+0")  # f32(log2(e))
ROUND = 12582912.0  # 1.5 * 2**23: y + ROUND - ROUND is y to the nearest integer, ties to even


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


class Emitter:
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

    def load_first(self, address: Any, offset: Any, count: Any, kind: Any = VF) -> Any:
        """The first `count` (i64, below 16) lanes of `kind` (VF or VH), zero in the others."""
        pointer = self.builder.inttoptr(self.add(address, offset), kind.as_pointer())
        lanes, zero = self._first_lanes(count), ir.Constant(kind, None)
        name = f"llvm.masked.load.v16{'f32' if kind is VF else 'i16'}.p0"
        return self.call(name, kind, pointer, self.const(I32, 1), lanes, zero)

    def store_first(self, value: Any, address: Any, offset: Any, count: Any) -> None:
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
                lambda a, at: self.load_first(a, at, rest),
                lambda value, a, at: self.store_first(value, a, at, rest),
            )

    def gather(self, kind: Any, addresses: Sequence[Any]) -> Any:
        """One scalar from each address, lane by lane."""
        value = ir.Constant(vector(kind, len(addresses)), ir.Undefined)
        for lane, address in enumerate(addresses):
            scalar, place = self.load(kind, address), ir.Constant(I32, lane)
            value = self.builder.insert_element(value, scalar, place)
        return value

    def rows(self, address: Any, stride: Any, count: int = LANES) -> list[Any]:
        """Addresses of `count` rows `stride` bytes apart."""
        return [self.add(address, self.mul(stride, row) if row else 0) for row in range(count)]

    def prefetch(self, address: Any, offset: Any = 0) -> None:
        """Ask for the line at address + offset into L2."""
        pointer = self.builder.inttoptr(self.add(address, offset), I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        flags = [ir.Constant(I32, value) for value in (0, 2, 1)]  # read, L2, data
        self.builder.call(function, [pointer, *flags])

    def fetch_add(self, address: Any) -> Any:
        """Atomically add 1 to the int64 at address; returns what it was."""
        pointer = self.builder.inttoptr(address, I64.as_pointer())
        return self.builder.atomic_rmw("add", pointer, self.index(1), "seq_cst")

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

    # -- arithmetic -----------------------------------------------------------------------------

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c with one rounding, f32 scalar or vector."""
        name = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
        return self.call(f"llvm.fma.{name}", a.type, a, b, c)

    def maximum(self, a: Any, b: Any) -> Any:
        """a > b ? a : b, f32."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce(self, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes to one scalar, by halves: the tree is the same everywhere."""
        count = value.type.count
        while count > 1:
            half = count // 2
            low = self.shuffle(value, value, range(half))
            high = self.shuffle(value, value, range(half, count))
            value, count = combine(low, high), half
        return self.lane(value, 0)

    def exp2(self, t: Any) -> Any:
        """2**t for <16 x float> t <= 0; below -126 it is 0, NaN stays NaN."""
        build = self.builder
        below = build.fcmp_ordered("<", t, self.const(VF, -126.0))
        t = build.select(below, self.const(VF, 0.0), t)
        shifted = build.fadd(t, self.const(VF, ROUND))
        r = build.fsub(t, build.fsub(shifted, self.const(VF, ROUND)))
        p = self.const(VF, EXP2[-1])
        for coefficient in EXP2[-2::-1]:
            p = self.fma(p, r, self.const(VF, coefficient))
        # the low bits of `shifted` are the integer part, 127 biases it to an exponent
        exponent = build.shl(build.bitcast(shifted, VI), self.const(VI, 23))
        power = build.bitcast(build.add(exponent, self.const(VI, 127 << 23)), VF)
        return build.select(below, self.const(VF, 0.0), build.fmul(p, power))

    def dot_u8_s8(self, total: Any, unsigned: Any, signed: Any) -> Any:
        """total + the four products of each lane's bytes, exact int32; all <16 x i32>."""
        if self.isa.dot:
            u, s = (self.builder.bitcast(x, VB) for x in (unsigned, signed))
            return self.call("llvm.x86.avx512.vpdpbusd.512", VI, total, u, s)
        build, pairs = self.builder, vector(I16, 32)
        u, s = (build.bitcast(x, pairs) for x in (unsigned, signed))
        eight = self.const(pairs, 8)
        even = self.pair_sums(
            build.and_(u, self.const(pairs, 255)), build.ashr(build.shl(s, eight), eight)
        )
        odd = self.pair_sums(build.lshr(u, eight), build.ashr(s, eight))
        return build.add(total, build.add(even, odd))

    def pair_sums(self, a: Any, b: Any) -> Any:
        """<32 x i16> times <32 x i16>, neighbours added: the shape LLVM makes pmaddwd of."""
        build, wide = self.builder, vector(I32, 32)
        product = build.mul(build.sext(a, wide), build.sext(b, wide))
        even = self.shuffle(product, product, range(0, 32, 2))
        odd = self.shuffle(product, product, range(1, 32, 2))
        return build.add(even, odd)

    # -- half precision -------------------------------------------------------------------------

    def f16_to_f32(self, bits: Any) -> Any:
        """<n x i16> f16 bits to <n x float>, exact; NaN becomes quiet."""
        count, build = bits.type.count, self.builder
        floats, words = vector(F32, count), vector(I32, count)
        if self.isa.half:
            return build.fpext(build.bitcast(bits, vector(F16, count)), floats)
        wide = build.zext(bits, words)
        magnitude = build.and_(wide, self.const(words, 0x7FFF))
        sign = build.shl(build.and_(wide, self.const(words, 0x8000)), self.const(words, 16))
        shifted = build.shl(magnitude, self.const(words, 13))
        normal = build.add(shifted, self.const(words, 112 << 23))
        special = build.or_(shifted, self.const(words, 0x7F800000))
        nan = build.icmp_unsigned(">", magnitude, self.const(words, 0x7C00))
        special = build.select(nan, build.or_(special, self.const(words, 1 << 22)), special)
        tiny = build.fmul(build.uitofp(magnitude, floats), self.const(floats, 2.0**-24))
        small = build.icmp_unsigned("<", magnitude, self.const(words, 0x400))
        large = build.icmp_unsigned(">=", magnitude, self.const(words, 0x7C00))
        value = build.select(large, special, normal)
        value = build.select(small, build.bitcast(tiny, words), value)
        return build.bitcast(build.or_(value, sign), floats)

    def f32_to_f16(self, value: Any) -> Any:
        """<n x float> to <n x i16> f16 bits: nearest even, overflow to inf, NaN stays NaN."""
        count, build = value.type.count, self.builder
        floats, words, halves = vector(F32, count), vector(I32, count), vector(I16, count)
        if self.isa.half:
            return build.bitcast(build.fptrunc(value, vector(F16, count)), halves)
        bits = build.bitcast(value, words)
        magnitude = build.and_(bits, self.const(words, 0x7FFFFFFF))
        sign = build.lshr(build.and_(bits, self.const(words, -(2**31))), self.const(words, 16))
        top = build.lshr(magnitude, self.const(words, 13))
        bias = build.add(build.and_(top, self.const(words, 1)), self.const(words, 0xFFF))
        rounded = build.lshr(build.add(magnitude, bias), self.const(words, 13))
        normal = build.sub(rounded, self.const(words, 112 << 10))
        infinite = build.icmp_unsigned(">=", magnitude, self.const(words, 0x47800000))
        normal = build.select(infinite, self.const(words, 0x7C00), normal)
        # one unit of 0.5f is 2**-24, the unit of f16 subnormals: the addition rounds to it
        half = build.fadd(build.bitcast(magnitude, floats), self.const(floats, 0.5))
        tiny = build.sub(build.bitcast(half, words), self.const(words, 0x3F000000))
        small = build.icmp_unsigned("<", magnitude, self.const(words, 0x38800000))
        payload = build.and_(top, self.const(words, 0x1FF))
        nan = build.icmp_unsigned(">", magnitude, self.const(words, 0x7F800000))
        result = build.select(small, tiny, normal)
        result = build.select(nan, build.or_(payload, self.const(words, 0x7E00)), result)
        return build.trunc(build.or_(result, sign), halves)

    # -- transposes -----------------------------------------------------------------------------

    def interleave(self, a: Any, b: Any, lanes: Sequence[int], width: int = 4) -> Any:
        """The same shuffle in every group of `width` lanes: 0..width-1 from a, the rest from b."""
        return self.shuffle(
            a,
            b,
            [
                (lane if lane < width else lane - width + LANES) + width * group
                for group in range(LANES // width)
                for lane in lanes
            ],
        )

    def _quads(self, rows: Sequence[Any]) -> list[Any]:
        """Four 16-lane vectors: 4x4 transpose inside each group of four lanes."""
        low = [self.interleave(rows[i], rows[i + 1], [0, 4, 1, 5]) for i in (0, 2)]
        high = [self.interleave(rows[i], rows[i + 1], [2, 6, 3, 7]) for i in (0, 2)]
        return [
            self.interleave(pair[0], pair[1], lanes)
            for pair in (low, high)
            for lanes in ([0, 1, 4, 5], [2, 3, 6, 7])
        ]

    def transpose(self, load_quad: Callable[[int, int], Any], quads: int) -> list[Any]:
        """`load_quad(row, q)` gives 32-bit elements 4q..4q+3 of a row as a 4-lane vector.

        Returns 4 * quads vectors of 16 lanes: vector i holds element i, lane r is row r. Rows
        r, r+4, r+8, r+12 share a vector, so that two levels of shuffles are enough; each row's
        line is read once.
        """
        gathered: list[list[Any]] = [[None] * 4 for _ in range(quads)]
        for row in range(4):
            parts = [[load_quad(row + 4 * k, q) for q in range(quads)] for k in range(4)]
            for q in range(quads):
                low = self.concat(parts[0][q], parts[1][q])
                high = self.concat(parts[2][q], parts[3][q])
                gathered[q][row] = self.concat(low, high)
        return [column for rows in gathered for column in self._quads(rows)]

    def sums_of_four(self, rows: Sequence[Any]) -> Any:
        """Four <16 x float> to one <4 x float> of their lane sums.

        The tree per row: inside each group of four lanes (0+2)+(1+3), then groups (0+2)+(1+3).
        """
        build = self.builder
        pairs = [
            build.fadd(
                self.interleave(rows[i], rows[i + 1], [0, 4, 1, 5]),
                self.interleave(rows[i], rows[i + 1], [2, 6, 3, 7]),
            )
            for i in (0, 2)
        ]
        quads = build.fadd(
            self.interleave(pairs[0], pairs[1], [0, 1, 4, 5]),
            self.interleave(pairs[0], pairs[1], [2, 3, 6, 7]),
        )
        halves = build.fadd(
            self.shuffle(quads, quads, range(8)), self.shuffle(quads, quads, range(8, 16))
        )
        return build.fadd(
            self.shuffle(halves, halves, range(4)), self.shuffle(halves, halves, range(4, 8))
        )
