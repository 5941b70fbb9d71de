"""Files of promoted rows: strictly read, said once, never an error; kinds of devices, sources."""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import shutil
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuned_rows import CPU, EVIDENCE, MINE, OTHER, Folder, choose, content, row, user_module

from minfer import registry, tuned
from minfer.device import Device
from minfer.errors import Refusal
from minfer.ops import DECODE, KINDS, PREFILL, Tunable
from minfer.ops.overrides import configure
from minfer.tuned import machine, sources, table
from minfer.tuned.code import code_of

ROOT = Path(__file__).parent.parent
KIND = tuned.device_kind(CPU)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


BROKEN = content()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is no JSON"),
        (b"\xff\xfe", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "it has no schema"),
        (json.dumps({**BROKEN, "schema": 2}), "it has schema 2, and this minfer reads 1"),
        (json.dumps({**BROKEN, "device_kind": "x"}), f"it is not for {KIND}"),
        (json.dumps({**BROKEN, "rows": 1}), "it must hold schema, device_kind and rows"),
        (json.dumps({**BROKEN, "rows": [1]}), "row 1: it is no object"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_said_once(
    folder: Folder, capsys: Capture, text: str | bytes, said: str
) -> None:
    folder.write(text=text)
    line = f"{KIND}.json is not taken: {said}"
    assert choose().receipt.tuned == (line,)
    assert choose("attn_map", fmt="f16").receipt.tuned == (line,)
    assert capsys.readouterr().err == f"minfer: minfer/tuned/{line}\n"


def test_a_folder_in_place_of_the_file(folder: Folder) -> None:
    folder.file.mkdir()
    assert "is not taken: Is a directory" in choose().receipt.tuned[0]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"op": "attn"}, "its op"),
        ({"format": "q4"}, "its format"),
        ({"head_dim": 0}, "its head_dim"),
        ({"head_dim": True}, "its head_dim"),
        ({"kind": "both"}, "its kind"),
        ({"op": "matvec", "head_dim": 0}, "its kind"),
        ({"numeric": {"x": [1]}}, "its numeric"),
        ({"free": []}, "its free"),
        ({"free": [{"n_q": 1, "config": {}}] * 2}, "its free"),
        ({"free": [{"n_q": 1.0, "config": {}}]}, "its free"),
        ({"made_with": {"numba": 1}}, "its made_with"),
        ({"evidence": {}}, "its speedup"),
        (
            {"evidence": {"speedup": [1, float("nan"), 1], "date": "", "commit": None}},
            "its speedup",
        ),
        ({"evidence": {"speedup": [1, 10**400, 1], "date": "", "commit": None}}, "its speedup"),
        ({"evidence": {"speedup": [1, 1, 1], "commit": None}}, "its date"),
        ({"source": "\x1b[2J"}, "characters that cannot be printed"),
        ({"more": 1}, "it has 'more', which is unknown"),
    ],
)
def test_a_row_is_read_strictly(folder: Folder, other: dict[str, Any], said: str) -> None:
    folder.write(row("rows"), row("rows") | other)
    receipt = choose().receipt
    assert receipt.variant == "flash"
    assert "row 2: " in receipt.tuned[0] and said in receipt.tuned[0]


def test_a_row_of_any_depth_is_no_error(folder: Folder) -> None:
    for depth in range(100, 1000, 50):
        nested = json.dumps(content(row("rows", evidence={**EVIDENCE, "more": "DEEP"})))
        folder.write(text=nested.replace('"DEEP"', "[" * depth + "]" * depth))
        receipt = choose().receipt
        taken = receipt.tuned[0].startswith("attn_window 1.08 times")
        assert taken == (receipt.variant == "rows")


def test_a_row_survives_its_text(folder: Folder) -> None:
    folder.write(row("rows", free={8: {}, 1: {}}), row("rows", module="x", kind=DECODE))
    rows = table.loaded(folder.file, KIND)
    text = table.dumped(KIND, rows)
    assert table.dumped(KIND, reversed(rows)) == text
    assert [one["kind"] for one in json.loads(text)["rows"]] == ["decode", "prefill"]
    folder.write(text=text)
    assert table.dumped(KIND, table.loaded(folder.file, KIND)) == text
    assert '      "free": [{"n_q": 1, "config": {}}, {"n_q": 8, "config": {}}],\n' in text


