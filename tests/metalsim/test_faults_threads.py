"""Races, barriers and simdgroup operations: each planted fault is found."""

from __future__ import annotations

import pytest

mx = pytest.importorskip("mlx.core")

from metalsim.planted import BARRIER, START, Case, check  # noqa: E402

CASES = [
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
        "two barriers on one line",
        START + f"if (sg < 4) {{ {BARRIER} }} else {{ {BARRIER} }}\nout[g] = x[g];",
        "divergent threadgroup_barrier",
    ),
    Case(
        "two simd operations on one line",
        START + "out[g] = lane < 16 ? simd_sum(x[g]) : simd_sum(2.0f);",
        "divergent simd operation",
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
        "a barrier does not order threadgroups",
        START + "threadgroup_barrier(mem_flags::mem_device);\nout[t] = x[g % 256];",
        "data race on 'out'[224] (device memory): write by threadgroup (1,0,0) thread 224",
        "out[t] = x[g % 256];",
        grid=512,
    ),
    Case(
        "simdgroup_barrier does not order readers in other simdgroups",
        START
        + f"if (t == 0) s[0] = 1;\n{BARRIER}\nfloat v = s[0];\n"
        + "simdgroup_barrier(mem_flags::mem_threadgroup);\nif (t == 223) s[0] = 2;\nout[g] = v;",
        "data race on 's'[0] (threadgroup memory): write by threadgroup (0,0,0) thread 223 "
        "[simdgroup 6 lane 31] is not ordered after read by several threads",
        "if (t == 223) s[0] = 2;",
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
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.title)
def test_planted_fault(case: Case) -> None:
    check(case)
