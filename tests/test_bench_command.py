"""The benchmark's command: options that it refuses, model files that it keeps."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from minfer.errors import Refusal
from tuning import __main__ as tuning_main
from tuning.bench import command, options
from tuning.bench.cases import Model
from tuning.bench.contestants import Column, opened
from tuning.bench.protocol import Message
from tuning.bench.rounds import Options

ROOT = Path(__file__).parent.parent


class Quantizer:
    """Makes the files that it is asked for, of its version."""

    def __init__(self, version: str) -> None:
        self.version = version

    def ask(self, request: Message, timeout: float) -> Message:
        if request["do"] == "hello":
            return {"versions": {"llama-cpp-python": self.version}, "suites": ["model"]}
        target = Path(request["target"])
        target.parent.mkdir(exist_ok=True)
        target.write_text(f"{Path(request['source']).read_text()} by {self.version}")
        return {}

    def close(self) -> None:
        pass


def test_a_requantized_model_is_kept_by_its_source_and_its_maker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tiny.Q4_1.gguf"
    monkeypatch.setattr(command, "resolve_model", lambda name: source)
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path))
    case = Model("q8_0", 16)

    def made(text: str, version: str | None) -> Path:
        source.write_text(text)
        found = [] if version is None else [Column("ggml", lambda: Quantizer(version))]
        with opened(found):
            return Path(command.with_file(case, found, Options(2, 4, 25, 1 << 10)).path)

    with pytest.raises(Refusal, match=r"has 0 files tiny\.Q4_1-3-q8_0-VERSION\.gguf.*use --peers"):
        made("one", None)
    first = made("one", "0.3")
    assert first == tmp_path / "bench" / "tiny.Q4_1-3-q8_0-0.3.gguf"
    assert first.read_text() == "one by 0.3" and made("one", None) == first
    assert made("three", "0.3").read_text() == "three by 0.3"
    assert made("one", "0.4").read_text() == "one by 0.4"
    with pytest.raises(Refusal, match=r"has 2 files tiny\.Q4_1-3-q8_0"):
        made("one", None)


REFUSED_OPTIONS = {
    "--seconds": ("0", "-1", "nan", "inf"),
    "--rounds": ("0", "-2"),
    "--threads": ("0", "-1"),
}


@pytest.mark.parametrize(
    ("option", "value"),
    [(option, value) for option, values in REFUSED_OPTIONS.items() for value in values],
)
@pytest.mark.parametrize("more", [[], ["--quick"]], ids=["full", "quick"])
def test_options_that_measure_nothing_are_refused(
    option: str, value: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measures(*_: object) -> None:
        raise AssertionError("it measures")

    monkeypatch.setattr(command, "measured", measures)
    monkeypatch.setattr(options, "last_level_cache", lambda: 1)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(Refusal, match=rf"^{option} {value}"):
        command.run(parser.parse_args([f"{option}={value}", *more]))


def test_a_model_that_is_not_there_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measures(*_: object) -> None:
        raise AssertionError("it measures")

    monkeypatch.setattr(command, "measured", measures)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(Refusal, match=r"^no-such-model is neither a file"):
        command.run(parser.parse_args(["--what", "model", "--model", "no-such-model"]))


def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of docs/benchmarks.md."""

    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(tuning_main.importlib, "import_module", missing)
    assert tuning_main.main(["bench"]) == 2
    way_out = "pip install -e '.[bench]'"
    assert capsys.readouterr().err == f"rich is not installed; {way_out}\n"
    assert way_out in (ROOT / "docs" / "benchmarks.md").read_text()
