"""Promoted rows: which are taken, which are not and where that is said, and what never changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tuned_rows import CPU, MINE, OTHER, Folder, choose, row, user_module

from minfer import numerics, registry, tuned
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops import DECODE, PREFILL, Shape
from minfer.receipt import Receipt
from minfer.tuned import choosing

ROOT = Path(__file__).parent.parent
PACKAGE = "minfer.kernels_numba"
KIND = tuned.device_kind(CPU)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


@pytest.fixture
def mine(tmp_path: Path, added: None) -> ModuleType:
    """A user's module with numeric and free tunables, added."""
    module = user_module(tmp_path)
    registry.add(module)
    return module


def chosen(**how: Any) -> tuple[str, int]:
    choice = choose(**how)
    return choice.variant.name, choice.block_m


def test_a_row_decides_and_the_receipt_says_so(folder: Folder, capsys: Capture) -> None:
    assert chosen() == ("flash", 32)
    folder.write(row(free={40: {"block_m": 8}}))
    choice = choose()
    assert (choice.variant.name, choice.block_m) == ("flash", 8)
    receipt = choice.receipt
    assert receipt.reason == f"the promoted row for {KIND}"
    proof = "attn_window 1.08 times as fast as the default (1.05 to 1.11), 2026-11-30"
    assert receipt.tuned == (f"{proof}, commit 98bdcc5aa",)
    assert f"\n  tuned     {proof}, commit 98bdcc5aa\n" in str(receipt)
    assert json.loads(json.dumps(receipt.as_dict())) == receipt.as_dict()
    assert receipt.as_dict()["tuned"] == [*receipt.tuned]
    assert "flash" not in dict(receipt.refused)
    assert capsys.readouterr().err == ""


def test_explain_prints_it(folder: Folder, call: Callable[..., Any]) -> None:
    folder.write(row(free={40: {"block_m": 8}}))
    asked = ("explain", "attn_window", "--fmt", "q8_0", "--n-q", 40)
    assert "  tuned     attn_window 1.08 times as fast" in call(*asked).out
    assert json.loads(call(*asked, "--json").out)["config"]["block_m"] == 8


def test_devices_names_the_kind(call: Callable[..., Any]) -> None:
    assert f"  cpu    yes kind {KIND}, numba " in call("devices").out
    assert json.loads(call("devices", "--json").out)["devices"]["cpu"]["kind"] == KIND


def test_a_row_reaches_what_is_no_default(folder: Folder, mine: ModuleType) -> None:
    folder.write(
        row("scratch"), row("rows", kind=DECODE), row("mine", module="my_tuned", head_dim=96)
    )
    receipt = choose().receipt
    assert receipt.variant == "scratch"
    assert dict(receipt.refused)["flash"] == "the promoted row names scratch"
    assert choose(shape={"kind": DECODE}).variant.name == "rows"
    assert choose(shape={"head_dim": 96}).launch is mine.attn_window_mine
    assert choose("attn_map", shape={"head_dim": 96}).launch is mine.attn_map_mine


