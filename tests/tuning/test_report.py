"""`python -m tuning report`: what a database tells, as text, as JSON and in a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweep_rows import DECIDED, QUESTION, SESSION, trial

from tuning.__main__ import main
from tuning.report.account import Account
from tuning.report.findings import Value
from tuning.report.history import History, histories
from tuning.report.panels import panels, short
from tuning.report.picture import figure_of
from tuning.sweep.configuration import Configuration
from tuning.sweep.database import Database
from tuning.sweep.decision import Contender, Interval
from tuning.sweep.rows import CaseTimes, Finals, Row, Trial

CASES = {"one": 1, "two": 16}
SECONDS = {"one": 1e-4, "two": 2e-3}
CONTROL = "the default once more"
SOURCES = {"split": "f00d", "rows": "f00d"}


def split(heads: int, span: int) -> Configuration:
    return Configuration("split", (("heads", heads), ("span", span)))


def rows(heads: int) -> Configuration:
    return Configuration("rows", (("heads", heads),))


DEFAULT, FAST, HALF = split(4, 16), split(2, 16), split(4, 32)


def timed(configuration: Configuration, score: float, cases: int = 2, **changes: Any) -> Trial:
    """An ok trial of that score in each case; a pruned one of fewer cases."""
    times = [
        CaseTimes(name, n_q, (s * score,), 3, s * score, s * score, s * score, floor)
        for (name, n_q), s, floor in zip(CASES.items(), SECONDS.values(), (5e-5, None), strict=True)
    ]
    status = "ok" if cases == len(CASES) else "pruned"
    fields = {"status": status, "cases": tuple(times[:cases]), "score": score, **changes}
    return trial(configuration, **fields)


def failed(configuration: Configuration, status: str, message: str) -> Trial:
    return trial(configuration, status=status, message=message, cases=(), score=None)


TRIALS = [
    timed(DEFAULT, 1.0),
    failed(split(1, 8), "spills", "72 registers are spilled"),
    timed(rows(1), 40.0, cases=1),
    timed(FAST, 0.8),
    timed(HALF, 0.9),
    timed(split(2, 32), 1.25),
    failed(split(3, 8), "crashed", "boom\x1b[31m"),
    failed(split(2, 8), "spills", "4 registers are spilled"),
    timed(rows(2), 2.0, cases=1),
    timed(split(1, 16), 1.6),
]


def contender(
    key: str, factor: float, wobble: float = 0.0, numeric: str = "split", two: float = 1.0
) -> Contender:
    """Ten rounds: drift that all have in common, times factor, times e to the +-wobble.

    two: another factor of that case.
    """
    drift = [(1 + 0.001 * i) * math.exp(wobble * (-1) ** i) for i in range(10)]
    factors = {"one": factor, "two": factor * two}
    rounds = {name: tuple(SECONDS[name] * f * d for d in drift) for name, f in factors.items()}
    return Contender(key, numeric, (0.0,), rounds)


FINALS = Finals(
    session="ab12",
    question=QUESTION,
    sources={"split": "f00d", "rows": "f00d"},
    contenders=(
        contender(HALF.key, 0.9, 0.01),
        contender(rows(3).key, 0.82, numeric="rows"),
        contender(rows(4).key, 0.81, numeric="rows", two=1.0201),
        contender(FAST.key, 0.8),
        contender(DEFAULT.key, 1.0),
        contender(CONTROL, 1.001),
    ),
    default=DEFAULT.key,
    control=CONTROL,
    configurations={
        **{c.key: c for c in (HALF, FAST, DEFAULT, rows(3), rows(4))},
        CONTROL: DEFAULT,
    },
    cases=CASES,
)
DECISION = replace(
    DECIDED.decision,
    numeric="split",
    free={1: FAST.key, 16: HALF.key},
    ties=("split", "rows"),
    free_ties={1: (FAST.key, HALF.key), 16: (HALF.key,)},
    speedups={"one": Interval(1.2, 1.25, 1.3), "two": Interval(1.0, 1.1, 1.2)},
)
DECISION_ROW = replace(DECIDED, decision=DECISION, chosen={1: FAST, 16: HALF})
ALL = (SESSION, *TRIALS, FINALS, DECISION_ROW)

Report = Callable[..., str]


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """Writes rows, runs the command, and returns stdout; asserts the exit code."""
    database = tmp_path / "sweep.jsonl"

    def run(*args: str, of: Sequence[Row] = ALL, code: int = 0) -> str:
        for row in of:
            Database(database).append(row)
        found = main(["report", "--database", str(database), *args])
        out, err = capsys.readouterr()
        assert found == code, err
        if code:
            assert out == "" and err.count("\n") == 1
        return err if code else out

    return run


def squeezed(text: str) -> list[str]:
    """Lines without what aligns their columns."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def history(*of: Row) -> History:
    (found,) = histories(of)
    return found


