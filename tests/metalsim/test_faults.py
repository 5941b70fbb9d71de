"""Planted faults: each is found, and told in words that name the place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

from metalsim import MetalError, Mode, metal_kernel, running  # noqa: E402

START = (
    "uint t = thread_index_in_threadgroup, g = thread_position_in_grid.x,"
    " lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;\n"
    "threadgroup float s[256];\n"
)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
HISTOGRAM = (
    "atomic_fetch_add_explicit(&out[thread_position_in_grid.x % 4], 1, memory_order_relaxed);"
)
ONES = mx.ones(256)


@dataclass(frozen=True)
class Case:
    """A kernel of one input `x` and one output `out`; `words` of its error, none if it is right."""

    title: str
    source: str
    words: str | None  # None: the kernel is correct
    line: str | None = None  # the text of the source line that the error shows
    grid: int = 256
    threadgroup: int = 256
    shape: tuple[int, ...] = (256,)
    x: Any = ONES
    dtype: Any = mx.float32
    header: str = ""
    mode: Mode = Mode.CHECKED
    timeout_ms: int = 60_000
    init_value: float | None = None
    maker: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Any:
        kernel = metal_kernel("k", ["x"], ["out"], self.source, self.header, **self.maker)
        with running(self.mode, timeout_ms=self.timeout_ms):
            return kernel(
                inputs=[self.x],
                grid=(self.grid, 1, 1),
                threadgroup=(self.threadgroup, 1, 1),
                output_shapes=[self.shape],
                output_dtypes=[self.dtype],
                init_value=self.init_value,
            )[0]


CASES = [
    # --- races and barriers
    Case(
        "missing barrier",
        START + "s[t] = x[g];\nout[g] = s[255 - t];",
        "k: read of uninitialised threadgroup memory 's'[255] by threadgroup (0,0,0) thread 0",
        "out[g] = s[255 - t];",
    ),
    Case(
        "missing barrier, the other order",
        START + "s[t] = x[g];\nout[g] = s[t ^ 1];",
        "read of uninitialised threadgroup memory 's'[1]",
        "out[g] = s[t ^ 1];",
    ),
    Case(
        "read after a write that no barrier orders",
        START + "s[t] = x[g];\nout[g] = s[t / 2];",
        "data race on 's'[0] (threadgroup memory): read by threadgroup (0,0,0) thread 1 "
        "[simdgroup 0 lane 1] is not ordered after write by thread 0 of threadgroup #0",
        "out[g] = s[t / 2];",
    ),
    Case(
        "write after a read that no barrier orders",
        START + f"s[t] = x[g];\n{BARRIER}\nfloat v = s[(t + 1) % 256];\ns[t] = v;\nout[g] = v;",
        "data race on 's'[225] (threadgroup memory): write by threadgroup (0,0,0) thread 225 "
        "[simdgroup 7 lane 1] is not ordered after read by thread 224 of threadgroup #0",
        "s[t] = v;",
    ),
    Case(
        "barrier for the wrong memory",
        START + "s[t] = x[g];\nthreadgroup_barrier(mem_flags::mem_device);\nout[g] = s[255 - t];",
        "data race on 's'[31] (threadgroup memory): read by threadgroup (0,0,0) thread 224",
        "out[g] = s[255 - t];",
    ),
    Case(
        "barrier for no memory",
        START + "s[t] = x[g];\nthreadgroup_barrier(mem_flags::mem_none);\nout[g] = s[255 - t];",
        "data race on 's'[31]",
        "out[g] = s[255 - t];",
    ),
    Case(
        "device memory needs a device barrier",
        START + f"out[g] = x[g];\n{BARRIER}\nfloat v = out[255 - t];\ns[t] = v;",
        "data race on 'out'[31] (device memory): read",
        "float v = out[255 - t];",
    ),
    Case(
        "a device barrier orders device memory",
        START
        + "out[g] = x[g];\nthreadgroup_barrier(mem_flags::mem_device);\n"
        + "float v = out[255 - t];\nthreadgroup_barrier(mem_flags::mem_device);\nout[g] = v;",
        None,
    ),
    Case(
        "simdgroup_barrier where threadgroup_barrier is needed",
        START
        + "s[t] = x[g];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nout[g] = s[255 - t];",
        "'s'[255]",
        "out[g] = s[255 - t];",
    ),
    Case(
        "simdgroup_barrier within one simdgroup",
        START
        + "s[t] = x[g];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nfloat v = s[t ^ 31];\n"
        + "simdgroup_barrier(mem_flags::mem_threadgroup);\ns[t] = v;\nout[g] = v;",
        None,
    ),
    Case(
        "simdgroup_barrier orders several readers before a writer",
        START
        + "s[t] = x[g];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nfloat v = s[sg * 32];\n"
        + "simdgroup_barrier(mem_flags::mem_threadgroup);\ns[t] = v;\nout[g] = v;",
        None,
    ),
    Case(
        "a simd operation orders no memory",
        START + "s[t] = x[g];\nfloat v = simd_sum(x[g]);\nout[g] = v + s[t ^ 1];",
        "data race on 's'[1]",
        "out[g] = v + s[t ^ 1];",
    ),
    Case(
        "divergent barrier",
        START + f"s[t] = x[g];\nif (sg < 4) {{\n  {BARRIER}\n}}\nout[g] = s[t];",
        "divergent threadgroup_barrier: threadgroup (0,0,0) thread 128 [simdgroup 4 lane 0] "
        "returned while 128 threads wait at the barrier",
        BARRIER,
    ),
    Case(
        "two different barriers",
        START + f"if (sg < 4)\n  {BARRIER}\nelse\n  {BARRIER}\nout[g] = x[t];",
        "divergent threadgroup_barrier: threadgroup (0,0,0) thread 128 [simdgroup 4 lane 0] is "
        "at line",
        BARRIER,
    ),
    Case(
        "return before a barrier, the last threads",
        START + f"if (g >= 200) return;\ns[t] = x[g];\n{BARRIER}\nout[g] = s[t];",
        "divergent threadgroup_barrier: threadgroup (0,0,0) thread 200 [simdgroup 6 lane 8] "
        "returned while 200 threads wait",
        BARRIER,
    ),
    Case(
        "return before a barrier, the first threads",
        START + f"if (g < 60) return;\ns[t] = x[g];\n{BARRIER}\nout[g] = s[t];",
        "60 threads have returned",
        BARRIER,
    ),
    Case(
        "cross-threadgroup race",
        START + "out[t] = x[g % 256];",
        "data race on 'out'[0] (device memory): write by threadgroup (1,0,0) thread 0 "
        "[simdgroup 0 lane 0] is not ordered after write by thread 0 of threadgroup #0",
        "out[t] = x[g % 256];",
        grid=512,
    ),
    Case(
        "all lanes store the same cell",
        START + "float v = simd_sum(x[g]);\nout[sg] = v;",
        "data race on 'out'[0] (device memory): write by threadgroup (0,0,0) thread 1",
        "out[sg] = v;",
        shape=(8,),
    ),
    # --- simdgroup operations
    Case(
        "two simd operations in divergent branches",
        START + "float v = x[g];\nif (lane < 16)\n  v = simd_sum(v);\nelse\n  v = simd_max(v);\n"
        "out[g] = v;",
        "divergent simd operation: threadgroup (0,0,0) thread 16 [simdgroup 0 lane 16] is at "
        "simd_max",
        "v = simd_max(v);",
    ),
    Case(
        "a simd operation that half of the lanes skip",
        START + f"float v = x[g];\nif (lane < 16)\n  v = simd_sum(v);\n{BARRIER}\nout[g] = v;",
        "deadlock in threadgroup #0: 128 threads wait at threadgroup_barrier (line 13), 128 in "
        "simd operations (line 12)",
        BARRIER,
    ),
    Case(
        "lanes that return while others wait at a simd operation",
        START + "out[g] = 0;\nif (lane >= 16) return;\nout[g] = simd_sum(x[g]);",
        "divergent simd operation: threadgroup (0,0,0) thread 16 [simdgroup 0 lane 16] returned "
        "while 16 lanes wait at simd_sum",
        "out[g] = simd_sum(x[g]);",
    ),
    Case(
        "lanes that return before a simd operation",
        START + "out[g] = 0;\nif (lane < 16) return;\nout[g] = simd_sum(x[g]);",
        "simd_sum on line 12 but 16 lanes have returned",
        "out[g] = simd_sum(x[g]);",
    ),
    Case(
        "a simd operation under a branch that whole simdgroups take",
        START + "float v = x[g];\nif (sg < 4) v = simd_sum(v);\nout[g] = v;",
        None,
    ),
    Case(
        "simd_sum of an incomplete simdgroup",
        "out[thread_position_in_grid.x] = simd_sum(x[thread_position_in_grid.x]);",
        None,
        grid=40,
        threadgroup=64,
        shape=(40,),
    ),
    Case(
        "shuffle from an absent lane",
        START + "out[g] = simd_shuffle(x[g], 31);",
        "simd shuffle or broadcast from an absent lane on line 10 by threadgroup (0,0,0) thread 32",
        "out[g] = simd_shuffle(x[g], 31);",
        grid=40,
        threadgroup=64,
        shape=(40,),
    ),
    Case(
        "matrix operation of an incomplete simdgroup",
        START + "simdgroup_float8x8 a(1.0f);\nsimdgroup_multiply(a, a, a);\n"
        "out[g] = a.thread_elements()[0];",
        "simdgroup_matrix operation with absent lanes on line 11",
        "simdgroup_multiply(a, a, a);",
        grid=8,
        threadgroup=32,
        shape=(8,),
    ),
    # --- bounds and initialisation
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
        "threadgroup array overrun",
        START + f"s[t + 1] = x[g];\n{BARRIER}\nout[g] = s[t];",
        "out-of-bounds write of 4 bytes: 's'[256] (size 256 elements)",
        "s[t + 1] = x[g];",
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
        "no matching function for call to 'f'",
        header="inline float f(const float* p) { return *p; }\n",
    ),
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
    Case(
        "an unsuffixed literal is float",
        START + "out[g] = (x[g] * 0.1) == (x[g] * 0.1f) ? 1 : 0;",
        None,
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
    if case.words is None:
        case.run()
        return
    with pytest.raises(MetalError) as caught:
        case.run()
    message = str(caught.value)
    assert case.words in message
    if case.line is not None:
        assert case.line in message.split("\n", 1)[1]


def test_a_fault_leaves_the_process_usable() -> None:
    good = Case("", START + "out[g] = x[g] * 2;", None)
    for case in CASES:
        if case.words and case.title in ("infinite loop", "stack overflow", "missing barrier"):
            with pytest.raises(MetalError):
                case.run()
        assert mx.array_equal(good.run(), ONES * 2).item()