def test_an_experiment_of_the_tree_is_reached_too(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, table = user_module(tmp_path, name="attn_window__idea"), registry.collect(PACKAGE)
    extra = {v.op: (*table[v.op], v) for v in registry.variants_of(module)}
    for variants in extra.values():
        variants[-1].launch.__module__ = f"{PACKAGE}.attn_window__idea"
    monkeypatch.setattr(registry, "collect", lambda package: {**table, **extra})
    assert dict(choose().receipt.refused)["mine"] == "is taken by name only"
    folder.write(row("mine"))
    assert choose().launch is module.attn_window_mine


@pytest.mark.parametrize(
    ("other", "of_call"),
    [
        ({"head_dim": 128}, {}),
        ({"format": "f16"}, {}),
        ({"kind": DECODE, "variant": "split"}, {}),
        ({}, {"variant": "flash"}),
    ],
)
def test_another_question_is_not_answered(
    folder: Folder, other: dict[str, Any], of_call: dict[str, Any]
) -> None:
    folder.write(row(free={40: {"block_m": 8}}) | other)
    choice = choose(**of_call)
    assert (choice.block_m, choice.receipt.tuned) == (32, ())


def test_free_values_follow_the_number_of_queries(folder: Folder) -> None:
    folder.write(row(free={64: {"block_m": 64}, 8: {"block_m": 8}, 16: {}}))
    wanted = {0: 32, 1: 32, 2: 8, 8: 8, 11: 8, 12: 32, 31: 32, 33: 64, 256: 64, 257: 32}
    assert {n: choose(shape={"n_q": n}).block_m for n in wanted} == wanted


def test_a_family_shares_variant_and_numeric_values(folder: Folder, mine: ModuleType) -> None:
    first = row("mine", {40: {"stages": 3}}, module="my_tuned", numeric={"block_n": 32})
    folder.write(first)
    assert choose().config == {"threads": 1, "block_n": 32, "stages": 3}
    other = choose("attn_map")
    assert other.launch is mine.attn_map_mine
    assert other.config == {"threads": 1, "block_n": 32, "stages": 2}
    assert other.receipt.tuned[0].startswith("attn_window 1.08 times")
    folder.write(first | {"free": [{"n_q": 1, "config": {}}]}, first | {"op": "attn_map"}
                 | {"source": tuned.source_of(other.variant)})  # fmt: skip
    assert choose("attn_map").config["stages"] == 3
    assert choose().config["stages"] == 2


def test_rows_that_disagree_are_not_taken(
    folder: Folder, mine: ModuleType, capsys: Capture
) -> None:
    first = row("mine", module="my_tuned", numeric={"block_n": 32})
    for other in (
        row("rows", op="attn_map"),
        row("mine", op="attn_map", module="my_tuned", numeric={"block_n": 16}),
        row("mine", module="my_tuned"),  # the default 0 is another value
    ):
        folder.write(first, other)
        for op in ("attn_window", "attn_map"):
            receipt = choose(op).receipt
            assert receipt.variant == "flash"
            assert "disagree, and their bits must not (contract 6.1)" in receipt.tuned[0]
        assert capsys.readouterr().err.count("disagree") == 1
    folder.write(first, row("mine", op="attn_map", module="my_tuned", numeric={"block_n": 32}))
    assert choose("attn_map").variant.name == "mine"
    default = row("mine", op="attn_map", module="my_tuned", numeric={"block_n": 0})
    folder.write(row("mine", module="my_tuned"), default)
    assert choose("attn_map").config["block_n"] == choose().config["block_n"] == 0
    assert choose("attn_map").variant.name == "mine"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"source": "0123456789abcdef"}, "the code of its kernels was another"),
        ({"made_with": {**tuned.made_with(CPU), "numba": "0.1"}},
         f"numba 0.1 then, {tuned.made_with(CPU)['numba']} now"),
        ({"made_with": {**tuned.made_with(CPU), "new": "1"}}, "new 1 then, absent now"),
    ],
)  # fmt: skip
def test_a_stale_row_is_not_taken_and_said_once(
    folder: Folder, capsys: Capture, other: dict[str, Any], said: str
) -> None:
    folder.write(row(free={1: {"block_m": 8}}) | other)
    line = f"the tuned row of attn_window q8_0 prefill d64 ({KIND}) is stale: {said}"
    line += "; run `python -m tuning sweep --op attn_window --device cpu --fmt q8_0`"
    for n_q in (1, 2):
        choice = choose(shape={"n_q": n_q})
        assert choice.block_m == 32 and choice.receipt.tuned == (line,)
        assert choice.receipt.reason == "the default for this shape"
        assert f"  tuned     {line}" in str(choice.receipt)
    assert capsys.readouterr().err == f"minfer: {line}\n"


