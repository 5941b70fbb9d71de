"""`python -m tuning compile`: what it compiles, what it reads of a kernel, what it fails on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from minfer import registry
from minfer.format import KvFormat
from minfer.ops import OPS, PREFILL
from minfer.window import WindowMode
from tuning.__main__ import main
from tuning.compiled import command, jobs, usage
from tuning.compiled.calls import CALLS
from tuning.compiled.jobs import Job, Row
from tuning.compiled.usage import Usage

JOB = Job(90, "attn_map", "flash", KvFormat.F16, 128, WindowMode.RUNS, PREFILL, default=True)
FINE = Row(JOB, "_flash_kernel", "a1", Usage(registers=200, stack=0, local=0, shared=512, warps=8))
SPILLED = replace(FINE, digest="b2", usage=Usage(255, 16, 4, 512, 8))


def test_there_is_a_call_of_every_op() -> None:
    assert set(CALLS) == {op.name for op in OPS.values() if "kernels_triton" in op.backends}


def test_every_variant_is_compiled_for_every_format_that_it_reads() -> None:
    wanted = list(jobs.jobs([90], [128], [WindowMode.RUNS]))
    found = {(job.op, job.variant, job.fmt) for job in wanted}
    for op, variants in registry.collect(jobs.PACKAGE).items():
        for variant in variants:
            for fmt in variant.formats if OPS[op].formats and op != "attn_window" else ():
                assert (op, variant.name, fmt) in found
    assert len(found) == len(wanted)


def test_defaults_are_those_of_the_architecture() -> None:
    modes = [WindowMode.RUNS, WindowMode.CAUSAL]
    chosen = list(jobs.jobs([90], [96, 128], modes, ["attn_map"], defaults=True))
    names = {(job.variant, job.fmt, job.head_dim) for job in chosen}
    assert ("split", KvFormat.Q8_0, 96) in names and ("ring", KvFormat.Q8_0, 128) in names
    assert ("split", KvFormat.Q8_0, 128) not in names
    assert not any(variant == "rows" for variant, _, _ in names)
    older = list(jobs.jobs([75], [128], modes, ["attn_map"], defaults=True))
    assert not any(job.variant == "ring" for job in older)


def test_registers_and_stack_are_read_from_the_tool() -> None:
    said = " Function _k:\n  REG:168 STACK:32 SHARED:26112 LOCAL:0 CONSTANT[0]:624 TEXTURE:0\n"
    assert usage.stated(said) == (168, 32)
    with pytest.raises(ValueError, match="says nothing of registers"):
        usage.stated("no such file")
    sass = (
        "  /*0120*/  @!P0 STL [R1], R4 ;\n  /*0130*/  LDG.E R2, [R4] ;\n  /*0140*/  LDL R4, [R1] ;"
    )
    assert len(usage.SPILL.findall(sass)) == 2


def test_a_spill_is_bad_in_a_default_only_and_an_error_everywhere() -> None:
    by_name = replace(JOB, default=False)
    assert not FINE.bad() and SPILLED.bad(8) and not SPILLED.bad(16)
    assert not replace(SPILLED, job=by_name).bad()
    assert Row(by_name, error="no such instruction").bad()


def test_a_kernel_stands_in_the_report_once() -> None:
    broken = Row(JOB, error="no such instruction")
    assert command.once(iter([FINE, SPILLED, FINE, broken, broken])) == [
        FINE, SPILLED, broken, broken,
    ]  # fmt: skip


@pytest.mark.parametrize(("row", "code"), [(FINE, 0), (SPILLED, 1)])
def test_the_command_fails_where_a_default_spills(
    row: Row, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "rows", lambda wanted, n_jobs: iter([row]))
    page = tmp_path / "compiled.md"
    assert main(["compile", "--variant", "attn_map_flash", "--markdown", str(page)]) == code
    printed = capsys.readouterr()
    assert "_flash_kernel" in printed.out
    assert ("sm_90 attn_map_flash f16 128 runs: _flash_kernel spills" in printed.err) == bool(code)
    assert "| _flash_kernel | attn_map_flash | f16 | 128 | runs |" in page.read_text()


def test_a_name_that_nothing_has_and_the_interpreter_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "--variant", "fastest"]) == 2
    assert "no variant is named fastest" in capsys.readouterr().err
    assert main(["compile", "--arch", "90", "70"]) == 2
    assert "--arch 70" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["compile"]) == 2
    assert "TRITON_INTERPRET=1 compiles nothing" in capsys.readouterr().err


def test_a_launcher_that_is_driven_gives_the_kernel_of_a_real_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wanted = list(jobs.jobs([80], [128], [WindowMode.RUNS], ["add"]))
    (row,) = command.rows(wanted, 1)
    assert row.kernel == "_elements_kernel" and not row.bad()
    assert row.usage is not None and 8 <= row.usage.registers <= 64 and row.usage.warps == 4