def test_text_says_everything_of_a_question(report: Report) -> None:
    said = squeezed(report("--top", "2"))
    assert said[:3] == [
        QUESTION.key,
        "10 trials: 5 ok, 2 pruned, 2 spills, 1 crashed; 2031-05-06T07:08:09+00:00",
        "default: split heads=4 span=16",
    ]
    for line in (
        "split heads=2 span=16 0.800 80 µs 62% 1.6 ms",
        "split heads=4 span=32 0.900 90 µs 56% 1.8 ms",
        "split heads=4 span=16 (the default) 1 1 1",
        "rows heads=4 0.818 (0.818-0.818) tied 0.810 (0.810-0.810) 0.826 (0.826-0.826)",
        "split heads=2 span=16 0.800 (0.800-0.800) chosen 0.800 (0.800-0.800) 0.800 (0.800-0.800)",
        "split heads=4 span=32 0.900 (0.891-0.909) tied 0.900 (0.887-0.913) "
        "chosen 0.900 (0.887-0.913)",
        "the default once more 1.001 (1.001-1.001) 1.001 (1.001-1.001) 1.001 (1.001-1.001)",
        f"{QUESTION.key}: split, 1.020 times the default's speed (1.010 to 1.030)",
        "2 spills 72 registers are spilled split heads=1 span=8",
        "1 crashed boom\\x1b[31m split heads=3 span=8",
        "split heads 2.00 1: 1.600 (1/2), 2: 0.800 (2/3), 3: none (0/1), 4: 0.900 (2/2)",
        "span 1.12 8: none (0/3), 16: 0.800 (3/3), 32: 0.900 (2/2)",
    ):
        assert line in said
    assert "split heads=2 span=32" not in "".join(said)  # the third best


def test_json_says_the_same(report: Report) -> None:
    (told,) = json.loads(report("--json"))
    assert told["key"] == QUESTION.key and told["question"]["head_dim"] == 128
    assert told["trials"] == {"ok": 5, "pruned": 2, "spills": 2, "crashed": 1}
    assert [one["score"] for one in told["best"]] == [0.8, 0.9, 1.0, 1.25, 1.6]
    assert told["best"][0]["configuration"] == {
        "variant": "split",
        "values": {"heads": 2, "span": 16},
    }
    assert told["best"][0]["cases"][0]["of_floor"] == pytest.approx(0.625)
    assert told["best"][0]["cases"][1]["of_floor"] is None
    assert told["finals"]["rounds"] == {"one": 10, "two": 10}
    half = next(s for s in told["finals"]["standings"] if s["key"] == HALF.key)
    # ten rounds at e to the +-0.01: Yuen's error is 0.01 / sqrt(3), of 5 degrees of freedom
    assert half["cases"]["one"]["low"] == pytest.approx(0.9 * math.exp(-0.025706 / 3**0.5), 1e-4)
    assert half["marks"] == {"one": "tied", "two": "chosen"}
    assert told["decided"]["decision"]["ties"] == ["split", "rows"]
    assert told["failures"][0]["trials"] == 2 and told["failures"][1]["status"] == "crashed"
    assert told["tunables"][0]["effect"] == 2.0


def test_a_tied_class_is_marked_by_its_fastest_alone() -> None:
    found = Account.of(history(*ALL), 1).finals
    assert found is not None
    assert [(s.key, *s.marks.values()) for s in found.standings] == [
        (DEFAULT.key, "behind", "behind"),
        (FAST.key, "chosen", "behind"),
        (rows(4).key, "tied", "behind"),
        (rows(3).key, "behind", "tied"),
        (HALF.key, "tied", "chosen"),
        (CONTROL, "control", "control"),
    ]