def test_the_fresh_one_of_several_is_taken_without_a_word(folder: Folder, capsys: Capture) -> None:
    stale = row(free={40: {"block_m": 64}}) | {"made_with": OTHER}
    folder.write(stale, row(free={40: {"block_m": 8}}), row(free={1: {"block_m": 16}}))
    choice = choose()
    assert choice.block_m == 8 and len(choice.receipt.tuned) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"variant": "fast"}, "names a variant fast, and there is none"),
        ({"numeric": {"block_m": 8}}, "names a numeric tunable block_m, and there is none"),
        ({"free": [{"n_q": 1, "config": {"block_q": 8}}]}, "names a free tunable block_q, and"),
        ({"free": [{"n_q": 1, "config": {"threads": 1}}]}, "names a free tunable threads, and"),
        ({"free": [{"n_q": 9, "config": {"block_m": 7}}]}, "names block_m=7, which is no value"),
        ({"free": [{"n_q": 9, "config": {"block_m": 8.0}}]}, "names block_m=8.0, which is no"),
    ],
)
def test_a_row_that_names_what_is_not_there(
    folder: Folder, capsys: Capture, other: dict[str, Any], said: str
) -> None:
    folder.write(row() | other)
    receipt = choose().receipt
    assert (receipt.variant, receipt.config["block_m"]) == ("flash", 32)
    assert said in receipt.tuned[0]
    choose(shape={"n_q": 3})
    assert capsys.readouterr().err.count(said) == 1


