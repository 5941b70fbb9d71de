"""Bounds, initialisation, compiler errors and limits: each planted fault is found."""

from __future__ import annotations

import pytest

mx = pytest.importorskip("mlx.core")

from metalsim import MetalError, Mode  # noqa: E402
from metalsim.planted import BARRIER, ONES, START, Case, check  # noqa: E402

HISTOGRAM = (
    "atomic_fetch_add_explicit(&out[thread_position_in_grid.x % 4], 1, memory_order_relaxed);"
)

CASES = [
    Case(
        "device read past the end",
        START + "out[g] = x[g + 1];",
        "out-of-bounds read of 4 bytes: 'x'[256] (size 256 elements) by threadgroup (0,0,0) "
        "thread 255",
        "out[g] = x[g + 1];",
    ),
    Case(
        "device read past the end, found by a guard page",
        START + "out[g] = x[g + 1];",
        "memory fault: 'x'[256] (size 256 elements) by threadgroup (0,0,0) thread 255",
        "out[g] = x[g + 1];",
        mode=Mode.FAST,
    ),
    Case(
        "device write before the start",
        START + "out[int(g) - 1] = x[g];",
        "out-of-bounds write of 4 bytes: 'out'[-1] (size 256 elements) by threadgroup (0,0,0) "
        "thread 0",
        "out[int(g) - 1] = x[g];",
    ),
    Case(
        "half an element before the start",
        START + "out[g] = ((const device half*)x)[int(g) - 1];",
        "out-of-bounds read of 2 bytes: 'x'[-1] (size 256 elements)",
        "out[g] = ((const device half*)x)[int(g) - 1];",
    ),
    Case(
        "threadgroup array overrun",
        START + f"s[t + 1] = x[g];\n{BARRIER}\nout[g] = s[t];",
        "k: index 256 is outside of 's' of type 'float[256]' on line 10 by threadgroup (0,0,0) "
        "thread 255 [simdgroup 7 lane 31]",
        "s[t + 1] = x[g];",
    ),
    Case(
        "threadgroup array overrun by a pointer",
        START + f"threadgroup float* p = s;\np[t + 1] = x[g];\n{BARRIER}\nout[g] = s[t];",
        "out-of-bounds write of 4 bytes: 's'[256] (size 256 elements)",
        "p[t + 1] = x[g];",
    ),
    Case(
        "array of a thread overrun",
        START + "float a[4] = {};\na[int(x[g]) + 3] = 1;\nout[g] = a[g % 4];",
        "k: index 4 is outside of 'float[4]' on line 11 by threadgroup (0,0,0) thread 0 [simdgroup",
        "a[int(x[g]) + 3] = 1;",
    ),
    Case(
        "matrix load past the end",
        START + "simdgroup_float8x8 a;\nsimdgroup_load(a, x + 200, 8);\n"
        "out[g] = a.thread_elements()[0];",
        "out-of-bounds read of 4 bytes: 'x'[256]",
        "simdgroup_load(a, x + 200, 8);",
    ),
    Case(
        "misaligned vector",
        START + "out[g] = ((const device half2*)((const device half*)x + 1))[0].x;",
        "misaligned read of 4 bytes: 'x' at byte 2",
        "out[g] = ((const device half2*)((const device half*)x + 1))[0].x;",
    ),
    Case(
        "uninitialised threadgroup read",
        START + f"if (t < 255) s[t] = x[g];\n{BARRIER}\nout[g] = s[t];",
        "read of uninitialised threadgroup memory 's'[255]",
        "out[g] = s[t];",
    ),
    Case(
        "threadgroup memory keeps nothing from one threadgroup to the next",
        START + "if (threadgroup_position_in_grid.x == 0) s[t] = x[t];\nout[g] = s[t];",
        "read of uninitialised threadgroup memory 's'[0] by threadgroup (1,0,0)",
        "out[g] = s[t];",
        grid=512,
        shape=(512,),
    ),
    Case(
        "accumulating into an unset output",
        START + "out[g] += x[g];",
        "read of uninitialised output memory 'out'[0]",
        "out[g] += x[g];",
    ),
    Case("accumulating into a filled output", START + "out[g] += x[g];", None, init_value=0.0),
    Case(
        "output not wholly written",
        START + "if (g < 200) out[g] = x[g];",
        "k: output 'out' is not wholly written: 56 of 256 elements are not, the first is [200]",
    ),
    Case(
        "scratch not wholly written",
        START + "if (g < 200) scratch[g] = x[g];\nout[g] = 1;",
        None,
        outputs=("scratch", "out"),
    ),
    Case(
        "output bytes not wholly written",
        START + "((device uchar*)out)[g * 4] = 1;",
        "output 'out' is not wholly written: 256 of 256 elements are not, the first is [0]",
    ),
    Case(
        "write to an input through a cast",
        START + "*(device float*)(x + g) = 1;\nout[g] = 0;",
        "write to const memory 'x'",
        "*(device float*)(x + g) = 1;",
    ),
    Case(
        "write to a constant table through a cast",
        "*(volatile thread int*)(table + thread_position_in_grid.x % 2) = 1;\n"
        "out[thread_position_in_grid.x] = table[0];",
        "write to const memory 'constants' by threadgroup (0,0,0) thread 0",
        header="constant int table[2] = {1, 2};\n",
    ),
    Case(
        "a constant table",
        "out[thread_position_in_grid.x] = table[thread_position_in_grid.x % 2];",
        None,
        header="constant int table[2] = {1, 2};\n",
    ),
    # --- what Apple's compiler refuses
    Case(
        "write to an input",
        START + "x[g] = 1;\nout[g] = 0;",
        "does not compile",
        "x[g] = 1;",
    ),
    Case(
        "helper lacks an address space",
        "out[thread_position_in_grid.x] = f(x + thread_position_in_grid.x);",
        "a pointer without an address space on line 1: 'const float *'",
        header="inline float f(const float* p) { return *p; }\n",
    ),
    Case(
        "a template's helper lacks an address space",
        "out[thread_position_in_grid.x] = f(x + thread_position_in_grid.x);",
        "a pointer without an address space on line 1: 'const T *'",
        header="template <typename T> float f(const T* p) { return *p; }\n",
    ),
    Case(
        "a cast drops the address space",
        START + "float* p = (float*)out;\np[g] = 1.0f;",
        "a pointer without an address space on line 10: 'float *'",
    ),
    Case(
        "products are no pointers",
        START + "float a = x[g], b = 2.0f;\nout[g] = (a * b) + int(a) * (lane & 1u);",
        None,
    ),
    Case("a trap", START + "if (t == 3) __builtin_trap();\nout[g] = 1.0f;", "trap by threadgroup"),
    Case(
        "helper with its address space",
        "out[thread_position_in_grid.x] = f(x + thread_position_in_grid.x);",
        None,
        header="inline float f(const device float* p) { return *p; }\n",
    ),
    Case(
        "threadgroup pointer mixed with device",
        START + "s[t] = 1;\nconst device float* p = s;\nout[g] = p[t];",
        "does not compile",
        "const device float* p = s;",
    ),
    Case("syntax error", START + "out[g] = x[g]", "expected ';'", "out[g] = x[g]"),
    Case("C library", START + "out[g] = expf(x[g]);", "use of undeclared identifier 'expf'"),
    Case("double", START + "double d = x[g];\nout[g] = d;", "double", "double d = x[g];"),
    Case(
        "64-bit reduction",
        START + "out[g] = simd_sum((long)x[g]);",
        "Metal reduces no 64-bit types",
    ),
    # --- limits
    Case(
        "infinite loop",
        START + "while (x[0] > 0) { }\nout[g] = 1;",
        "timeout after 200 ms of CPU time (infinite loop?) in threadgroup (0,0,0) thread 0",
        timeout_ms=200,
    ),
    Case(
        "infinite loop, fast",
        START + "while (x[0] > 0) { }\nout[g] = 1;",
        "timeout after 200 ms of CPU time",
        timeout_ms=200,
        mode=Mode.FAST,
    ),
    Case(
        "integer division by zero",
        START + "out[g] = int(g) / int(x[g] - 1);",
        "integer division by zero by threadgroup (0,0,0) thread 0",
        "out[g] = int(g) / int(x[g] - 1);",
    ),
    Case(
        "too much threadgroup memory",
        "threadgroup float big[9000];\nbig[thread_index_in_threadgroup] = 0;\n"
        "out[thread_position_in_grid.x] = 1;",
        "threadgroup memory of 36000 bytes is over the limit of 32768 bytes (at 'big')",
    ),
    Case(
        "too many buffers",
        "out[thread_position_in_grid.x] = 1;",
        "k: 32 buffers are over Metal's limit of 31",
        outputs=(*(f"o{i}" for i in range(30)), "out"),
    ),
    Case(
        "stack overflow",
        "float a[40000];\nfor (int i = 0; i < 40000; i += 7) a[i] = i * x[0];\n"
        "out[thread_position_in_grid.x] = a[thread_position_in_grid.x * 7];",
        "thread stack overflow (more than 131072 bytes)",
    ),
    Case(
        "threadgroup too large",
        "out[thread_position_in_grid.x] = 1;",
        "k: a threadgroup of 2048 threads is over the limit of 1024",
        grid=2048,
        threadgroup=2048,
        shape=(2048,),
    ),
    Case(
        "atomic histogram",
        HISTOGRAM,
        None,
        shape=(4,),
        dtype=mx.int32,
        init_value=0,
        maker={"atomic_outputs": True},
    ),
    Case(
        "atomic without a start value",
        HISTOGRAM,
        "atomic operation on uninitialised memory",
        HISTOGRAM,
        shape=(4,),
        dtype=mx.int32,
        maker={"atomic_outputs": True},
    ),
    Case(
        "a result that depends on preemption",
        "uint old = atomic_load_explicit(&out[0], memory_order_relaxed);\n"
        "uint one = uint(x[thread_position_in_grid.x]);\n"
        "atomic_store_explicit(&out[0], old + one, memory_order_relaxed);",
        "k: output 'out'[0] depends on the order of the threads (random schedule of seed 1)",
        shape=(1,),
        dtype=mx.uint32,
        init_value=0,
        maker={"atomic_outputs": True},
    ),
    Case(
        "a result that depends on the order",
        "uint g = thread_position_in_grid.x;\n"
        "uint old = atomic_fetch_add_explicit(&out[0], 1, memory_order_relaxed);\n"
        "atomic_store_explicit(&out[1 + g], old, memory_order_relaxed);",
        "k: output 'out'[1] depends on the order of the threads (random schedule of seed 1)",
        shape=(257,),
        dtype=mx.uint32,
        init_value=0,
        maker={"atomic_outputs": True},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.title)
def test_planted_fault(case: Case) -> None:
    check(case)


def test_a_fault_leaves_the_process_usable() -> None:
    good = Case("", START + "out[g] = x[g] * 2;", None)
    for case in CASES:
        if case.title in ("infinite loop", "stack overflow", "accumulating into an unset output"):
            with pytest.raises(MetalError):
                case.run()
            assert mx.array_equal(good.run(), ONES * 2).item()
