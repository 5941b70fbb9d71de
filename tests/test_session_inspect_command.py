"""`minfer session inspect`: what it tells, and the map of the arena."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from saved_sessions import engine_session, header_changed, told_store
from stores import FORMATS

from minfer import kernels_numba
from minfer.commands.columns import printable
from minfer.commands.parser import build_parser
from minfer.commands.session_text import shades_of
from minfer.format import cell_bytes
from minfer.kv.runs import Counts, Entry, LastRow, Run, Share
from minfer.kv.session import host
from minfer.kv.session.reading import SessionFile
from minfer.kv.session.tables import Tables
from minfer.kv.session.writing import write
from minfer.kv.store import KvStore
from minfer.sessions import advice
from minfer.sessions.arena_map import ASCII, UNICODE, draw, legend
from minfer.sessions.description import runs as described_runs
from minfer.sessions.opening import verified
from minfer.sessions.progress import bar


@pytest.fixture
def call(call):
    """`minfer session` in this process."""
    return functools.partial(call, "session")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "store.kv"
    told_store().store.save(path, b"mine \x1b[2J")
    return path


@pytest.mark.parametrize("fmt", FORMATS)
def test_json_tells_what_the_store_holds(call, tmp_path: Path, fmt: str) -> None:
    store, path = told_store(fmt).store, tmp_path / "store.kv"
    store.save(path, b"mine")
    done = call("inspect", path, "--json")
    facts = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    width = cell_bytes(store.fmt, 64)
    assert facts["bytes"] == path.stat().st_size == sum(facts["sizes"].values())
    assert facts["sizes"]["rows"] == 2 * 2 * 9 * width and facts["sizes"]["host"] == 4
    assert facts["sizes"]["runs"] == 4 * 24 and facts["sizes"]["counters"] == 40
    wanted = {"cache_type": fmt, "backend": "cpu", "n_layer": 2, "n_ctx": 40, "n_rows": 9}
    wanted |= {"n_kv_embd": 64, "n_head_kv": 2, "head_dim": 32, "cell_bytes": width, "version": 2}
    assert facts.items() >= wanted.items()
    assert facts["model"] == {"name": "", "fingerprint": None, "hash": ""}
    assert facts["numerics"]["fingerprint"] == store.identity().numerics.hex()
    stats = vars_of(store)
    assert facts["cells"] == {name: stats[told] for name, told in CELLS.items()}
    assert facts["runs"] == [
        {"id": 0, "start": 0, "cap": 5, "rows": 5, "owner": None, "readers": [2, 3]},
        {"id": 3, "start": 5, "cap": 3, "rows": 0, "owner": 9, "readers": []},
        {"id": 1, "start": 10, "cap": 8, "rows": 3, "owner": 2, "readers": []},
        {"id": 2, "start": 18, "cap": 6, "rows": 1, "owner": 3, "readers": []},
    ]
    for seq in facts["sequences"]:
        assert seq["rows"] == store.written(seq["id"]) and seq["cap"] == store.cap(seq["id"])
        assert seq["spans"] == [list(span) for span in store.spans(seq["id"])]
        assert seq["last"] is None
    assert [seq["share"] for seq in facts["sequences"]] == [
        {"run": 0, "rows": 5},
        {"run": 0, "rows": 4},
        None,
    ]
    assert "state" not in facts and facts["host"] == {"bytes": 4, "version": None}


class Counted(dict[int, Entry]):
    """Sequences that count how often they are gone through."""

    walks = 0

    def items(self):
        self.walks += 1
        return super().items()


def test_readers_of_all_runs_are_found_in_one_walk() -> None:
    entries = Counted({0: Entry(0, 2)} | {n: Entry(n, 2, Share(0, 1)) for n in range(1, 50)})
    runs = {n: Run(n, 2 * n, 2, n) for n in range(50)}
    told = described_runs(Tables(100, runs, entries, Counts(), 50))
    assert told[0]["readers"] == list(range(1, 50)) and told[7]["readers"] == []
    assert entries.walks == 1


CELLS = {name: name for name in ("reserved", "orphaned", "written", "free_runs")}
CELLS |= {"free": "free_cells", "largest_free_run": "largest_free_run"}


def vars_of(store: KvStore) -> dict[str, int]:
    stats = store.stats()
    return {name: getattr(stats, name) for name in stats.__slots__}


MAP = """\
 0 ◇◇◇◇◇░░░··███░░░░░█░░░░░················
   00000333  11111111222222"""


def test_text_shows_runs_sequences_and_the_map(call, saved: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = call("inspect", saved)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == f"{saved}: session of version 2, 9.6 KiB"
    assert "0    0-4    5     orphan  seq 2, seq 3" in lines
    assert "1    10-17  3     seq 2   -" in lines
    assert "2    8     13   0-4, 10-17  5 rows of run 0  -" in lines
    assert done.out.rstrip().endswith(f"map, a cell each; {BELOW}\n{legend(UNICODE)}\n{MAP}")
    assert "mine" not in done.out


BELOW = "below a run's number, its last digit of 36"


def test_facts_of_the_machine_are_shown(call, tiny_gguf: Path, tmp_path: Path) -> None:
    facts = engine_session(tiny_gguf, tmp_path / "e.kv").store.identity().facts
    names = (
        "device",
        "cache type",
        "weights",
        "activations",
        "numpy",
        *kernels_numba.NUMERIC,
        "source",
    )
    told = ", ".join(f"{name} {facts[name]}" for name in names)
    assert f"           {told}" in call("inspect", tmp_path / "e.kv").out.splitlines()


def test_host_is_shown_on_demand(call, saved: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    shown = call("inspect", saved, "--host").out
    assert shown.endswith("\nhost: mine \\x1b[2J\n")  # a terminal does not obey it
    assert json.loads(call("inspect", saved, "--host", "--json").out)["state"] == "mine \x1b[2J"
    engine = engine_session(tiny_gguf, tmp_path / "e.kv")
    found = json.loads(call("inspect", tmp_path / "e.kv", "--host", "--json").out)
    assert found["host"]["version"] == 1
    assert found["model"]["name"] == tiny_gguf.name
    assert found["model"]["hash"] == engine.model_hash
    assert found["numerics"]["facts"] == engine.store.identity().facts
    tokens = found["state"]["stream_tokens"]
    assert len(tokens) == engine.store.written(0)
    last = found["sequences"][0]["last"]
    assert (last["token"], last["kind"]) == (tokens[-1], "decode")
    kept = engine.store.tables.known(0).last
    assert kept is not None and last["logits"] == f"{kept.logits:016x}"
    assert found["sequences"][1]["last"]["kind"] == "prefill"
    assert found["sequences"][2]["last"] is None
    text = call("inspect", tmp_path / "e.kv", "--host").out
    assert text.endswith(f"state of the host\n  stream_tokens: {json.dumps(tokens)}\n")


def test_an_output_without_these_characters_gets_ascii() -> None:
    assert shades_of("utf-8") == shades_of("UTF8") == UNICODE
    assert shades_of("ascii") == shades_of(None) == shades_of("latin-1") == ASCII
    assert shades_of("no such encoding") == ASCII
    assert "".join(ASCII).isascii() and len(set(ASCII)) == len(set(UNICODE)) == 6
    assert printable("a\tb\x9b") == "a\\tb\\x9b"


def test_a_narrow_map_has_lines(call, saved: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    done = call("inspect", saved)
    assert done.out.splitlines()[-4:] == [
        " 0 ◇◇◇◇◇░░░··███░░░░░█░░",
        "   00000333  11111111222",
        "21 ░░░················",
        "   222",
    ]


TABLES = Tables(
    120,
    {
        0: Run(0, 0, 12, 1),
        1: Run(1, 12, 8, None),
        2: Run(2, 24, 12, 2),
        39: Run(39, 40, 80, 3),
    },
    {
        1: Entry(0, 10),
        2: Entry(2, 12, Share(1, 8)),
        3: Entry(39, 6, None, LastRow(5, "decode", 7)),
    },
    Counts(),
    40,
)


def test_a_character_may_stand_for_many_cells() -> None:
    found = draw(TABLES, 5, ASCII)
    assert found.per == 6
    assert [line.cell for line in found.lines] == [0, 30, 60, 90]
    # 6-11 has 4 written, 12-17 and 2 of 18-23 are orphaned, 24-29 has 4 written, 42-47 too
    assert [line.held for line in found.lines] == ["#=o.=", "_.=__", "_____", "_____"]
    assert [line.runs for line in found.lines] == ["001 2", "2 333", "33333", "33333"]
    one = draw(TABLES, 200, UNICODE)
    assert one.per == 1 and len(one.lines) == 1
    assert one.lines[0].held == "█" * 10 + "░░" + "◇" * 8 + "····" + "████" + "░" * 8 + "····" + (
        "█" * 6 + "░" * 74
    )
    assert set(one.lines[0].runs) == {"0", "1", "2", "3", " "}
    assert draw(TABLES, 0, ASCII).per == 30


def test_empty_and_full_arenas() -> None:
    empty = draw(Tables(7, {}, {}, Counts(), 0), 80, ASCII)
    assert empty.lines == [(0, ".......", "")]
    full = draw(Tables(2, {35: Run(35, 0, 2, 4)}, {4: Entry(35, 2)}, Counts(), 36), 80, ASCII)
    assert full.lines == [(0, "##", "zz")]
    less = Tables(8, {0: Run(0, 0, 8, 4)}, {4: Entry(0, 3)}, Counts(), 1)
    found = draw(less, 1, UNICODE)
    assert found == (2, [(0, "█", "0"), (2, "▓", "0"), (4, "░", "0"), (6, "░", "0")])
    partly = Tables(12, {0: Run(0, 0, 2, 4), 1: Run(1, 3, 1, 5)}, {4: Entry(0, 2)}, Counts(), 2)
    assert [line.held for line in draw(partly, 1, ASCII).lines] == ["#", ".", ".", "."]


def test_a_huge_arena_takes_no_memory(call, saved: Path) -> None:
    with SessionFile(saved) as file:
        file.verify()
        tables = Tables(2**31 - 1, {0: Run(0, 2**30, 2**30 - 1, 5)}, {5: Entry(0)}, Counts(), 1)
        header = replace(file.header, n_ctx=2**31 - 1, host_bytes=0, **tables.sizes())
    write(saved, header, tables, b"", [])
    facts = json.loads(call("inspect", saved, "--json").out)
    assert facts["cells"]["free"] == 2**30 and facts["cells"]["reserved"] == 2**30 - 1
    assert call("inspect", saved).code == 0


def test_what_is_no_sound_session_is_refused(call, saved: Path, tmp_path: Path) -> None:
    missing = call("inspect", tmp_path / "none.kv")
    assert missing.code == 2 and "none.kv does not exist; name a session file" in missing.err
    header_changed(saved, n_rows=8)
    assert call("inspect", saved).code == 3
    data = bytearray(told_bytes(tmp_path))
    data[300] ^= 1
    saved.write_bytes(data)
    broken = call("inspect", saved, "--json")
    assert (broken.code, broken.out) == (3, "") and "checksum" in broken.err
    other = tmp_path / "text.kv"
    other.write_text("hello")
    assert call("inspect", other).code == 3
    assert call("inspect", tmp_path).code == 2


def told_bytes(folder: Path) -> bytes:
    told_store().store.save(folder / "again.kv")
    return (folder / "again.kv").read_bytes()


def test_text_that_no_encoding_spells(call, tiny_gguf: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "e.kv", tmp_path / "out.kv"
    engine = engine_session(tiny_gguf, path)
    packed = host.pack("m\x9b", "", {}, {"name": "AB"}).replace(b"AB", b"\\ud800\\u0007")
    engine.store.save(path, packed)
    shown = call("inspect", path, "--host")
    assert shown.code == 0 and shown.out.endswith('  name: "\\ud800\\u0007"\n')
    assert "\x9b" not in shown.out
    assert call("transcode", path, out, "--cache-type", "f16").code == 0
    facts = json.loads(call("inspect", out, "--json", "--host").out)
    assert facts["state"] == {"name": "\ud800\x07"} and facts["model"]["name"] == "m?"


def test_names_of_files_do_not_steer_a_terminal(call, saved: Path, tiny_gguf: Path) -> None:
    odd = saved.with_name("a\x1b[2J\nb.kv")
    engine_session(tiny_gguf, odd)
    out, rows, copy = (odd.with_name(f"{n}\x1b\n{end}") for n, end in enumerate(ENDS))
    for argv in (
        ("inspect", odd),
        ("verify", odd),
        ("verify", odd, "--model-hash", tiny_gguf),
        ("diff", odd, odd),
        ("diff", odd, saved),
        ("extract", odd, "--seq", 0, "-o", rows),
        ("extract", odd, "--seq", 0, "-o", copy),
        ("transcode", odd, out, "--n-ctx", 90),
    ):
        done = call(*argv)
        assert done.code in (0, 1) and "\\x1b" in done.out and "\x1b" not in done.out + done.err
        assert "\\n" in done.out.splitlines()[0]
    for argv in (
        *(("inspect", odd.with_name("no\x1b.kv")), ("transcode", odd, odd, "--n-ctx", 90)),
        ("extract", odd, "--seq", 9, "-o", odd.with_name("c.kv")),
    ):
        done = call(*argv)
        assert done.code == 2 and "\\x1b" in done.err and "\x1b" not in done.err


ENDS = (".kv", ".npz", "of one.kv")


def test_a_bar_counts_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (True, False):
        with bar(300, "working", " rows", show=show) as update:
            update(300)
    shown = capsys.readouterr().err
    assert shown.count("working:   0%") == 1 and "/300 [" in shown


def test_help_has_examples(call) -> None:
    for tool in ("inspect", "verify", "diff", "extract", "transcode", "advise"):
        done = call(tool, "--help")
        assert done.code == 0 and f"minfer session {tool} " in done.out.split("examples:")[1]
    assert "2 refused, 3 damaged" in call("--help").out
    assert call().code == 2


PAGE = Path(__file__).parent.parent / "docs" / "session-tools.md"


def test_the_page_shows_commands_that_exist_and_names_every_option() -> None:
    text, parser = PAGE.read_text(), build_parser()
    shown = re.findall(r"^\$ minfer (session .*)$", text, re.MULTILINE)
    assert {parser.parse_args(line.split()).command for line in shown} == {
        *("session.inspect", "session.verify", "session.diff", "session_advise.advise_session"),
        *("session_files.extract_sequence", "session_files.transcode_file"),
    }
    for line in shown:
        options = vars(parser.parse_args(line.split()))
        for name in options.keys() - {"command", "file", "model", "output", "a", "b"}:
            assert f"--{name.replace('_', '-')}" in text, name


def run_example(call: str) -> None:
    """The Python of the page that has `call` in it."""
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (example,) = [text for text in examples if call in text]
    exec(compile(example, PAGE.name, "exec"), {})


@pytest.mark.model
@pytest.mark.usefixtures("smollm2")
def test_the_file_of_the_page_is_made_as_it_says(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")
    run_example("engine.save")
    (shown,) = re.findall(r"inspect slots\.kv\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found, told = (of_no_machine(text) for text in (call("inspect", "slots.kv").out, shown))
    assert found == told and len(found) == 18


def of_no_machine(text: str) -> list[str]:
    """The lines of a description below those that tell machines apart, without logits."""
    lines = re.sub(r"logits \w+", "", text).splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("  cells ")) :]


def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_example("store.save")
    assert capsys.readouterr().out == "32\nTrue\n"
    with verified("long.kv") as file:
        assert file.header.n_ctx == 128


def test_limits_on_the_page_are_those_of_the_code() -> None:
    told = "mean KL of at most 0.01 nats a token, no token above 1, the same likeliest "
    told += "token in at least 95 %"
    assert told in " ".join(PAGE.read_text().split())
    assert (advice.KL_MEAN, advice.KL_MAX, advice.TOP1) == (0.01, 1.0, 0.95)