def test_finals_that_cannot_be_compared_are_left_out(report: Report) -> None:
    short_one = replace(FINALS.contenders[0], rounds={"one": (0.1,), "two": (0.1, 0.2)})
    broken = replace(FINALS, contenders=(short_one, *FINALS.contenders[1:]))
    assert json.loads(report("--json", of=(SESSION, broken)))[0]["finals"] is None


def test_values_of_a_tunable_keep_their_kinds() -> None:
    def made(value: Any, score: float, name: str) -> Trial:
        return timed(Configuration("split", (("x", value), ("same", 0), ("at", name))), score)

    trials = [made(v, 1 + i / 4, str(i)) for i, v in enumerate((1, True, None, "a", 0.5))]
    knob = next(k for k in Account.of(history(*trials), 1).tunables if k.name == "x")
    assert knob.values == (
        *(Value(0.5, 2.0, 1, 1), Value(1, 1.0, 1, 1), Value(True, 1.25, 1, 1)),
        *(Value(None, 1.5, 1, 1), Value("a", 1.75, 1, 1)),
    )
    assert type(knob.values[2].value) is bool and knob.effect == 2.0
    assert Account.of(history(*trials[:4]), 1).tunables == ()  # too few


def test_trials_under_other_conditions_are_left_out() -> None:
    later = replace(SESSION, id="late", options={**SESSION.options, "threads": 2})
    old_source = timed(split(9, 9), 0.1, source="beef")
    other_cases = timed(FAST, 0.1, cases=2, session="late")
    other_cases = replace(other_cases, cases=other_cases.cases[::-1])
    scores = {HALF: 0.7, DEFAULT: 1.0, split(1, 16): 1.5}
    new = [timed(one, score, session="late") for one, score in scores.items()]
    again = timed(HALF, 0.6, session="late")
    found = history(SESSION, old_source, *ALL[1:], later, other_cases, *new, again)
    assert [t.score for t in found.trials] == [1.0, 1.5, 0.6]
    assert found.left_out == 1 + len(TRIALS) + 2
    same = history(SESSION, old_source, *ALL[1:])
    assert len(same.trials) == len(TRIALS) and same.left_out == 1 and not same.stale


@pytest.mark.parametrize(
    "change", [{"session": "late"}, {"cases": {"one": 1}}, {"sources": {"split": "beef"}}]
)
def test_finals_of_other_conditions_are_said_to_be(report: Report, change: dict[str, Any]) -> None:
    later = replace(SESSION, id="late", options={"threads": 9})
    finals = replace(FINALS, default=FAST.key, **change)
    found = history(SESSION, *TRIALS, later, finals)
    assert found.stale and found.default == DEFAULT
    again = timed(FAST, 0.7)
    said = " ".join(squeezed(report(of=(SESSION, *TRIALS, again, later, finals))))
    assert "; under other conditions than the trials" in said
    assert "1 trials are left out: made again, or under other conditions" in said


def test_a_decision_belongs_to_the_last_finals() -> None:
    other = replace(DECISION_ROW, session="late")
    assert history(*ALL, other).decided == DECISION_ROW
    assert history(SESSION, *TRIALS, DECISION_ROW, replace(FINALS, session="late")).decided is None


def test_configurations_are_shortened_to_what_differs() -> None:
    assert short(DEFAULT, DEFAULT) == "default"
    assert short(FAST, DEFAULT) == "heads=2"
    assert short(rows(4), DEFAULT) == "rows"
    assert short(Configuration("rows", (("heads", 2), ("x", None))), DEFAULT) == (
        "rows heads=2 x=None"
    )


def test_what_a_picture_shows() -> None:
    shown = panels(history(*ALL))
    assert shown.title == QUESTION.key
    assert shown.verdict == (
        "chosen: heads=2 (n_q 1); span=32 (n_q 16)\n"
        "1.020 times the default's speed (1.010 to 1.030)"
    )
    course = shown.course
    assert [(p.number, p.score) for p in course.points] == [
        *((1, 1.0), (4, 0.8), (5, 0.9), (6, 1.25), (9, 2.0), (10, 1.6)),
    ]
    assert [p.pruned for p in course.points] == [False, False, False, False, True, False]
    assert [(p.number, p.variant) for p in course.slow] == [(3, "rows")]
    assert course.failed == {"spills": (2, 8), "crashed": (7,)}
    assert course.best == ((1, 1.0), (4, 0.8)) and course.trials == 10
    assert [rung.label for rung in shown.rungs] == [
        *("default", "heads=2", "rows", "rows heads=3", "span=32", "default once more"),
    ]
    pruned = timed(FAST, 0.5, cases=1)  # the best so far were timed on all cases
    assert panels(history(SESSION, TRIALS[0], pruned)).course.best == ((1, 1.0),)


