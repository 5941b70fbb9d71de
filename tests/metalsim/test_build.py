"""Builds: found again by hash, made for AArch64 too, refused with the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

mx = pytest.importorskip("mlx.core")

from metalsim import MetalError, compiler, lines  # noqa: E402
from metalsim.machine import Library  # noqa: E402

SCRIPT = """
import sys
from metalsim import Mode, compiler, demo, running
compiled = []
run = compiler._run
compiler._run = lambda command: (compiled.append(command), run(command))
with running(Mode.CHECKED):
    demo.quantize(4).run()
print(len(compiled))
"""


def in_another_process(cache: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"MINFER_CACHE_DIR": str(cache), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    # Runtime and kernel, each linked; the lint pass; and the header of the two passes.
    assert in_another_process(tmp_path) == 7
    assert in_another_process(tmp_path) == 0
    suffixes = sorted(p.suffix for p in (tmp_path / "metalsim").iterdir())
    assert suffixes == [".pch", ".pch", ".so", ".so"]


def test_processes_may_build_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    environment = {"MINFER_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    children = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(2)
    ]
    for child in children:
        _, errors = child.communicate()
        assert child.returncode == 0, errors.decode()
    assert len(list((tmp_path / "metalsim").iterdir())) == 4


def test_another_text_is_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path))
    a = compiler.build_kernel("int a;\n", checked=False)
    assert compiler.build_kernel("int a;\n", checked=False) == a
    assert compiler.build_kernel("int b;\n", checked=False) != a
    assert compiler.build_kernel("int a;\n", checked=True) != a


@pytest.mark.parametrize("checked", [False, True])
def test_aarch64_compiles(checked: bool, tmp_path: Path) -> None:
    if not compiler.uses_zig(compiler.find()[0]):
        pytest.skip("only zig has the headers of another machine")
    runtime = tmp_path / "runtime.o"
    subprocess.run([*compiler.runtime_command("aarch64"), "-o", str(runtime)], check=True)
    source, kernel = tmp_path / "kernel.cpp", tmp_path / "kernel.o"
    source.write_text("half f(half x) { return simd_sum(exp(x)); }\n")
    command = compiler.object_command(checked, "aarch64")
    subprocess.run([*command, str(source), "-o", str(kernel)], check=True)
    for built in (runtime, kernel):
        header = built.read_bytes()[:20]
        assert header[:5] == b"\x7fELF\x02" and header[18:20] == b"\xb7\x00"  # 64-bit, AArch64


def test_no_compiler_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALSIM_CXX", "no-such-compiler")
    compiler.find.cache_clear()
    try:
        with pytest.raises(MetalError, match=r"pip install ziglang.*METALSIM_CXX"):
            compiler.find()
    finally:
        monkeypatch.undo()
        compiler.find.cache_clear()


def test_an_old_compiler_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "clang++"
    old.write_text("#!/bin/sh\necho clang version 14.0.6\n")
    old.chmod(0o755)
    monkeypatch.delenv("METALSIM_CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler.find.cache_clear()
    try:
        assert compiler.find()[0][0] != "clang++"
    finally:
        monkeypatch.undo()
        compiler.find.cache_clear()


def test_code_without_a_line_goes_with_the_line_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [(16, "k", 3, False), (20, "k", 0, False), (24, "k", 7, False), (32, "k", 7, True)]
    monkeypatch.setattr(lines, "_section", lambda data, name: b"")
    monkeypatch.setattr(lines, "_rows", lambda data: iter(rows))
    library = tmp_path / "empty"
    library.touch()
    found = {offset: lines.line_of(library, offset) for offset in (15, 16, 21, 24, 31, 32)}
    assert found == {15: None, 16: ("k", 3), 21: ("k", 3), 24: ("k", 7), 31: ("k", 7), 32: None}


def test_a_damaged_build_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path))
    path = compiler.build_kernel("int damaged;\n", checked=False)
    path.write_bytes(b"")
    with pytest.raises(MetalError, match=rf"a build is damaged .*{path.name}.*; delete it"):
        Library(path)
