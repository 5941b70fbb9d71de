"""Threadgroup variables become references to simulated memory; lines stay where they are."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core")

from metalsim.translate import threadgroup_variables


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "{ threadgroup float a[N]; }",
            "{ typedef  float a__type[N]; METALSIM_THREADGROUP(a, 0); }",
        ),
        (
            "threadgroup half a[8][N < 4 ? 1 : 2], b; threadgroup int c[2];",
            "typedef  half a__type[8][N < 4 ? 1 : 2], b__type; METALSIM_THREADGROUP(a, 0); "
            "METALSIM_THREADGROUP(b, 1); typedef  int c__type[2]; METALSIM_THREADGROUP(c, 2);",
        ),
        (
            "threadgroup vec<float, 4> a[2];",
            "typedef  vec<float, 4> a__type[2]; METALSIM_THREADGROUP(a, 0);",
        ),
        (
            "threadgroup float a[4], // first\n    b[f(2, 3)];\nx;",
            "typedef  float a__type[4],      b__type[f(2, 3)]; METALSIM_THREADGROUP(a, 0); "
            "METALSIM_THREADGROUP(b, 1);\n\nx;",
        ),
        (
            "#define N 4\n// threadgroup float no[4];\nthreadgroup float a[N];",
            "#define N 4\n// threadgroup float no[4];\n"
            "typedef  float a__type[N]; METALSIM_THREADGROUP(a, 0);",
        ),
        ("{ threadgroup float* p = a; }", "{ threadgroup float* p = a; }"),
        ("{ threadgroup float& r = a[0]; }", "{ threadgroup float& r = a[0]; }"),
        ("void f(threadgroup float* a, int b) {}", "void f(threadgroup float* a, int b) {}"),
        ("x = (const threadgroup half4*)p;", "x = (const threadgroup half4*)p;"),
    ],
)
def test_threadgroup_variables(text: str, expected: str) -> None:
    assert threadgroup_variables(text) == expected
    assert expected.count("\n") == text.count("\n")
