"""Choosing a variant: by name, by default, and with the reasons for every other one."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator

import pytest

from minfer import registry
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.kernels_numba.attn_window import attn_window_rows
from minfer.ops import DECODE, PREFILL, Limits, Shape, split_name, variant

DECODING = Shape(kind=DECODE)


@pytest.fixture(autouse=True)
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen where no sweep has said otherwise."""
    monkeypatch.setenv("MINFER_NO_TUNED", "1")


def choose(**how: object) -> registry.Choice:
    return registry.select("attn_window", **how)


@pytest.mark.parametrize("fmt", list(KvFormat))
def test_decode_takes_split_and_prefill_takes_flash(fmt: KvFormat) -> None:
    for head_dim in (64, 96, 128, 256):
        for kind, name in ((DECODE, "split"), (PREFILL, "flash")):
            shape = Shape(kind=kind, head_dim=head_dim)
            assert choose(fmt=fmt, shape=shape).variant.name == name


def test_the_number_of_queries_never_changes_the_choice() -> None:
    for kind in (DECODE, PREFILL):
        names = {choose(shape=Shape(kind=kind, n_q=n)).variant.name for n in (1, 2, 8, 500)}
        assert len(names) == 1


def test_odd_head_sizes_fall_to_rows_with_the_reason() -> None:
    receipt = choose(shape=Shape(kind=PREFILL, head_dim=24)).receipt
    assert receipt.variant == "rows"
    assert "head_dim 24" in dict(receipt.refused)["flash"]


def test_a_name_is_obeyed_or_refused() -> None:
    receipt = choose(variant="rows", shape=Shape(kind=DECODE)).receipt
    assert (receipt.variant, receipt.reason) == ("rows", "asked for by name")
    assert dict(receipt.refused)["split"] == "rows was asked for by name"
    with pytest.raises(Refusal, match="no variant 'fast' on cpu; there are rows, split, flash, sc"):
        choose(variant="fast")
    with pytest.raises(Refusal, match="is for prefill, not decode") as refused:
        choose(variant="flash", shape=Shape(kind=DECODE))
    assert refused.value.rule == "6.6"


def test_a_flag_that_a_device_cannot_obey_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.variants
    without = [v for v in known("attn_window") if v.name != "scratch"]
    monkeypatch.setattr(registry, "variants", lambda op, device: without)
    monkeypatch.setenv("MINFER_NO_FUSED_Q8_KV", "1")
    assert choose(fmt="f16").variant.name == "flash"
    assert choose(fmt="q8_0", variant="rows").variant.name == "rows"
    with pytest.raises(Refusal, match="MINFER_NO_FUSED_Q8_KV=1 asks for it, unset it"):
        choose(fmt="q8_0")


def test_unknown_ops_devices_and_tunables_are_refused() -> None:
    with pytest.raises(Refusal, match="op 'attn' is none of attn_window"):
        registry.select("attn")
    with pytest.raises(Refusal, match="device 'gpu' is none of cpu"):
        registry.select("attn_window", device="gpu")
    with pytest.raises(Refusal, match="no tunable block_q"):
        choose(config={"block_q": 3})


def test_config_overrides_only_what_is_named() -> None:
    config = choose(shape=Shape(kind=PREFILL), config={"block_m": 8, "threads": 1}).config
    assert (config["block_m"], config["threads"]) == (8, 1)


@pytest.mark.parametrize("value", ["8", 8.0, True, None, 0, -1])
@pytest.mark.parametrize("name", ["block_m", "threads"])
def test_a_value_of_another_type_or_below_one_is_refused(name: str, value: object) -> None:
    with pytest.raises(Refusal, match=f"{name} {value!r} of attn_window_flash") as refused:
        choose(shape=Shape(kind=PREFILL), config={name: value})
    assert refused.value.rule == "6.4"
    assert refused.value.facts["value"] is value


def test_what_equals_a_value_that_was_asked_before_is_refused_too() -> None:
    for value in (True, 1.0):
        choose(shape=Shape(kind=PREFILL), config={"block_m": 1})
        with pytest.raises(Refusal, match=f"block_m {value!r} of attn_window_flash is a"):
            choose(shape=Shape(kind=PREFILL), config={"block_m": value})


