"""`minfer ppl`: what it prints, what it refuses, and SmolLM2 on a novel."""

from __future__ import annotations

import functools
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import write_tiny_gguf
from transformers_models import log_probabilities_in_transformers, read_in_transformers

from minfer import Engine
from minfer.commands import ppl as command
from minfer.models.gguf import open_gguf
from minfer.models.tokenizer import Tokenizer
from minfer.perplexity import cut, measure, summarize

ROOT = Path(__file__).parent.parent
NOVEL = ROOT / "tests" / "data" / "austen-persuasion.txt"
FIELDS = ("nll", "perplexity", "perplexity_error", "n_scored")


@pytest.fixture
def call(call):
    """`minfer ppl` in this process."""
    return functools.partial(call, "ppl")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Some 450 tokens of a tiny vocabulary."""
    path = tmp_path / "text.txt"
    path.write_text(NOVEL.read_text()[:600])
    return path


def library(path: Path, text: Path, formats: list[str], stride: int | None = None) -> list[Any]:
    """The results from Python, of windows of 64 tokens."""
    engine = Engine.load(path, cache_type=formats[0], n_ctx=64)
    engines = [engine, *map(engine.with_cache, formats[1:])]
    tokens = engine.encode(text.read_text())
    return summarize(list(measure(engines, tokens, cut(len(tokens), 64, stride))))


@pytest.mark.parametrize("stride", [None, 40])
def test_json_gives_what_the_library_gives(
    call, tiny_gguf: Path, text: Path, stride: int | None
) -> None:
    more = () if stride is None else ("--stride", stride)
    done = call(tiny_gguf, text, "--n-ctx", 64, "--compare", "f16,q8_0,f32", "--json", *more)
    report = json.loads(done.out)
    assert done.code == 0
    assert [line for line in done.err.splitlines() if "compiling" not in line] == []
    assert (report["kind"], report["n_ctx"], report["stride"]) == ("prefill", 64, stride)
    assert report["seconds"] > 0 < report["tokens_per_second"]
    expected = library(tiny_gguf, text, ["f16", "q8_0", "f32"], stride)
    rows = report["results"]
    assert [row["cache_type"] for row in rows] == ["f16", "q8_0", "f32"]
    for row, result in zip(rows, expected, strict=True):
        assert [row[field] for field in FIELDS] == [getattr(result, field) for field in FIELDS]
        assert row["versus"] == (result.versus and vars(result.versus))
        ran = {r["op"]: r["variant"] for r in row["receipts"]}
        assert ran["attn_window"] == "flash"
    assert rows[0]["versus"] is None and rows[1]["versus"]["kl_mean"] > rows[2]["versus"]["kl_mean"]
    scored = {None: 31 * report["windows"], 40: report["tokens"] - 1}[stride]
    assert {row["n_scored"] for row in rows} == {scored}


def test_a_table_for_people(call, tiny_gguf: Path, text: Path) -> None:
    done = call(tiny_gguf, text, "--n-ctx", 64, "--compare", "f32,q8_0", "--max-tokens", 200)
    _, second = report = json.loads(
        call(
            tiny_gguf, text, "--n-ctx", 64, "--compare", "f32,q8_0", "--max-tokens", 200, "--json"
        ).out
    )["results"]
    first_line, header, *lines = done.out.splitlines()
    assert first_line == (f"93 of 200 tokens of {text} scored by prefill; windows of 64 tokens: 3")
    assert re.split(r"\s\s+", header) == [
        "cache",
        "perplexity",
        "against f32",
        "KL mean",
        "KL max",
        "top-1",
        "RMS dp",
    ]
    plain, packed = (re.split(r"\s\s+", line) for line in lines)
    for cells, row in ((plain, report[0]), (packed, second)):
        expected = f"{row['perplexity']:.4f} +/- {row['perplexity_error']:.4f}"
        assert cells[:2] == [row["cache_type"], expected]
    v = second["versus"]
    assert len(plain) == 2 and packed[2:] == [
        f"{100 * (v['ratio'] - 1):+.4f} +/- {100 * v['ratio_error']:.4f} %",
        f"{v['kl_mean']:.2e}",
        f"{v['kl_max']:.2e}",
        f"{100 * v['top1_agreement']:.2f} %",
        f"{100 * v['prob_rms']:.4f} %",
    ]
    assert re.fullmatch(r"\d+\.\d s, \d+ tokens/s\n", done.err), done.err
    assert len({len(line) for line in (header, lines[1])}) == 1


def test_one_format_is_two_columns(call, tiny_gguf: Path, text: Path) -> None:
    done = call(tiny_gguf, text, "--n-ctx", 64, "--cache-type", "q8_0", "--threads", 1)
    (expected,) = library(tiny_gguf, text, ["q8_0"])
    assert done.out.splitlines()[1:] == [
        f"cache  {'perplexity':>{len(done.out.splitlines()[2]) - 7}}",
        f"q8_0   {expected.perplexity:.4f} +/- {expected.perplexity_error:.4f}",
    ]


def test_decode_feeds_tokens_through_its_own_kernels(call, tiny_gguf: Path, text: Path) -> None:
    argv = (tiny_gguf, text, "--n-ctx", 64, "--max-tokens", 130)
    prefill = json.loads(call(*argv, "--json").out)
    decode = json.loads(call(*argv, "--json", "--decode").out)
    assert decode["kind"] == "decode"
    (a,), (b,) = prefill["results"], decode["results"]
    assert {r["variant"] for r in b["receipts"] if r["op"] == "attn_window"} == {"split"}
    assert a["n_scored"] == b["n_scored"] == 62
    assert a["nll"] != b["nll"] == pytest.approx(a["nll"], rel=1e-4)
    assert "62 of 130 tokens" in (out := call(*argv, "--decode").out) and "by decode" in out


def test_a_window_is_as_long_as_the_model_was_trained_for(
    call, tmp_path: Path, tiny_gguf: Path, text: Path
) -> None:
    write_tiny_gguf(tmp_path / "short.gguf", metadata={"llama.context_length": 48})
    assert json.loads(call(tmp_path / "short.gguf", text, "--json").out)["n_ctx"] == 48
    text.write_text("the cat " * 600)
    assert json.loads(call(tiny_gguf, text, "--json").out)["n_ctx"] == 512
    longer = call(tiny_gguf, text, "--n-ctx", 600)
    assert longer.code == 0 and "trained for 512 positions" in longer.err


def test_a_text_is_read_as_it_stands(
    call, tiny_gguf: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "a line\r\nand \u00e9\r\n".encode() * 20
    engine = Engine.load(tiny_gguf, n_ctx=8)
    text.write_bytes(data)
    tokens = len(engine.encode(data.decode()))
    argv = ("--n-ctx", 64, "--json")
    filed = json.loads(call(tiny_gguf, text, *argv).out)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    piped = json.loads(call(tiny_gguf, "-", *argv).out)
    assert filed["tokens"] == piped["tokens"] == tokens
    assert filed["results"] == piped["results"]


REFUSED = {
    "empty": (b"", (), "text.txt is empty"),
    "short": (b"the cat", ("--n-ctx", 64), "and a window 64; give a longer text"),
    "one token": (b"x", ("--stride", 8), "the text has 1 tokens"),
    "latin-1": (b"caf\xe9 au lait", (), "byte 3 of TEXT (0xe9) is no UTF-8"),
    "n-ctx 1": (None, ("--n-ctx", 1), "n_ctx 1 is below 2"),
    "n-ctx 0": (None, ("--n-ctx", 0), "n_ctx 0 is below 2"),
    "stride 0": (None, ("--n-ctx", 64, "--stride", 0), "stride 0 is below 1"),
    "stride 65": (None, ("--n-ctx", 64, "--stride", 65), "stride 65 is above 64"),
    "max-tokens 1": (None, ("--max-tokens", 1), "--max-tokens 1 is below 2"),
    "max-tokens 9": (None, ("--max-tokens", 9), "the text has 9 tokens and a window 512"),
    "unknown": (None, ("--compare", "f32,q4_0"), "cache type 'q4_0' is none of"),
    "nothing named": (None, ("--compare", "f32,"), "cache type '' is none of"),
    "twice": (None, ("--compare", "f16,f32,f16"), "names f16 2 times"),
    "both": (None, ("--compare", "f32", "--cache-type", "f16"), "give one of the two"),
    "cache type": (None, ("--cache-type", "q8"), "cache type 'q8'"),
    "threads 0": (None, ("--threads", 0), "threads 0 is below 1"),
}


@pytest.mark.parametrize(("data", "argv", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_is_one_clear_line(
    call, tiny_gguf: Path, text: Path, data: bytes | None, argv: tuple[object, ...], words: str
) -> None:
    if data is not None:
        text.write_bytes(data)
    done = call(tiny_gguf, text, *argv)
    assert done.code == 2 and done.out == ""
    assert words.replace("TEXT", str(text)) in done.err and done.err.count("\n") == 1, done.err


def test_files_that_cannot_be_read_are_refused(call, tiny_gguf: Path, tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "none.txt"):
        done = call(tiny_gguf, name)
        assert done.code == 2 and f"cannot read the text from {name}" in done.err


def interrupted(*args: Any) -> Iterator[Any]:
    """The first window, then Ctrl-C."""
    yield next(measure(*args))
    raise KeyboardInterrupt


def test_an_interrupt_shows_what_was_measured(
    call, tiny_gguf: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = (tiny_gguf, text, "--n-ctx", 64, "--max-tokens", 130)
    only_first = call(tiny_gguf, text, "--n-ctx", 64, "--max-tokens", 64).out.splitlines()
    monkeypatch.setattr(command, "measure", interrupted)
    done = call(*argv)
    assert done.code == 130 and done.err == "\nminfer: interrupted\n"
    first_line, *table = done.out.splitlines()
    assert first_line.endswith("windows of 64 tokens: the first 1 of 2")
    assert first_line.startswith("31 of 130 tokens") and table == only_first[1:]
    silent = call(*argv, "--json")
    assert (silent.code, silent.out) == (130, "")


def test_a_bar_is_for_terminals(
    call, tiny_gguf: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: True)
    argv = (tiny_gguf, text, "--n-ctx", 64)
    assert "/7 [00:00<" in call(*argv).err
    assert "window" not in call(*argv, "--json").err


def test_help_shows_examples(call) -> None:
    assert "  minfer ppl smollm2 novel.txt --compare f32,f16,q8_0" in call("--help").out


@pytest.mark.model
def test_smollm2_on_a_novel(call, smollm2: Path) -> None:
    argv = (smollm2, NOVEL, "--weights", "f32", "--n-ctx", 256, "--max-tokens", 512, "--json")
    report = json.loads(call(*argv, "--compare", "f32,f16,q8_0").out)
    assert (report["tokens"], report["windows"]) == (512, 2)
    full, half, packed = report["results"]
    file = open_gguf(smollm2)
    tokens = Tokenizer.from_gguf(file.metadata).encode(NOVEL.read_text())[:512]
    model, nll = read_in_transformers(file), []
    for start in (0, 256):
        fed = tokens[start : start + 256]
        log_p = log_probabilities_in_transformers(model, fed)
        nll += [-float(log_p[at - 1, fed[at]]) for at in range(129, 256)]
    assert full["n_scored"] == len(nll) == 254
    assert full["perplexity"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)
    assert abs(half["versus"]["ratio"] - 1) < 1e-4
    assert abs(packed["versus"]["ratio"] - 1) < 3e-3
    assert 0 < half["versus"]["kl_mean"] < 1e-5 < packed["versus"]["kl_mean"] < 3e-3
    assert half["versus"]["top1_agreement"] > 0.99
    assert packed["versus"]["top1_agreement"] > 0.95


@pytest.mark.model
def test_the_example_of_the_page_runs(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "perplexity.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "perplexity.md", "exec"), {})
    perplexity, change, _ = capsys.readouterr().out.split()
    assert float(perplexity) == pytest.approx(13.38, abs=0.02) and 0 < abs(float(change)) < 1
