"""The benchmark's decisions: who is timed, in which order, and what the times may be called.

Children are fakes with scripted times; nothing is timed here. test_bench_children.py has processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_columns import CASE, OPTIONS, RATES, by_name, child_of, fakes, racer

from tuning.__main__ import main
from tuning.bench import checks, command, options, results, rounds, statistics, table
from tuning.bench.cases import Attention, Case, Model, Product, Work, copies
from tuning.bench.command import measured
from tuning.bench.contestants import Column, opened
from tuning.bench.protocol import Absent, CallFailed, ChildFailed
from tuning.bench.rounds import Options
from tuning.bench.store_cases import Session, Store, Tables
from tuning.bench.suites import from_message
from tuning.columns.subjects import Measure

# -- statistics -----------------------------------------------------------------------------------


def test_a_summary_is_the_median_between_quartiles() -> None:
    assert statistics.summarize([4.0, 1.0, 3.0, 2.0, 100.0]) == (3.0, 2.0, 4.0, 5)
    assert statistics.summarize([2.0]) == (2.0, 2.0, 2.0, 1)


def test_a_slow_round_drops_out_of_a_ratio() -> None:
    ours, peer = [1.0, 1.0, 50.0, 1.0], [2.0, 2.0, 100.0, 2.0]
    assert statistics.ratios(peer, ours) == (2.0, 2.0, 2.0, 4)


def test_ties_are_what_two_runs_of_the_same_thing_show_too() -> None:
    noise = statistics.noise([1.0, 1.1, 1.0, 0.96], [1.0, 1.0, 1.0, 1.0])
    assert noise == pytest.approx(0.025)
    assert statistics.noise([1.2], [1.0]) == pytest.approx(0.2)
    assert [statistics.tied(r, 0.25) for r in (0.79, 0.81, 1.0, 1.24, 1.26)] == [
        False, True, True, True, False,
    ]  # fmt: skip


def test_the_floor_is_the_slowest_of_what_must_be_done() -> None:
    assert statistics.floor(None, RATES) is None
    assert statistics.floor(Work(bytes=3e9, fma=1e9, int8=4e9), RATES) == 3.0
    assert statistics.floor(Work(bytes=1e9, fma=1e9, int8=4e9), RATES) == 2.0
    assert statistics.floor(Work(moved=5e8), RATES) is None
    assert not statistics.impossible(0.95, 1.0) and statistics.impossible(0.85, 1.0)
    assert not statistics.impossible(1e-9, None)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_contestant_stands_in_every_place_equally_often(n: int) -> None:
    orders = [statistics.rotated(n, turn) for turn in range(2 * n)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    for place in range(n):
        assert sorted(order[place] for order in orders) == sorted([*range(n)] * 2)
    assert orders[0] == orders[1][::-1]


def test_samples_are_long_enough_and_rounds_end_in_time() -> None:
    assert [rounds.calls_of(s, 0.02) for s in (0.5, 0.02, 0.003, 0.0)] == [1, 1, 7, 1000]
    assert rounds.rounds_of(15, cost=0.1, limit=25) == 15
    assert rounds.rounds_of(15, cost=5.0, limit=25) == 5
    assert rounds.rounds_of(15, cost=90.0, limit=25) == 2
    assert rounds.rounds_of(15, cost=101.0, limit=25) == 1
    assert rounds.rounds_of(1, cost=90.0, limit=25) == 1


# -- rounds ---------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_short_calls_repeat() -> None:
    found, log = fakes("ours", "control", "ggml", seconds=0.005)
    racers = rounds.measure(CASE, found, OPTIONS)
    assert [r.status for r in racers] == ["timed"] * 9
    assert all(len(r.samples["call"]) == 4 for r in racers)
    times = [(name, key, calls) for name, do, key, calls in log if do == "time"]
    assert len(times) == 9 + 4 * 9
    assert {calls for *_, calls in times[:9]} == {1} and {calls for *_, calls in times[9:]} == {4}
    turns = [times[9 + 9 * i : 18 + 9 * i] for i in range(4)]
    assert all(len({(name, key) for name, key, _ in turn}) == 9 for turn in turns)
    assert turns[0] == turns[1][::-1] and turns[0] != turns[2]
    assert log[-3:] == [(name, "drop", None, None) for name in ("ours", "control", "ggml")]


def test_long_calls_count_from_the_first_one_on() -> None:
    found, log = fakes("ours", "ggml", seconds=0.5)
    child_of(found[1]).first = {"call": 1.0}  # taken while its answer was made
    racers = by_name(rounds.measure(CASE, found, OPTIONS))
    assert racers["ours"].samples["call"] == [0.5] * 4
    assert racers["ggml"].samples["call"] == [1.0, 0.5, 0.5, 0.5]
    assert sum(name == "ggml" and do == "time" for name, do, *_ in log) == 3 * 3


def test_a_wrong_answer_is_shown_and_never_timed() -> None:
    found, log = fakes("ours", "control", "ggml")
    child_of(found[2]).wrong = True
    racers = rounds.measure(CASE, found, OPTIONS)
    wrong = by_name(racers)["ggml"]
    assert wrong.status == "failed" and "wrong answer: error 2.0" in wrong.why
    assert not [entry for entry in log if entry[:2] == ("ggml", "time")]
    row = results.rows(CASE, racers, RATES)[0]
    assert row["columns"]["ggml"]["status"] == "failed"
    assert "seconds" not in row["columns"]["ggml"] and "ratio" not in row["columns"]["ggml"]


def test_a_format_that_we_do_not_have_is_no_row() -> None:
    found, log = fakes("ours", "control", "ggml")
    child_of(found[0]).trouble = {("prepare", "q8_0"): Absent("reads f32, f16")}
    child_of(found[2]).trouble = {("prepare", "f16"): Absent("no f16")}
    racers = rounds.measure(CASE, found, OPTIONS)
    assert {r.fmt for r in racers} == {"f32", "f16"}
    assert by_name(racers, "f16")["ggml"].status == "absent"
    assert ("ggml", "prepare", "q8_0", None) not in log
    assert [row["format"] for row in results.rows(CASE, racers, RATES)] == ["f32", "f16"]


def test_a_child_that_dies_between_rounds_costs_its_column_only() -> None:
    found, log = fakes("ours", "control", "ggml")
    dying = child_of(found[2])

    def seconds(turn: int) -> float:
        if turn == 5:
            raise ChildFailed("ended with exit code -11")
        return 0.1

    dying.seconds = seconds
    racers = rounds.measure(CASE, found, OPTIONS)
    assert [r.status for r in racers if r.column.name != "ggml"] == ["timed"] * 6
    assert all(len(r.samples["call"]) == 4 for r in racers if r.column.name != "ggml")
    lost = [r for r in racers if r.column.name == "ggml"]  # what it had prepared went with it
    assert [r.status for r in lost] == ["failed"] * 3 and {"-11" in r.why for r in lost} == {True}
    assert log.count(("ggml", "close", None, None)) == 1 and found[2].child is None
    cell = results.rows(CASE, racers, RATES)[0]["columns"]["ggml"]
    assert cell["status"] == "failed" and "seconds" not in cell
    dying.seconds = lambda turn: 0.1
    assert by_name(rounds.measure(CASE, found, OPTIONS))["ggml"].status == "timed"


def test_a_call_that_fails_costs_its_contestant_only() -> None:
    found, log = fakes("ours", "control", "ggml")
    child_of(found[2]).trouble = {("time", "f16"): CallFailed("ValueError: no")}
    racers = rounds.measure(CASE, found, OPTIONS)
    assert [(r.column.name, r.fmt) for r in racers if r.status == "failed"] == [("ggml", "f16")]
    assert ("ggml", "close", None, None) not in log


def test_inputs_of_cold_cases_outgrow_the_cache() -> None:
    assert CASE.cold and copies(CASE, 100, 1000) == 10 and copies(CASE, 2000, 1000) == 1
    assert not Attention(2, 5, 2, 1, 32).cold
    assert copies(Attention(2, 5, 2, 1, 32), 100, 1000) == 1
    turns: list[int] = []
    measure = Measure([lambda i=i: turns.append(i) for i in range(3)], lambda: turns.append(-1))  # type: ignore[misc]
    measure.sample(4)
    assert turns[0] == -1 and len(turns) == 6 and sorted(turns[1:4]) == [0, 1, 2]
    single = Measure([lambda: turns.append(9)], most=1)
    turns.clear()
    single.sample(5)
    assert turns == [9]


# -- results --------------------------------------------------------------------------------------


def test_a_time_below_the_floor_is_called_impossible() -> None:
    floor = statistics.floor(CASE.work("f32", "call"), RATES)
    assert floor == pytest.approx(2 * 5 * 128 / 1e9)
    ours = racer("ours", [floor / 2] * 3)
    peers = [racer("control", [floor / 2] * 3), racer("ggml", [floor * 2] * 3)]
    row = results.rows(CASE, [ours, *peers], RATES)[0]
    assert row["columns"]["ours"]["status"] == "impossible"
    assert table.time_of(row["columns"]["ours"], row) == "impossible"
    read = CASE.work("f32", "call").bytes / RATES["read"]
    cells = results.rows(CASE, [ours, racer("torch", [read / 2] * 3)], RATES)[0]["columns"]
    assert cells["torch"]["status"] == "impossible"
    warm = Attention(9, 9, 2, 1, 32)  # a peer may have faster products than ours
    cells = results.rows(warm, [ours, racer("torch", [1e-9] * 3)], RATES)[0]["columns"]
    assert cells["torch"]["status"] == "timed"


def test_a_ratio_within_the_noise_of_the_control_is_a_tie() -> None:
    ours, control = racer("ours", [1.0] * 4), racer("control", [1.1] * 4)
    near, far = racer("torch", [1.05] * 4), racer("ggml", [3.0] * 4)
    row = results.rows(CASE, [ours, control, near, far], RATES)[0]
    cells = row["columns"]
    assert row["noise"] == pytest.approx(0.1)
    assert cells["torch"]["tie"] and not cells["ggml"]["tie"]
    assert table.ratio_of(cells["torch"]) == "1.05x (1.05-1.05) tie"
    assert table.ratio_of(cells["ggml"]) == "3x (3-3)"
    assert table.time_of(cells["ggml"], row) == "3 s (3-3)"
    assert table.time_of(cells["ggml"], {**row, "tokens": 6}) == "2.0 tokens/s (2.0-2.0)"
    cells["ggml"]["format"] = "bf16"
    assert table.time_of(cells["ggml"], row) == "bf16 3 s (3-3)"


def test_a_report_names_what_is_missing_and_what_does_not_sleep() -> None:
    found, _ = fakes("ours", "control", "ggml")
    found.append(Column("torch", found[0].start, missing="there is none; run `make peers`"))
    child_of(found[2]).wrong = True
    with opened(found):
        report = measured([CASE], found, Options(2, 2, 25, 1 << 10, settle=0.003))
    lines = table.notes({**report, "environment": {"load": [1.5, 1, 1], "cores": 2}})
    assert lines[0] == "the machine was busy: load 1.5 on 2 cores"
    assert "torch is absent: there is none; run `make peers`" in lines
    assert any(line.startswith("ours used 4 ms of CPU time while it waited") for line in lines)
    assert sum(line.startswith("ggml, decode 1x5 2/1 d32") for line in lines) == 3
    assert report["rates"] == RATES and len(report["rows"]) == 3
    json.dumps(report)


# -- checks ---------------------------------------------------------------------------------------


def test_work_is_counted_once_for_what_a_causal_mask_shows() -> None:
    case = Attention(3, 5, 4, 2, 64)
    assert case.pairs == 3 + 4 + 5
    assert case.work("f32", "call") == Work(fma=2 * 12 * 4 * 64)
    assert case.work("q8_0", "call") == Work(fma=12 * 4 * 64, int8=12 * 4 * 64)
    assert Attention(1, 8, 4, 2, 64).work("q8_0", "call").bytes == 2 * 8 * 4 * 34
    assert Product(48, 64, 1).work("q8_0", "call") == Work(bytes=48 * 2 * 34, int8=48 * 64)
    sizes = (2, 16, 2, 32)
    store_cases = Session(*sizes), Store(*sizes), Tables(10)
    for one in (case, Product(48, 64, 1), Model("q8_0", 16), *store_cases):
        assert from_message(json.loads(json.dumps(one.message()))) == one


@pytest.mark.parametrize("fmt", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("case", [CASE, Product(3, 64, 5)], ids=["attn", "dense"])
def test_ours_is_held_to_the_budget_and_peers_to_their_format(case: Case, fmt: str) -> None:
    query = "q8_0" if fmt == "q8_0" else "f32"
    truth = checks.expected(case, fmt, query)
    assert truth is not None
    right = truth.rounded.astype(np.float32)
    ours = checks.check_ours(case, fmt, right, {"query": query})
    assert ours.passed and ours.tolerance < 1e-5 and ours.unit == "absolute"
    off = right + np.float32(2 * truth.budget)
    assert not checks.check_ours(case, fmt, off, {"query": query}).passed
    for bad in (right * np.nan, right[:, :-1]):
        assert not checks.check_ours(case, fmt, bad, {"query": query}).passed
    assert checks.check_peer(case, fmt, right, {}, None).passed
    for bad in (right * 1.1, right * 0, right[:, :-1], right * np.nan):
        assert not checks.check_peer(case, fmt, bad.astype(np.float32), {}, None).passed


def test_a_model_is_compared_with_our_logits() -> None:
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    case = Model("q8_0", 16)
    assert checks.check_peer(case, "f16", logits + 3, {}, logits).passed
    assert not checks.check_peer(case, "f16", logits[::-1].copy(), {}, logits).passed
    assert not checks.check_peer(case, "f16", logits, {}, None).passed


def test_logits_of_ours_are_finite() -> None:
    logits = np.ones(10, np.float32)
    assert checks.check_ours(Model("q8_0", 16), "f16", logits, {}).passed
    logits[3] = np.nan
    assert not checks.check_ours(Model("q8_0", 16), "f16", logits, {}).passed


# -- all of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--threads", "0", "--threads 0 is below 1"),
        ("--threads", "1000000", "--threads 1000000 is above 1024"),
        ("--seconds", "nan", "--seconds nan is no time"),
        ("--seconds", "inf", "--seconds inf is no time"),
        ("--out", "/no/such/folder/x.json", "--out /no/such/folder/x.json cannot be written"),
        ("--out", "/tmp", "--out /tmp cannot be written"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    option: str,
    value: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "opened", None)
    assert main(["bench", "--quick", option, value]) == 2
    assert message in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_printed_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "columns", lambda _: [])
    monkeypatch.setattr(command, "measured", lambda *_: {"rows": []})
    assert main(["bench", "--quick", "--json", "--out", "/dev/full"]) == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["rows"] == [] and "No space left" in told.err


def test_a_quick_run_times_every_case_after_its_check() -> None:
    argv = [sys.executable, "-m", "tuning", "bench", "--quick", "--json"]
    done = subprocess.run(
        [*argv, "--what", "attn", "session", "tables"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["rows"]) == 2 * 3 + 7 * 3 + (7 * 3 - 1) + 3 * 3 + 12
    for row in report["rows"]:
        copied = ["copy"] if row["what"] == "file" else []
        for name in ("ours", "control", *copied):
            cell = row["columns"][name]
            assert cell["check"]["passed"], (row["label"], cell)
            assert cell["status"] in ("timed", "impossible")
            assert len(cell["samples"]) == 2 and min(cell["samples"]) > 0
    assert report["columns"]["ggml"]["missing"] == "not asked for; --peers adds it"
    assert set(report["rates"]) == {"read", "fma", "int8"}