def test_a_picture_holds_all_of_it() -> None:
    figure = figure_of([panels(history(*ALL)), panels(history(SESSION, *TRIALS))])
    figure.draw_without_rendering()
    left, right, _, empty = figure.axes
    sizes = [len(one.get_offsets()) for one in left.collections if len(one.get_offsets())]
    assert sorted(sizes) == [1, 1, 1, 2, 5]  # rows, slow, crashed, spills, split
    first = {tuple(one.get_offsets()[0]): one for one in left.collections if len(one.get_offsets())}
    faces = {where: one.get_facecolors()[0][3] for where, one in first.items()}
    assert faces[1, 1.0] == 1 and faces[9, 2.0] == 0  # hollow: pruned
    texts = [text.get_text() for text in left.texts]
    assert texts == ["2 spills", "1 crashed", "1 above 4x"]
    names = [text.get_text() for text in left.get_legend().get_texts()]
    assert names == ["split", "rows", "pruned", "best so far", "default"]
    assert [text.get_text() for text in right.get_yticklabels()][1] == "heads=2"
    assert len(right.containers) == 6 * 2  # error bars
    names = [text.get_text() for text in right.get_legend().get_texts()]
    assert names == ["one", "two", "chosen", "in the tie set", "outside it"]
    assert empty.texts[0].get_text() == "no finals"


@pytest.mark.parametrize(("name", "starts"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_picture_is_written(report: Report, tmp_path: Path, name: str, starts: bytes) -> None:
    report("--plot", str(tmp_path / name), of=(SESSION, *TRIALS))
    assert (tmp_path / name).read_bytes().startswith(starts)


def test_questions_are_chosen(report: Report) -> None:
    other = replace(QUESTION, device="cuda", fmt="f16", kind="prefill")
    both = (SESSION, TRIALS[0], timed(FAST, 1.0, question=other))
    wanted = {"--device": "cuda", "--fmt": "f16", "--question": "*prefill d128"}
    for i, (option, value) in enumerate(wanted.items()):
        told = json.loads(report("--json", option, value, of=() if i else both))
        assert [one["key"] for one in told] == [other.key]
    assert len(json.loads(report("--json", "--op", "attn_window", of=()))) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--question", "nope*"), ("--question 'nope*'", QUESTION.key)),
        (("--op", "rms_norm"), ("--op 'rms_norm'", QUESTION.key)),
        (("--op", "nope"), ("'nope'", "attn_window")),
        (("--device", "tpu"), ("tpu",)),
        (("--fmt", "q3"), ("q3",)),
        (("--top", "0"), ("--top 0 is below 1",)),
        (("--plot", "a.jpeg"), ("a.jpeg", ".png or .svg")),
        (("--plot", "nowhere/a.png"), ("nowhere",)),
        (("--plot", "/proc/a.png"), ("/proc",)),
    ],
)
def test_one_clear_line(report: Report, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    said = report(*args, of=(SESSION, *TRIALS), code=2)
    assert all(word in said for word in words), said


def test_a_database_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--database", str(tmp_path / "no.jsonl")]) == 2
    assert "no.jsonl is not there; `python -m tuning sweep` writes it" in capsys.readouterr().err


def test_a_database_without_trials_says_so(report: Report, tmp_path: Path) -> None:
    assert report(of=(SESSION,)) == f"{tmp_path / 'sweep.jsonl'} holds no trials\n"
    assert json.loads(report("--json", of=())) == []
    assert "nothing to draw" in report("--plot", str(tmp_path / "a.png"), of=(), code=2)


def test_a_damaged_line_is_named_and_skipped(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(of=(SESSION, *TRIALS))
    path = tmp_path / "sweep.jsonl"
    path.write_text(path.read_text().replace('"score": 0.8', '"score": 0.1'))
    assert main(["report", "--database", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"{path}:5 is skipped: damaged" in err
    assert json.loads(out)[0]["best"][0]["score"] == 0.9