def test_threads_are_checked_where_an_op_has_no_use_for_them(mine: types.ModuleType) -> None:
    registry.add(mine)
    assert "threads" not in choose(variant="mine", shape=DECODING, config={"threads": 4}).config
    with pytest.raises(Refusal, match="threads 0 of"):
        choose(variant="mine", shape=DECODING, config={"threads": 0})


@pytest.mark.parametrize("fmt", ["q8_0", KvFormat.Q8_0])
def test_a_format_is_taken_by_name_too(fmt: str | KvFormat) -> None:
    assert registry.explain("attn_window", fmt=fmt).fmt == "q8_0"
    with pytest.raises(Refusal, match="cache type 'Q8_0'"):
        registry.explain("attn_window", fmt="Q8_0")


def test_receipt_names_the_source_relative_to_the_package() -> None:
    receipt = choose(shape=Shape(kind=DECODE)).receipt
    assert receipt.file == "minfer/kernels_numba/attn_window.py"
    text = str(receipt)
    assert f"{receipt.file}:{receipt.line}" in text
    assert "not rows: split comes later and takes it too" in text
    report = receipt.as_dict()
    assert report["refused"]["flash"].startswith("is for prefill")
    assert report["shape"]["kind"] == "decode" and json.loads(json.dumps(report)) == report


@pytest.fixture
def mine(added: None) -> Iterator[types.ModuleType]:
    """A user's module with one variant of its own."""
    module = types.ModuleType("mine")

    def attn_window_mine(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
        return 2 * attn_window_rows(
            q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width, config=config
        )

    attn_window_mine.__module__ = "mine"
    module.launch = variant(limits=Limits(kinds=(DECODE,)))(attn_window_mine)
    sys.modules["mine"] = module
    yield module
    del sys.modules["mine"]


def test_an_added_module_is_reachable_by_name_and_never_a_default(mine: types.ModuleType) -> None:
    before = choose(shape=Shape(kind=DECODE)).variant
    assert registry.add(mine) == ["attn_window_mine"]
    assert registry.add(mine) == ["attn_window_mine"]  # again: replaced, not doubled
    after = choose(shape=Shape(kind=DECODE))
    assert after.variant is before
    assert dict(after.receipt.refused)["mine"] == "is taken by name only"
    assert choose(variant="mine", shape=Shape(kind=DECODE)).launch is mine.launch


def test_variants_are_declared_where_their_device_is_not(
    mine: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add(mine)
    listed = registry.variants("attn_window")
    assert listed[-1].launch is mine.launch

    def absent(device: Device) -> types.ModuleType:
        raise Refusal("0.3", "it is not here")

    monkeypatch.setattr(Device, "package", absent)
    assert registry.declared("attn_window", "minfer.kernels_numba") == listed
    with pytest.raises(Refusal, match="it is not here"):
        registry.variants("attn_window")


def test_a_name_given_twice_is_refused(mine: types.ModuleType) -> None:
    registry.add(mine)
    other = types.ModuleType("other")
    other.launch = mine.launch
    mine.launch.__module__ = "other"
    with pytest.raises(Refusal, match="attn_window_mine is defined twice"):
        registry.add(other)


def test_a_module_without_variants_is_refused() -> None:
    with pytest.raises(Refusal, match="module empty holds no @variant function"):
        registry.add(types.ModuleType("empty"))


def test_function_names_give_op_and_variant() -> None:
    assert split_name("attn_window_split") == ("attn_window", "split")
    assert split_name("dot_q8_0_blocks") == ("dot_q8_0", "blocks")
    for name in ("attn_split", "attn_window_", "attn_window_two_words"):
        with pytest.raises(ValueError, match="not named <op>_<variant>"):
            split_name(name)


def test_the_decorator_holds_a_launcher_to_the_op_table() -> None:
    def matvec_wrong(x, weight, *, config):
        return x

    with pytest.raises(TypeError, match="must take"):
        variant()(matvec_wrong)