def test_a_module_that_is_not_added_is_named(
    folder: Folder, added: None, tmp_path: Path, capsys: Capture
) -> None:
    module = user_module(tmp_path)
    registry.add(module)
    folder.write(row("mine", module="my_tuned"))
    assert choose().variant.name == "mine"
    registry._added.clear()
    receipt = choose().receipt  # the choice above is not remembered
    assert receipt.variant == "flash"
    assert "is for my_tuned; minfer.registry.add makes it known" in receipt.tuned[0]
    registry.add(module)
    for name in ("another", ""):
        folder.write(row("mine", module=name), row(free={40: {"block_m": 8}}))
        assert chosen() == ("flash", 8)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("attn_map_mine", "attn_map_other", "attn_map has none with equal bits (contract 6.1)"),
        ("@variant(space=SPACE)\ndef attn_map", "@variant()\ndef attn_map", "equal bits"),
        ("(space=SPACE)", "(space=SPACE, invariant=False)", "is not invariant and taken by name"),
    ],
)
def test_a_row_cannot_break_invariance(
    folder: Folder, added: None, tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in MINE
    registry.add(user_module(tmp_path, MINE.replace(old, new)))
    folder.write(row("mine", module="my_tuned"))
    receipt = choose().receipt
    assert receipt.variant == "flash" and said in receipt.tuned[0]


def test_limits_win_over_a_row(folder: Folder, capsys: Capture) -> None:
    folder.write(row(head_dim=24, format="f32"), row("split"))
    receipt = choose(fmt="f32", shape={"head_dim": 24}).receipt
    assert receipt.variant == "rows"
    assert "not the promoted flash: head_dim 24 is no multiple of" in receipt.tuned[0]
    receipt = choose().receipt
    assert receipt.variant == "flash"
    assert receipt.tuned == ("not the promoted split: is for decode, not prefill",)
    assert capsys.readouterr().err == ""


def test_what_a_call_asks_for_wins(folder: Folder, mine: ModuleType) -> None:
    folder.write(row(free={40: {"block_m": 8}}), row("rows", head_dim=96))
    config = choose(config={"block_m": 64, "threads": 1}).config
    assert config == {"block_m": 64, "threads": 1}
    receipt = choose(shape={"head_dim": 96}, config={"block_m": 64}).receipt
    assert (receipt.variant, receipt.config["block_m"]) == ("flash", 64)
    assert receipt.tuned[0].startswith("not the promoted rows: attn_window_rows has no tunable")
    with pytest.raises(Refusal, match="block_m 0 of attn_window_flash is below 1"):
        choose(config={"block_m": 0})


def test_flags_win_over_a_row(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(row("rows"))
    assert choose().variant.name == "rows"
    monkeypatch.setenv("MINFER_NO_TUNED", "1")
    assert choose().variant.name == "flash"
    monkeypatch.setenv("MINFER_NO_TUNED", "yes")
    with pytest.raises(Refusal, match="MINFER_NO_TUNED='yes'"):
        choose()
    monkeypatch.setenv("MINFER_NO_TUNED", "0")
    monkeypatch.setenv("MINFER_NO_FUSED_Q8_KV", "1")
    assert choose().variant.name == "scratch"


def test_ops_without_formats_and_heads_have_one_key(folder: Folder) -> None:
    plain = {"format": "", "head_dim": 0, "variant": "rows"}
    names = {op: registry.variants(op)[0].name for op in ("silu_mul", "matvec")}
    folder.write(
        row(names["silu_mul"], op="silu_mul") | plain | {"variant": names["silu_mul"]},
        row(names["matvec"], op="matvec", head_dim=0, kind=DECODE),
    )
    for shape in (Shape(PREFILL), Shape(PREFILL, head_dim=128)):
        assert registry.select("silu_mul", fmt="f16", shape=shape).receipt.tuned
        assert registry.select("matvec", fmt="q8_0", shape=shape).receipt.tuned
    assert not registry.select("silu_mul", shape=Shape(DECODE)).receipt.tuned
    assert not registry.select("matvec", fmt="f16").receipt.tuned


def test_the_fingerprint_follows_numeric_values_and_not_free_ones(
    folder: Folder, mine: ModuleType, tmp_path: Path
) -> None:
    def facts() -> dict[str, str]:
        return numerics.facts(CPU, KvFormat.Q8_0, n_head=2, n_head_kv=2, head_dim=64)

    def write(**other: Any) -> dict[str, str]:
        folder.write(row("mine", module="my_tuned", **other))
        return facts()

    plain = facts()
    first = write(numeric={"block_n": 16})
    assert first["attn_window q8_0 prefill"].startswith("mine block_n=16 ")
    assert first["attn_window q8_0 decode"] == plain["attn_window q8_0 decode"]
    assert first["attn_map q8_0 prefill"] == first["attn_window q8_0 prefill"].replace(
        "window", "map"
    )
    assert numerics.fingerprint(write(numeric={"block_n": 32})) != numerics.fingerprint(first)
    assert write(numeric={"block_n": 16}, free={1: {"stages": 3}}) == first
    folder.write(row(free={1: {"block_m": 8}}))
    assert facts() == plain
    registry.add(user_module(tmp_path, MINE + "OTHER = 1\n"))
    assert write(numeric={"block_n": 16}) != first


def test_nothing_is_hashed_or_asked_where_no_row_matches(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(given: object) -> None:
        raise AssertionError(f"{given} was looked at")

    folder.write(row("rows"))
    for name in ("source_of", "made_with"):
        monkeypatch.setattr(choosing, name, never)
    assert choose(fmt="f16").variant.name == "flash"
    with pytest.raises(AssertionError, match="was looked at"):
        choose()


LIGHT = """
import sys, minfer
assert "minfer.tuned" not in sys.modules
from minfer.ops import Shape
minfer.explain("attn_window", shape=Shape(head_dim=16))
import numba
try:
    numba.threading_layer()
except ValueError:
    print("no pool", "torch" in sys.modules)
"""


def test_a_choice_starts_no_thread_pool() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("no pool False\n", "")


def test_a_stderr_that_is_gone_is_no_error(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder.write(text="{")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        receipt: Receipt = choose().receipt
    assert receipt.variant == "flash" and receipt.tuned
    assert capsys.readouterr().out == ""  # where `print` would put it