MODULES = st.sampled_from(["", "my_tuned", "another"])
SOME = {
    "op": st.sampled_from(["attn_window", "attn_map", "matvec", 3]),
    "format": st.sampled_from(["q8_0", "f16", ""]),
    "head_dim": st.sampled_from([64, 24, 0]),
    "kind": st.sampled_from([*KINDS, "both"]),
    "variant": st.sampled_from(["rows", "split", "flash", "scratch", "mine", "fast"]),
    "module": MODULES,
    "numeric": st.dictionaries(st.sampled_from(["block_n", "block_m"]), st.sampled_from([16, 8])),
    "free": st.lists(
        st.fixed_dictionaries(
            {
                "n_q": st.integers(0, 9),
                "config": st.dictionaries(
                    st.sampled_from(["block_m", "stages", "threads"]), st.sampled_from([8, 3, "8"])
                ),
            }
        ),
        max_size=2,
    ),
    "made_with": st.just(OTHER),
    "source": st.just("0"),
}


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file of rows that hold here, with some fields changed, cut short at times."""
    rows = []
    for _ in range(draw(st.sampled_from([1, 1, 2, 4]))):
        variant = draw(st.sampled_from(["rows", "rows", "flash", "split", "mine"]))
        good = row(
            variant,
            op=draw(st.sampled_from(["attn_window", "attn_map"])),
            module="my_tuned" if variant == "mine" else "",
        )
        changed = draw(st.sets(st.sampled_from(sorted(SOME)), max_size=1))
        rows.append(good | {name: draw(SOME[name]) for name in sorted(changed)})
    text = json.dumps(content(*rows)).encode()
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


def outcome(op: str, **how: Any) -> tuple[Any, ...]:
    """What a choice comes to: variant and configuration, or the refusal."""
    try:
        choice = choose(op, **how)
    except Refusal as refusal:
        return ("refused", refusal.message)
    return choice.variant.name, dict(choice.config), choice.receipt.reason


def obeyed(found: tuple[Any, ...], held: list[tuned.Row], fmt: str, shape: dict[str, Any]) -> bool:
    """Whether a fresh row names the variant and the numeric values of an outcome."""
    return any(
        row.variant == found[0]
        and (row.fmt, row.kind, row.head_dim) == (fmt, shape["kind"], shape["head_dim"])
        and row.source != "0"
        and row.made_with != OTHER
        and row.numeric.items() <= found[1].items()
        for row in held
    )


def test_a_choice_is_the_default_or_obeys_a_fresh_row(
    folder: Folder, added: None, tmp_path: Path
) -> None:
    registry.add(user_module(tmp_path))
    promoted = 0

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        nonlocal promoted
        folder.write(text=data.draw(files()))
        try:
            held = table.loaded(folder.file, KIND)
        except ValueError:
            held = []
        kinds = st.sampled_from([PREFILL, PREFILL, DECODE])
        shape = {"kind": data.draw(kinds), "n_q": data.draw(st.integers(1, 9))}
        fmt, shape["head_dim"] = data.draw(st.sampled_from([("q8_0", 64)] * 3 + [("f16", 24)]))
        config = data.draw(
            st.sampled_from([{}, {}, {"threads": 2}, {"block_m": 16}, {"block_m": 0}])
        )
        how: dict[str, Any] = {"fmt": fmt, "shape": shape, "config": config}
        taken = set()
        for op in ("attn_window", "attn_map"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MINFER_NO_TUNED", "1")
                default = outcome(op, **how)
            found = outcome(op, **how)
            by_row = found[-1] == f"the promoted row for {KIND}"
            assert obeyed(found, held, fmt, shape) if by_row else found == default
            taken.add(found[0] if by_row else "")
        assert len(taken) == 1  # both ops, or neither
        promoted += taken != {""}

    check()
    assert promoted > 0


@pytest.mark.parametrize("default", [0, "auto"])
def test_the_default_is_always_a_value(default: Any) -> None:
    (variant, *_) = [v for v in registry.variants("attn_window") if v.name == "flash"]
    before = dict(variant.space)
    variant.space["stages"] = Tunable(default, (2, 3) if default == 0 else ("some",))
    try:
        assert configure(variant, {"stages": default})["stages"] == default
        with pytest.raises(Refusal, match="stages"):
            configure(variant, {"stages": -1 if default == 0 else "other"})
        with pytest.raises(Refusal, match="is a bool"):
            configure(variant, {"stages": False})
    finally:
        variant.space.clear()
        variant.space.update(before)


def test_kinds_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_name", lambda: "AMD EPYC 9B45 (R)")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1}, raising=False)
    kind = machine._kind
    assert kind(CPU, ModuleType("any")) == "amd-epyc-9b45-r-2-cores"
    gpu = ModuleType("gpu")
    gpu.compute_capability = lambda: None
    assert kind(Device.parse("cuda"), gpu) == "triton-interpreter"
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    gpu.compute_capability = lambda: (9, 0)
    assert kind(Device.parse("cuda"), gpu) == "nvidia-h200"


def test_kinds_of_macs(monkeypatch: pytest.MonkeyPatch) -> None:
    mx = pytest.importorskip("mlx.core")
    kind = machine._kind
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert kind(Device.parse("metal"), ModuleType("any")) == "metal-simulator"
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M4 Max"})
    assert kind(Device.parse("metal"), ModuleType("any")) == "apple-m4-max"


def test_made_with_is_what_bits_depend_on() -> None:
    package = CPU.package()
    told, made = package.environment(), tuned.made_with(CPU)
    assert set(made) == {"numpy", *package.NUMERIC}
    assert all(made[name] == told[name] for name in package.NUMERIC)


def test_a_source_is_the_code_of_the_kernels_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = {name: registry.variants(name)[0] for name in ("attn_window", "silu_mul")}
    mine = user_module(tmp_path).attn_window_mine.__minfer_variant__

    def hashes() -> dict[str, str]:
        fresh = sources.source_of.__wrapped__
        return {**{name: fresh(v) for name, v in variants.items()}, "mine": fresh(mine)}

    before = hashes()
    assert before["attn_window"] == tuned.source_of(variants["attn_window"])
    assert len(set(before.values())) == 3 and all(len(h) == 16 for h in before.values())
    copy = tmp_path / "minfer"
    shutil.copytree(ROOT / "minfer" / "kernels_numba", copy / "kernels_numba")
    monkeypatch.setattr(sources, "ROOT", copy)
    assert hashes() == before
    changed = {"_softmax.py": {"attn_window", "mine"}, "_workers.py": {*before}, "q8_0.py": set()}
    for name, who in changed.items():
        text = (copy / "kernels_numba" / name).read_text()
        (copy / "kernels_numba" / name).write_text(text + "\n\n# more\n")
        assert hashes() == before
        (copy / "kernels_numba" / name).write_text(text + "MORE = 1\n")
        assert {op for op, one in hashes().items() if one != before[op]} == who
        (copy / "kernels_numba" / name).write_text(text)
    Path(mine.source[0]).write_text(MINE + "MORE = 1\n")
    assert {op for op, one in hashes().items() if one != before[op]} == {"mine"}


def test_a_source_follows_relative_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tmp_path / "minfer" / "kernels_numba"
    shutil.copytree(ROOT / "minfer" / "kernels_numba", kernels)
    monkeypatch.setattr(sources, "ROOT", kernels.parent)
    idea = user_module(kernels, name="attn_window__idea").attn_window_mine.__minfer_variant__

    def changed(name: str, text: str) -> bool:
        Path(idea.source[0]).write_text(text + MINE)
        fresh = sources.source_of.__wrapped__
        before, old = fresh(idea), (kernels / name).read_text()
        (kernels / name).write_text(old + "MORE = 1\n")
        after = fresh(idea)
        (kernels / name).write_text(old)
        return bool(before != after)

    for text in ("from .q8_0 import rows\n", "from . import q8_0\n"):
        assert changed("q8_0.py", text)
    assert not changed("q8_0.py", "from .. import q8_0\n")
    (tmp_path / "elsewhere").mkdir()
    mine = user_module(tmp_path / "elsewhere").attn_window_mine.__minfer_variant__
    Path(mine.source[0]).write_text("from ...far.away import x\n" + MINE)
    assert len(sources.source_of.__wrapped__(mine)) == 16


def test_a_source_that_is_gone_makes_a_row_stale(
    folder: Folder, added: None, tmp_path: Path
) -> None:
    module = user_module(tmp_path)
    registry.add(module)
    folder.write(row("mine", module="my_tuned", source="0"))
    tuned.source_of.cache_clear()
    Path(module.attn_window_mine.__minfer_variant__.source[0]).unlink()
    assert "the code of its kernels cannot be read" in choose().receipt.tuned[0]


def test_the_wheel_takes_the_files_along() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (*globs,) = project["tool"]["setuptools"]["package-data"]["minfer"]
    there = [path.relative_to(ROOT / "minfer") for path in table.FOLDER.glob("*")]
    data = [p.as_posix() for p in there if p.suffix != ".py" and p.name != "__pycache__"]
    for name in [*data, "tuned/nvidia-h200.json"]:
        assert any(fnmatch.fnmatchcase(name, glob) for glob in globs), name


def test_the_files_of_minfer_are_whole() -> None:
    for path in table.FOLDER.glob("*.json"):
        rows = table.loaded(path, path.stem)
        assert rows and path.read_text() == table.dumped(path.stem, rows)


PLAIN = """import os
SPACE = {"é": Tunable, "keys": Tunable}
class A:
    def f(self):
        return "# no comment", f"{os}#"
"""


def test_code_is_what_runs() -> None:
    text = '''"""What it
is."""  # of old

import os
SPACE = {"é": Tunable(1, (1, 2)), "keys": Tunable(
    4, (8,), numeric=True  # some (
)}
class A:  # é
    """Of (others)."""

    def f(self):
        """# What."""
        return "# no comment", f"{os}#"
'''
    assert code_of(text, ast.parse(text)) == "\n".join(
        line for line in PLAIN.splitlines() if line.strip()
    )
    other = text.replace("return", "yield")
    assert code_of(other, ast.parse(other)) != code_of(text, ast.parse(text))
