"""`python -m tuning promote`: decisions of a sweep become rows, or say why not."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tuned_rows import CPU, Folder, choose, row, user_module

from minfer import registry, tuned
from minfer.ops import DECODE, PREFILL
from minfer.tuned import table
from tuning import __main__ as tuning_main
from tuning.promote import command
from tuning.promote.decisions import source_now
from tuning.sweep.configuration import Configuration, Question
from tuning.sweep.database import Database
from tuning.sweep.decision import Decision, Interval
from tuning.sweep.rows import Decided, Session

KIND = tuned.device_kind(CPU)
QUESTION = Question("attn_window", "cpu", KIND, "q8_0", PREFILL, 64)
ENVIRONMENT = {"made_with": dict(tuned.made_with(CPU)), "commit": "98bdcc5aa0ffee", "minfer": "0.8"}
MADE = Interval(1.051239, 1.08, 1.11)


def variant_of(question: Question, name: str) -> Any:
    known = registry.declared(question.op, "minfer.kernels_numba")
    return next((v for v in known if v.name == name), None)


SLOW = Interval(0.9, 0.95, 0.99)


def decided(
    name: str = "flash",
    free: dict[int, dict[str, Any]] | None = None,
    question: Question = QUESTION,
    source: str | None = None,
    **other: Any,
) -> Decided:
    """A decision for a variant with these values by n_q."""
    variant = variant_of(question, name)
    chosen = {
        n_q: Configuration.of(variant, values) if variant else Configuration(name, ())
        for n_q, values in (free or {1: {"block_m": 8}}).items()
    }
    numeric = next(iter(chosen.values())).numeric_key(variant) if variant else name
    decision = Decision(
        numeric=numeric,
        free={n_q: one.key for n_q, one in chosen.items()},
        ties=other.pop("ties", (numeric,)),
        free_ties={n_q: (one.key,) for n_q, one in chosen.items()},
        speedup=MADE,
        speedups={"prompt": MADE, **other.pop("speedups", {})},
        noise=0.0012345678,
        rerun_differs=0.0123456,
        rate=0.05,
        default_ties=other.pop("default_ties", False),
    )
    text = source_now(variant) if source is None and variant else source or ""
    return Decided(other.pop("session", "s1"), question, text, decision, chosen, {})


@dataclass
class Done:
    code: int
    out: str
    err: str


class Sweep:
    """A database and a folder, and what the command makes of them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.database, self.into, self._capsys = folder / "sweep.jsonl", folder / "into", capsys
        self.into.mkdir()
        self.session()

    @property
    def file(self) -> Path:
        return self.into / f"{KIND}.json"

    def session(self, name: str = "s1", **environment: Any) -> None:
        told = {**ENVIRONMENT, **environment}
        date = "2026-11-30T20:00:00+0000"
        Database(self.database).append(Session(name, date, (QUESTION,), {}, told, {}, ()))

    def decide(self, *args: Any, **how: Any) -> None:
        Database(self.database).append(decided(*args, **how))

    def run(self, *options: object) -> Done:
        argv = ["promote", "--database", self.database, "--into", self.into, *options]
        code = tuning_main.main([str(a) for a in argv])
        captured = self._capsys.readouterr()
        return Done(code, captured.out, captured.err)

    def rows(self) -> list[dict[str, Any]]:
        return list(json.loads(self.file.read_text())["rows"]) if self.file.exists() else []


@pytest.fixture
def sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Sweep:
    return Sweep(tmp_path, capsys)


@pytest.fixture
def mine(tmp_path: Path, added: None) -> None:
    registry.add(user_module(tmp_path))


