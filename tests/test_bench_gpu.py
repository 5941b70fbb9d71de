"""The benchmark of a GPU: its cases, floors and columns; children are fakes, nothing is timed.

test_bench_gpu_columns.py runs the real columns in Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_columns import OPTIONS, RATES, by_name, child_of, fakes, racer

from minfer.device import Device
from minfer.format import KvFormat
from tuning.__main__ import main
from tuning.bench import batches, checks, command, lines, options, results, rounds, statistics
from tuning.bench.batches import Batch
from tuning.bench.cases import Attention, Model, Work
from tuning.bench.command import measured
from tuning.bench.contestants import OTHERWISE, Column, gpu_columns, opened
from tuning.bench.protocol import NO_GRAPH, Child, ChildFailed, pack
from tuning.bench.suites import GPU_QUICK, GPU_SUITES, from_message

DECODE = Batch(1, 40, 4, 2, 32, batch=3)
PREFILL = Batch(7, 7, 2, 1, 32, batch=2, kinds=("f16", "q8_0"))
GPU_RATES = {"read": 4e12, "fma": 3e14, "bf16": 4e14, "int8": 3e14}


# -- cases ----------------------------------------------------------------------------------------


def test_numbers_are_the_same_from_numpy_and_torch() -> None:
    torch = pytest.importorskip("torch")
    index = np.concatenate([np.arange(5000), 3 * (1 << 30) - np.arange(5000)])
    made = batches.numbers(index)
    assert made.dtype == np.float32
    assert np.array_equal(made, batches.numbers(torch.from_numpy(index)).numpy())
    assert made.min() >= -2 and made.max() < 2 and abs(made.mean()) < 0.05
    assert made.std() == pytest.approx(4 / 12**0.5, rel=0.02)
    assert len(np.unique(made)) > 9950


def test_a_part_of_an_input_is_the_part_of_the_whole() -> None:
    rows, heads, dims = np.arange(120), np.arange(2), np.arange(32)
    k = batches.rows_of(DECODE, "k", rows, heads, dims)
    part = batches.rows_of(DECODE, "k", rows[50:60], heads[1:], dims)
    assert np.array_equal(part, k[50:60, 1:])
    v = batches.rows_of(DECODE, "v", rows, heads, dims)
    assert abs(np.corrcoef(k.ravel(), v.ravel())[0, 1]) < 0.05


@pytest.mark.parametrize("n_runs", [1, 2, 4])
@pytest.mark.parametrize("case", [DECODE, PREFILL, GPU_SUITES["attn"][0]])
def test_runs_have_odd_borders_and_fill_the_arena(case: Batch, n_runs: int) -> None:
    spans = batches.placed(case, n_runs)
    assert all(len(of_sequence) == n_runs for of_sequence in spans)
    cells = batches.cells_of(spans)
    assert sorted(cells.tolist()) == list(range(case.batch * case.n_cells))
    borders = [s.position for of_sequence in spans for s in of_sequence[1:]]
    assert len(borders) == (n_runs - 1) * case.batch and all(b % 2 for b in borders)
    if n_runs > 1:  # a sequence is not in one piece after all
        assert all(a.cell + a.length != b.cell for s in spans for a, b in pairwise(s))


@pytest.mark.parametrize("n_runs", [1, 2, 4])
@pytest.mark.parametrize("case", [DECODE, PREFILL])
def test_a_window_shows_a_query_the_cells_of_its_own_rows(case: Batch, n_runs: int) -> None:
    spans = batches.placed(case, n_runs)
    cells = batches.cells_of(spans).reshape(case.batch, case.n_cells)
    window = batches.window_of(case, spans)
    for query, position in enumerate(case.positions.tolist()):
        shown = window[query].reshape(-1, 2)
        pieces = [np.arange(a, a + n) for a, n in shown] if n_runs > 1 else [np.arange(*shown[0])]
        own = cells[query // case.n_q, : position + 1]
        assert np.array_equal(np.concatenate(pieces), own)


@pytest.mark.parametrize("case", [DECODE, PREFILL])
def test_the_oracle_attends_each_checked_query_to_its_own_sequence(case: Batch) -> None:
    queries, kv_heads = case.checked
    assert kv_heads == sorted({0, case.n_head_kv - 1}) and max(queries) == case.batch * case.n_q - 1
    heads, dims = np.arange(case.n_head), np.arange(case.head_dim)
    rows = np.arange(case.batch * case.n_cells)
    q = batches.rows_of(case, "q", np.arange(case.batch * case.n_q), heads, dims)
    k, v = (batches.rows_of(case, n, rows, heads[: case.n_head_kv], dims) for n in "kv")
    expected = batches.expected_batch(case, KvFormat.F32).exact
    for i, query in enumerate(queries):
        own = query // case.n_q * case.n_cells + np.arange(case.positions[query] + 1)
        for j, head in enumerate(heads):  # every KV head of these cases is checked
            kv = head // (case.n_head // case.n_head_kv)
            scores = k[own, kv].astype(np.float64) @ q[query, head] * case.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            answer = weights @ v[own, kv] / weights.sum()
            assert np.allclose(expected[i, j], answer, rtol=0, atol=1e-12)


def test_work_counts_every_sequence_and_products_alike() -> None:
    one = Attention(1, 40, 4, 2, 32).work("q8_0", "call")
    assert DECODE.work("q8_0", "call") == Work(bytes=3 * one.bytes, fma=3 * (one.fma + one.int8))
    assert PREFILL.work("f16", "call") == Work(fma=2 * 2 * 28 * 2 * 32)
    assert PREFILL.formats == ("f16", "q8_0") and DECODE.label("call") == "decode 3x40 4/2 d32"
    for case in [
        c for suites in (GPU_SUITES, GPU_QUICK) for suite in suites.values() for c in suite
    ]:
        assert from_message(json.loads(json.dumps(case.message()))) == case


# -- checks and rates -----------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["f16", "q8_0"])
def test_a_small_answer_is_not_hidden_by_a_large_one(fmt: str) -> None:
    case = Batch(300, 300, 2, 1, 32)
    truth = checks.expected(case, fmt, "f32")
    assert truth is not None
    right = truth.exact.astype(np.float32)
    assert checks.check_ours(case, fmt, right, {}).passed
    wrong = right.copy()
    wrong[-1, 0, 0] += 0.01 * np.abs(right[-1]).max()
    assert 0.01 * np.abs(right[-1]).max() < 0.003 * truth.scale
    for check in (
        checks.check_ours(case, fmt, wrong, {}),
        checks.check_peer(case, fmt, wrong, {}, None),
    ):
        assert not check.passed and check.error == pytest.approx(0.01, rel=0.05)
    assert checks.check_peer(case, fmt, wrong, {"format": "bf16"}, None).passed
    for bad in (right * np.nan, right[:, :-1], right * 0):
        assert not checks.check_peer(case, fmt, bad, {"format": "fp8"}, None).passed


def test_peers_of_a_gpu_multiply_no_faster_than_its_matrix_units() -> None:
    work = PREFILL.work("f16", "call")
    assert statistics.peer_floor(work, GPU_RATES) == work.fma / 4e14
    assert statistics.peer_floor(work, RATES) == 0.0
    samples = [0.5 * work.fma / 4e14] * 3
    racers = [racer("ours", [1.0] * 3, "f16"), racer("FA3", samples, "f16")]
    cells = results.rows(PREFILL, racers, GPU_RATES)[0]["columns"]
    assert cells["FA3"]["status"] == "impossible" and cells["ours"]["status"] == "timed"
    read = DECODE.work("f16", "call").bytes / GPU_RATES["read"]
    racers = [racer("ours", [0.8 * read] * 3, "f16"), racer("FA3", [0.95 * read] * 3, "f16")]
    cells = results.rows(DECODE, racers, GPU_RATES)[0]["columns"]
    assert cells["ours"]["status"] == "impossible" and cells["FA3"]["status"] == "timed"


def test_a_row_tells_its_speed_and_its_part_of_the_ceiling() -> None:
    decode, prefill = (case.work("f16", "call") for case in (DECODE, PREFILL))
    floor = decode.bytes / GPU_RATES["read"]
    cell = results.rows(DECODE, [racer("ours", [2 * floor] * 3, "f16")], GPU_RATES)[0]["columns"]
    assert cell["ours"]["bytes_per_second"] == pytest.approx(2e12)
    assert cell["ours"]["of_floor"] == pytest.approx(0.5)
    floor = prefill.fma / GPU_RATES["fma"]
    cell = results.rows(PREFILL, [racer("ours", [1.25 * floor] * 3, "f16")], GPU_RATES)[0][
        "columns"
    ]
    assert cell["ours"]["flops"] == pytest.approx(2 * 3e14 / 1.25)
    assert cell["ours"]["of_floor"] == pytest.approx(0.8)


def test_other_formats_are_told_in_times_of_our_f16() -> None:
    racers = [racer("ours", [2.0, 20.0, 2.0], "f16"), racer("ours", [1.0, 10.0, 1.1], "q8_0")]
    rows = results.rows(DECODE, racers, GPU_RATES)
    assert [row["format"] for row in rows] == ["f16", "q8_0"]
    assert rows[0]["of_f16"] is None and rows[1]["of_f16"]["median"] == pytest.approx(0.5)


# -- rounds ---------------------------------------------------------------------------------------


def test_a_format_that_ends_its_child_costs_its_row_only() -> None:
    found, log = fakes("ours", "control", "FA3")
    trouble = child_of(found[0]).trouble
    trouble["prepare", "q8_0"] = ChildFailed("ended with exit code 1: an illegal memory access")
    racers = rounds.measure(DECODE, found, OPTIONS)
    lost = [(r.column.name, r.fmt) for r in racers if r.status != "timed"]
    assert lost == [("ours", "q8_0")]
    asked = [key for name, do, key, _ in log if (name, do) == ("ours", "prepare")]
    assert asked == ["f32", "f16", "q8_0", "f32", "f16"]
    assert all(len(r.samples["call"]) == 4 for r in by_name(racers, "f16").values())
    trouble["prepare", "f32"] = trouble["prepare", "q8_0"]  # each time, a child that is lost
    racers = rounds.measure(DECODE, found, OPTIONS)
    assert {r.fmt: r.status for r in racers if r.column.name == "ours"} == {
        "f32": "failed", "f16": "timed", "q8_0": "failed",
    }  # fmt: skip


def test_other_columns_of_ours_are_held_to_the_logits_of_the_first() -> None:
    found, _ = fakes("ours", "no replay")
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    for column, values in zip(found, (logits, logits[::-1]), strict=True):
        reply = {"values": pack(values), "note": "", "facts": {}, "seconds": {}}
        child_of(column).prepare = lambda _, reply=reply: reply  # type: ignore[method-assign, misc]
        column.suites = ("model",)
    case = Model("q4_1", 16, ("f16",), read_as="f16")
    racers = by_name(rounds.measure(case, found, OPTIONS), "f16")
    assert racers["ours"].status == "timed" and racers["no replay"].status == "failed"


# -- columns --------------------------------------------------------------------------------------


def test_columns_are_those_that_have_such_cases() -> None:
    names = [column.name for column in gpu_columns(None, ["batch"])]
    assert names == [
        "ours", "control", "2 runs", "4 runs", "cuDNN", "FA2", "FlexAttention", "FlashInfer", "FA3",
    ]  # fmt: skip
    assert [column.is_peer for column in gpu_columns(None, ["batch"])] == [False] * 4 + [True] * 5
    names = [column.name for column in gpu_columns(None, ["dense", "model"])]
    assert names == [
        "ours", "control", "no replay", "f16 activations", "torch", "compiled", "eager",
    ]  # fmt: skip
    assert set(OTHERWISE) == {"2 runs", "4 runs", "no replay", "f16 activations"}
    assert all("--peers" in c.missing for c in gpu_columns(None, ["batch"]) if c.is_peer)
    assert not any(column.missing for column in gpu_columns(Path("python"), ["batch"]))


def test_a_peer_that_is_not_installed_is_absent(tmp_path: Path) -> None:
    peer = next(c for c in gpu_columns(tmp_path / "python", ["batch"]) if c.name == "FA3")
    peer.start = lambda: Child([sys.executable, "-c", "import no_such_attention"])
    with opened([peer]):
        assert "No module named 'no_such_attention'; install it, or name" in peer.missing


def test_a_child_is_waited_for_as_long_as_its_column_says() -> None:
    found, _ = fakes("ours")
    waited: list[float] = []
    child_of(found[0]).ask = lambda _request, timeout: waited.append(timeout) or {}  # type: ignore[method-assign, func-returns-value]
    found[0].patience = 7.5
    found[0].ask(do="drop")
    assert waited == [7.5]


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "unavailable", lambda device: None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "metal"], "bench measures cpu and cuda, not metal"),
        (["--device", "cuda", "--what", "session"], "cuda has no suite session, only attn, dense"),
        (["--device", "cuda", "--seconds", "0"], "--seconds 0.0 is no time"),
    ],
)
def test_what_a_device_does_not_have_is_refused(
    gpu: None, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "unavailable", lambda device: f"device {device} needs a GPU")
    assert main(["bench", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "device cuda needs a GPU (contract 0.3)\n"


def gpu_fakes() -> list[Column]:
    found, _ = fakes("ours", "control", "FA3", seconds=1e-3)
    for column in found:
        child_of(column).ask = rated(child_of(column))  # type: ignore[method-assign]
    return found


def rated(child: Any) -> Any:
    ask = child.ask

    def answer(request: Any, timeout: float) -> Any:
        return {"rates": GPU_RATES} if request["do"] == "machine" else ask(request, timeout)

    return answer


def test_a_run_that_is_ended_has_written_what_it_measured(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[int] = []
    out = tmp_path / "report.json"

    def watched(case: Any, *rest: Any) -> Any:
        if out.exists():
            written.append(len(json.loads(out.read_text())["rows"]))
        if isinstance(case, Batch) and case.n_q > 1:
            raise KeyboardInterrupt
        return rounds.measure(case, *rest)

    monkeypatch.setattr(command, "measure", watched)
    monkeypatch.setattr(options, "gpu_columns", lambda *_: gpu_fakes())
    argv = ["bench", "--device", "cuda", "--quick", "--what", "attn", "--out", str(out)]
    assert main(argv) == 130
    report = json.loads(out.read_text())
    assert written == [3] and [row["format"] for row in report["rows"]] == ["f32", "f16", "q8_0"]
    assert report["rates"] == GPU_RATES and report["environment"]["device"] == "cuda"
    assert capsys.readouterr().out.count("| decode 3x40 4/2 d32 |") == 3


def test_rows_are_printed_once_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    report: Any = {}
    printer = lines.Printer()
    how = rounds.Options(2, 2, 25, 1 << 10, settle=0)
    with opened(gpu_fakes()) as found:
        report = measured([DECODE, PREFILL], found, how, printer.show)
    shown = capsys.readouterr().out
    head = "| case | format | ours | speed | of floor | A/A noise | / f16 | FA3 / ours |"
    assert shown.count(head) == 1 and "copy 4000 GB/s; products of 600 (f16)" in shown
    rows = [line for line in shown.splitlines() if line.startswith(("| decode", "| prefill"))]
    assert len(rows) == len(report["rows"]) == 5
    assert rows[0].startswith("| decode 3x40 4/2 d32 | f32 | 1 ms (1-1) |")
    assert rows[1].endswith("|  | 1x (1-1) tie |") and "| 1.00x |" in rows[2]
    report["environment"] = {"load": None, "cores": 2}
    report["rows"][1]["columns"]["FA3"]["note"] += f"{NO_GRAPH}RuntimeError: no"
    printer.end(report)
    shown = capsys.readouterr().out
    assert "FA3, decode 3x40 4/2 d32 f16: fake, no graph: RuntimeError: no\n" in shown
    assert "| decode" not in shown and shown.count("no graph") == 1


def test_a_peer_in_another_format_says_so() -> None:
    racers = [racer("ours", [1.0] * 3, "f16"), racer("FA3", [1.5] * 3, "f16")]
    racers[1].computed_in = "bf16"
    row = results.rows(PREFILL, racers, GPU_RATES)[0]
    assert lines.line(row, ["FA3", "FA2"]).endswith("| bf16 1.5x (1.5-1.5) | - |")


# -- the picture ----------------------------------------------------------------------------------


def test_the_picture_shows_ours_in_each_format_beside_peers_of_f16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    samples = {"ours": 1e-6, "control": 1e-6, "FA3": 2e-6, "2 runs": 1e-6}
    rows = []
    for case in (DECODE, PREFILL):
        racers = [racer(n, [t] * 3, fmt) for fmt in case.formats for n, t in samples.items()]
        rows += results.rows(case, racers, dict.fromkeys(GPU_RATES, 1e30))
    source, out = tmp_path / "report.json", tmp_path / "gpu.png"
    source.write_text(json.dumps({"rows": rows, "rates": GPU_RATES}))
    assert main(["figure", "gpu", "--from", str(source), "--out", str(out)]) == 0
    assert out.read_bytes()[:4] == b"\x89PNG"
    work = DECODE.work("f16", "call").bytes / 1e9
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].rsplit(" ", 6)[0] for line in shown[:4]] == [
        "ours f32", "ours f16", "FA3", "ours q8_0",
    ]  # fmt: skip
    assert shown[2] == f"decode 3x40 4/2 d32: FA3 {work / 2e-6:.0f} GB/s of K and V"
    assert [line.split(": ")[1].rsplit(" ", 2)[0] for line in shown[4:]] == [
        "ours f16", "FA3", "ours q8_0",
    ]  # fmt: skip


def test_a_picture_needs_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["figure", "gpu"]) == 2 and "--from FILE" in capsys.readouterr().err
    assert main(["figure", "gpu", "--from", str(tmp_path / "none")]) == 2
    assert "is no report in JSON" in capsys.readouterr().err
