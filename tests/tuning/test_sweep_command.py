"""`python -m tuning sweep` from the outside: what it lets through, and what it goes on with."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuning.__main__ import main
from tuning.sweep.database import Database
from tuning.sweep.rows import Decided, Finals, Session, Trial

ROOT = Path(__file__).parent.parent.parent
PLANTED = Path(__file__).parent / "planted_variants.py"
SMALL = "decode-1x300-h4/2-d64"
QUICK = ("--threads", "1", "--seconds", "0.5", "--sittings", "1")


def command(database: Path, *args: str) -> list[str]:
    return [
        *(sys.executable, "-m", "tuning", "sweep", "--op", "attn_window", "--fmt", "q8_0"),
        *("--case", SMALL, "--database", str(database), *QUICK, *args),
    ]


def sweep(
    database: Path, *args: str, before: Callable[[], Any] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(database, *args),
        cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=before,
    )  # fmt: skip


def trials(database: Path) -> list[Trial]:
    return [row for row in Database(database).rows() if isinstance(row, Trial)]


def test_faults_are_rows_and_nothing_faulty_is_decided_on(tmp_path: Path) -> None:
    faults = {
        "shifted": ("wrong", "in gate-decode-causal"),
        "half": ("wrong", "in gate-decode-causal"),
        "cached": ("wrong", "in gate-decode-causal"),
        "nothing": ("wrong", "in gate-decode-causal"),
        "late": ("wrong", "after a timed round"),
        "memo": ("impossible", "is the least it can take"),
        "killed": ("crashed", "exit code -9"),
        "raising": ("crashed", "AttributeError"),
        "uncompiled": ("compile-failed", "TypingError"),
    }
    named = [part for name in faults for part in ("--variant", name)]
    rows = tmp_path / "sweeps.jsonl"
    done = sweep(rows, "--add", str(PLANTED), *named, "--json")
    assert done.returncode == 0, done.stderr
    found = {t.configuration.variant: (t.status, t.message) for t in trials(rows)}
    assert found.pop("split") == ("ok", "")
    for name, (status, why) in faults.items():
        assert found[name][0] == status, (name, found[name])
        assert why in found[name][1], (name, found[name])
    (decided,) = json.loads(done.stdout)
    assert decided["decision"]["ties"] == ["split"]
    assert decided["decision"]["default_ties"] is True
    hung = ("--variant", "hung", "--timeout", "4", "--resume", "--finals", "0")
    assert sweep(rows, "--add", str(PLANTED), *hung).returncode == 0
    last = trials(rows)[-1]
    assert (last.configuration.variant, last.status) == ("hung", "timeout")
    assert last.message == "gave no answer to prepare in 4 s"


def test_free_values_keep_bits_and_their_defaults_run(tmp_path: Path) -> None:
    rows = tmp_path / "sweeps.jsonl"
    named = ("--variant", "bent", "--variant", "lame", "--finals", "0")
    done = sweep(rows, "--add", str(PLANTED), *named)
    assert done.returncode == 0, done.stderr
    found = {t.configuration.key: (t.status, t.message) for t in trials(rows)}
    assert found["bent step=1"] == ("ok", "")
    status, why = found["bent step=2"]
    assert status == "wrong" and "other bits than with free tunables at their defaults" in why
    status, why = found["lame step=2"]
    assert status == "crashed"
    assert why.endswith("too little shared memory with free tunables at their defaults, which "
                        "other calls get")  # fmt: skip


def test_a_killed_sweep_goes_on_without_repeating_a_trial(tmp_path: Path) -> None:
    rows, most = tmp_path / "sweeps.jsonl", 9
    how = ("--variant", "split", "--finals", "2", "--budget", str(most), "--seed", "3")
    running = subprocess.Popen(
        command(rows, *how), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while len(trials(rows)) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    made = trials(rows)
    assert 4 <= len(made) < most
    with rows.open("ab") as file:
        file.write(b'{"schema": 1, "row": "trial", "sess')  # killed while it wrote
    done = sweep(rows, *how, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"{len(made)} trials of earlier runs are known" in done.stderr
    assert f"{rows}:{len(made) + 2} is skipped" in done.stderr
    after = trials(rows)
    assert after[: len(made)] == made
    assert Counter(t.configuration.key for t in after).most_common(1)[0][1] == 1
    assert len(after) == most
    kinds = Counter(type(row) for row in Database(rows).rows())
    assert kinds[Session] == 2 and kinds[Finals] == kinds[Decided] == 1


def test_a_full_disk_ends_the_sweep_in_one_line_and_good_rows_stay(tmp_path: Path) -> None:
    rows = tmp_path / "sweeps.jsonl"

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    done = sweep(rows, "--variant", "split", "--budget", "50", before=little_room)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"{rows} cannot be written: File too large")
    assert "Traceback" not in done.stderr
    kept = trials(rows)
    assert kept and kept[0].status == "ok"
    assert rows.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--op", "atn"), "op 'atn' is none of attn_window, "),
        (("--op", "attn_window", "--variant", "nope"), "attn_window has no variant 'nope' on cpu"),
        (("--op", "attn_window", "--case", "decode-9"), "'decode-9' names no case of attn_window"),
        (("--op", "attn_window", "--fmt", "q4"), "--fmt 'q4' is none of f32, f16, q8_0"),
        (("--op", "add", "--fmt", "f16"), "add has no formats; leave --fmt out"),
        (("--op", "add", "--search", "magic"), "--search 'magic' is none of grid, random, tpe"),
        (("--op", "add", "--pruner", "magic"), "--pruner 'magic' is none of none, median"),
        (("--op", "add", "--budget", "soon"), "--budget 'soon' is none; give 200 (trials)"),
        (("--op", "add", "--jobs", "0"), "--jobs 0 is below 1"),
        (("--op", "add", "--timeout", "nan"), "--timeout nan is no time"),
        (("--op", "add", "--timeout", "1e300"), "--timeout 1e+300 is no time"),
        (("--op", "add", "--add", "none.py"), "no such Python file"),
        (("--op", "add", "--database", "."), ". cannot be read: it is no regular file"),
        (("--op", "add", "--device", "tpu"), "device 'tpu' is none of cpu, metal, cuda"),
        (
            ("--op", "attn_window", "--variant", "flash", "--case", SMALL),
            "it is for prefill, not decode",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(
    args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *args]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [("def (", "SyntaxError: "), ("raise SystemExit(3)", "SystemExit: 3"), ("1 / 0", "ZeroDiv")],
)
def test_a_file_that_does_not_import_is_refused_in_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken_variants.py"
    file.write_text(text)
    for _ in range(2):
        assert main(["sweep", "--op", "add", "--add", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{file} does not import: {said}" in line


def test_a_tunable_without_values_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file, rows = tmp_path / "empty_space.py", tmp_path / "sweeps.jsonl"
    file.write_text(
        "from minfer import variant\n"
        "from minfer.ops import Tunable\n"
        "@variant(space={'most': Tunable(None, ())})\n"
        "def add_empty(x, y, *, config): ...\n"
    )
    asked = ("--op", "add", "--add", str(file), "--variant", "empty", "--database", str(rows))
    done = subprocess.run(
        [sys.executable, "-m", "tuning", "sweep", *asked],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not rows.exists()
    assert done.stderr.startswith("the tunable add_empty.most has no values")


def test_what_a_file_prints_is_no_answer_and_no_result(tmp_path: Path) -> None:
    file = tmp_path / "talking_variants.py"
    file.write_text(f"{PLANTED.read_text()}\nprint('hello')")
    args = ("--add", str(file), "--variant", "raising", "--finals", "0", "--json")
    done = sweep(tmp_path / "sweeps.jsonl", *args)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [] and "hello" in done.stderr