def test_a_decision_becomes_a_row(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.decide(free={1: {"block_m": 8}, 64: {"block_m": 64}})
    done = sweep.run()
    assert done.code == 0 and not sweep.file.exists()
    assert done.out.startswith(f"--- /dev/null\n+++ b/{sweep.file}\n@@ -0,0 +1,")
    assert done.err == "nothing is written; --write does\n"
    assert sweep.run("--write").out == done.out
    assert sweep.file.read_text() == "".join(line[1:] + "\n" for line in done.out.splitlines()[3:])
    (made,) = sweep.rows()
    assert made["free"] == [
        {"n_q": 1, "config": {"block_m": 8}},
        {"n_q": 64, "config": {"block_m": 64}},
    ]
    assert made["evidence"] == {
        "speedup": [1.0512, 1.08, 1.11],
        "noise": 0.00123,
        "rerun_differs": 0.012,
        "rate": 0.05,
        "ties": ["flash"],
        "cases": {"prompt": [1.0512, 1.08, 1.11]},
        "date": "2026-11-30T20:00:00+0000",
        "commit": "98bdcc5aa0ffee",
        "minfer": "0.8",
    }
    again = sweep.run("--write")
    assert (again.code, again.out, again.err) == (0, "", "nothing to promote\n")
    Folder(tmp_path, monkeypatch).write(text=sweep.file.read_text())
    assert choose(shape={"n_q": 70}).block_m == 64
    assert choose(shape={"n_q": 7}).receipt.tuned[0].startswith("attn_window 1.08 times")


def test_numeric_values_stand_apart(sweep: Sweep, mine: None) -> None:
    free = {1: {"block_n": 16, "stages": 3}, 9: {"block_n": 16}}
    sweep.decide("mine", free)
    assert sweep.run("--write").code == 0
    (made,) = sweep.rows()
    assert (made["module"], made["numeric"]) == ("my_tuned", {"block_n": 16})
    assert made["free"][1] == {"n_q": 9, "config": {"stages": 2}}
    sweep.decide("mine", {1: {"block_n": 16}, 9: {"block_n": 32}})
    assert "its numeric values differ by n_q" in sweep.run().err


def test_the_last_decision_of_a_question_counts(sweep: Sweep) -> None:
    sweep.decide(free={1: {"block_m": 8}})
    sweep.decide(free={1: {"block_m": 64}})
    sweep.run("--write")
    assert [one["free"][0]["config"] for one in sweep.rows()] == [{"block_m": 64}]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"default_ties": True}, "the default is as fast as any: 1.080 (1.051 to 1.110)"),
        ({"speedups": {"long": SLOW}}, "the default is faster in long: 0.950 (0.900 to 0.990)"),
        ({"source": "0123456789abcdef"}, "the code of its kernels was another; sweep again"),
        ({"question": replace(QUESTION, device_kind="triton-interpreter")}, "times mean nothing"),
        ({"question": replace(QUESTION, device_kind="../x")}, "'../x' is no kind of device"),
        ({"question": replace(QUESTION, device="gpu")}, "device 'gpu' is none of cpu"),
        ({"question": replace(QUESTION, head_dim=0)}, "it makes no row: its head_dim"),
        ({"question": replace(QUESTION, fmt="q4")}, "cache type 'q4'"),
        ({"name": "fast"}, "there is no variant attn_window_fast here"),
        ({"session": "s2"}, "its session s2 is not in the database"),
        ({"session": "s3"}, "its session s3 does not say what it was made with"),
    ],
)
def test_what_is_not_promoted_says_why(sweep: Sweep, how: dict[str, Any], why: str) -> None:
    sweep.session("s3", made_with=None)
    sweep.decide(**how)
    done = sweep.run("--write")
    assert (done.code, done.out) == (0, "")
    first, *more = done.err.splitlines()
    assert first.startswith("not promoted: attn_window ") and why in first
    assert more == ["nothing to promote"]
    assert list(sweep.into.iterdir()) == []


def test_a_family_that_disagrees_is_not_promoted(sweep: Sweep) -> None:
    other = replace(QUESTION, op="attn_map")
    sweep.decide("rows", {1: {}})
    sweep.decide(free={1: {"block_m": 8}}, question=other)
    done = sweep.run("--write")
    assert done.err.count("and their bits must be equal (contract 6.1)") == 2
    assert "attn_window chose rows and attn_map flash" in done.err and not sweep.rows()
    sweep.decide("flash", question=other, default_ties=True)
    assert "attn_window chose rows and attn_map flash" in sweep.run("--op", "attn_window").err
    sweep.decide("flash", question=other, default_ties=True, ties=("flash", "rows"))
    sweep.run("--write")
    assert [(one["op"], one["variant"]) for one in sweep.rows()] == [("attn_window", "rows")]
    sweep.decide("rows", {1: {}}, question=other)
    sweep.run("--write")
    assert [one["op"] for one in sweep.rows()] == ["attn_window", "attn_map"]


def test_what_loses_in_a_case_of_the_other_op_is_not_promoted(sweep: Sweep) -> None:
    other = replace(QUESTION, op="attn_map")
    sweep.decide("rows", {1: {}})
    sweep.decide("rows", {1: {}}, question=other, speedups={"long": SLOW})
    said = sweep.run("--write").err
    assert "attn_map would take it too, and there the default is faster in long" in said
    sweep.decide("flash", question=other, speedups={"long": SLOW})
    assert "attn_window chose rows and attn_map flash" in sweep.run("--write").err
    assert not sweep.rows()


def test_a_row_that_stays_must_agree_too(sweep: Sweep) -> None:
    sweep.file.write_text(table.dumped(KIND, [read(row("rows", op="attn_map"))]))
    sweep.decide()
    done = sweep.run("--write")
    assert f"the row of attn_map in {KIND}.json names rows, this one flash" in done.err
    assert len(sweep.rows()) == 1
    sweep.decide(question=replace(QUESTION, fmt="f16"))  # is promoted alone
    sweep.run("--write")
    assert [one["op"] for one in sweep.rows()] == ["attn_window", "attn_map"]
    assert sweep.rows()[0]["format"] == "f16"
    sweep.file.write_text(table.dumped(KIND, [read(row("rows", op="attn_map", source="0"))]))
    sweep.run("--write")
    assert len(sweep.rows()) == 3


def read(given: dict[str, Any]) -> tuned.Row:
    return tuned.Row.read(given)


