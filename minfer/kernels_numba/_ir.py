"""Inner loops written as LLVM IR: sixteen lanes at integer addresses, one meaning on every CPU.

Numba has no f16 arithmetic, no byte dot product and no say over vector shape, so the innermost
loops are emitted as IR through `Emitter` and become Numba intrinsics through `intrinsic_of`.
Every operation has one result on every target: where the compile target has an instruction
(AVX-512 VNNI, F16C) it is used, elsewhere integer code gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types as _types
from numba.extending import intrinsic

from minfer.kernels_numba._emit import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VB,
    VF,
    VH,
    VI,
    Block,
    vector,
)

__all__ = [
    "EXP2",
    "F16",
    "F32",
    "I1",
    "I8",
    "I16",
    "I32",
    "I64",
    "LANES",
    "LOG2E",
    "ROUND",
    "VB",
    "VF",
    "VH",
    "VI",
    "Emitter",
    "address",
    "exp2",
    "fetch_add",
    "intrinsic_of",
    "vector",
]

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

types: Any = _types  # Numba's own hints are partial and differ between versions
NUMBA_TYPES = {"p": types.intp, "i": types.int32, "f": types.float32, "v": types.void}


class Emitter(Block):
    """Arithmetic on top of `Block`; every operation has one result on every target."""

    # -- arithmetic -----------------------------------------------------------------------------

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c with one rounding, f32 scalar or vector."""
        wide = isinstance(a.type, ir.VectorType)
        return self.call(
            f"llvm.fma.v{a.type.count}f32" if wide else "llvm.fma.f32", a.type, a, b, c
        )

    def rint(self, value: Any) -> Any:
        """Nearest integer, ties to even, as f32; |value| < 2**22 (exact by the magic constant)."""
        magic = self.const(value.type, ROUND)
        return self.builder.fsub(self.builder.fadd(value, magic), magic)

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