def test_which_rows_a_new_one_replaces(sweep: Sweep) -> None:
    other = {"made_with": {"numba": "0.1"}}
    kept = [row("rows", **other), row("rows", head_dim=128), row("scratch", module="x", **other)]
    gone = [row("rows"), row("rows", source="0", **other), row("fast", **other)]
    sweep.file.write_text(table.dumped(KIND, map(read, [*kept, *gone])))
    sweep.decide()
    sweep.run("--write")
    left = sweep.rows()
    new = [one for one in left if one["variant"] == "flash"]
    assert len(new) == 1
    assert all(read(one).as_dict() in left for one in kept) and len(left) == 4


def test_only_what_is_asked_for(sweep: Sweep) -> None:
    for fmt in ("q8_0", "f16"):
        sweep.decide(question=replace(QUESTION, fmt=fmt))
    made = json.loads(sweep.run("--fmt", "f16", "--json").out)
    assert [one["format"] for one in made["promoted"]] == ["f16"]
    assert list(made["files"]) == [str(sweep.file)] and made["written"] is False
    assert made["files"][str(sweep.file)].startswith("--- /dev/null\n")
    for options in (("--op", "attn_map"), ("--device", "metal")):
        done = sweep.run(*options)
        assert (done.code, done.out, done.err) == (0, "", "there is no such decision\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--op", "attn"), "op 'attn' is none of attn_window"),
        (("--device", "gpu"), "device 'gpu' is none of cpu"),
        (("--fmt", "q4"), "'q4'"),
        (("--database", "nowhere.jsonl"), "nowhere.jsonl is not there"),
        (("--database", "."), ". cannot be read: it is no regular file"),
        (("--into", "nowhere"), "nowhere is no folder; make it first"),
        (("--add", "no_such.py"), "no_such.py: no such Python file"),
    ],
)
def test_options_that_cannot_be_meant(
    sweep: Sweep, options: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sweep.into)
    sweep.decide()
    for more in ((), ("--write",)):
        done = sweep.run(*options, *more)
        assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert not sweep.file.exists()


def test_a_file_of_ones_own(
    sweep: Sweep, added: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add(user_module(tmp_path))
    sweep.decide("mine", {1: {"block_n": 16}})
    registry._added.clear()
    assert "--add FILE makes a user's known" in sweep.run().err
    monkeypatch.delitem(sys.modules, "my_tuned", raising=False)
    assert sweep.run("--add", tmp_path / "my_tuned.py", "--write").code == 0
    del sys.modules["my_tuned"]
    assert sweep.rows()[0]["module"] == "my_tuned"


def test_a_damaged_file_is_left_alone(sweep: Sweep) -> None:
    sweep.decide()
    sweep.file.write_text("{")
    done = sweep.run("--write")
    assert done.code == 2
    assert f"{sweep.file} cannot be read: it is no JSON; mend it or remove it" in done.err
    assert sweep.file.read_text() == "{"


def test_differences_are_those_that_git_applies(sweep: Sweep) -> None:
    """Of a file that was edited by hand: no end of the last line, other ends of lines."""
    text = table.dumped(KIND, [read(row("rows", kind=DECODE))])
    sweep.decide()
    for edited in (text[:-1], text.replace("\n", "\r\n")):
        sweep.file.write_bytes(edited.encode())
        out = sweep.run().out
        (sweep.into / "x.patch").write_bytes(
            out.replace(f"a/{sweep.file}", f"a/{sweep.file.name}")
            .replace(f"b/{sweep.file}", f"b/{sweep.file.name}").encode()
        )  # fmt: skip
        subprocess.run(["git", "apply", "x.patch"], cwd=sweep.into, check=True)
        applied = sweep.file.read_bytes()
        sweep.file.write_bytes(edited.encode())
        assert sweep.run("--write").code == 0 and sweep.file.read_bytes() == applied


def test_a_file_that_changes_meanwhile_is_left_alone(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = table.dumped(KIND, [read(row("rows", kind=DECODE))])
    made = command.promoted

    def meanwhile(args: Any) -> Any:
        done = made(args)
        sweep.file.write_text(text)
        return done

    monkeypatch.setattr(command, "promoted", meanwhile)
    sweep.decide()
    done = sweep.run("--write")
    assert done.code == 2 and f"{sweep.file} was changed meanwhile" in done.err
    assert sweep.file.read_text() == text


def full(fd: int, data: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(fd: int, data: object) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize(("fails", "said"), [(full, "No space left"), (read_only, "Read-only")])
def test_a_disk_that_fails_leaves_the_old_file(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., int], said: str
) -> None:
    sweep.file.write_text(before := table.dumped(KIND, [read(row("rows"))]))
    sweep.decide()
    monkeypatch.setattr(os, "write", fails)
    done = sweep.run("--write")
    monkeypatch.undo()
    assert done.code == 2 and f"{sweep.file} cannot be written: {said}" in done.err
    assert done.err.count("\n") == 1 and sweep.file.read_text() == before
    assert list(sweep.into.iterdir()) == [sweep.file]


def test_what_a_database_holds_is_printed_plainly(sweep: Sweep) -> None:
    sweep.decide(question=replace(QUESTION, device_kind="a\x1b[2J\nb"))
    assert "\x1b" not in sweep.run().err
