"""The format gate: tables and examples of contract 3, literally."""

from __future__ import annotations

import pytest

from minfer.errors import Refusal
from minfer.format import KvFormat, Region, cell_bytes, cell_words, resolve

F32, F16, Q8_0 = KvFormat.F32, KvFormat.F16, KvFormat.Q8_0


@pytest.mark.parametrize(("text", "fmt"), [("f32", F32), ("f16", F16), ("q8_0", Q8_0)])
def test_parse_takes_exactly_three_words(text: str, fmt: KvFormat) -> None:
    assert KvFormat.parse(text) is fmt
    assert KvFormat.parse(fmt) is fmt


@pytest.mark.parametrize("text", ["Q8_0", "q8", " f16", "f16 ", "F32", "bf16", "auto", "", "0"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(Refusal, match="none of f32, f16, q8_0") as refused:
        KvFormat.parse(text)
    assert refused.value.rule == "3.1"
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("n", "f16", "q8_0"),
    [(1, 1, 9), (33, 17, 17), (64, 32, 17), (96, 48, 26), (128, 64, 34), (192, 96, 51)],
)
def test_cell_words(n: int, f16: int, q8_0: int) -> None:
    assert cell_words(F32, n) == n
    assert cell_words(F16, n) == f16
    assert cell_words(Q8_0, n) == q8_0
    assert cell_bytes(Q8_0, n) == 4 * q8_0


def test_cell_words_of_a_wide_model() -> None:
    assert cell_words(Q8_0, 1024) == 272
    assert cell_words(F16, 63) == 32


def ask(requested: str | None, **over: object) -> KvFormat:
    how = {"device_kind": "cpu", "n_layer": 32, "n_head_kv": 8, "head_dim": 128, **over}
    return resolve(requested, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("requested", [None, ""])
def test_auto_depends_on_device_and_width(requested: str | None) -> None:
    assert ask(requested) is F32
    assert ask(requested, device_kind="cuda") is F16
    assert ask(requested, device_kind="metal") is F16
    assert ask(requested, device_kind="cuda", n_layer=7) is F32  # 7 * 1024 < 8192
    assert ask(requested, device_kind="cuda", n_layer=8) is F16


@pytest.mark.parametrize("device", ["cpu", "cuda", "metal"])
@pytest.mark.parametrize("fmt", list(KvFormat))
def test_an_explicit_format_is_obeyed_on_every_device(device: str, fmt: KvFormat) -> None:
    assert ask(fmt.value, device_kind=device) is fmt


def test_q8_0_needs_whole_blocks() -> None:
    assert ask("q8_0", head_dim=96) is Q8_0
    with pytest.raises(Refusal, match="head_dim is 80") as refused:
        ask("q8_0", head_dim=80, n_head_kv=2)
    assert refused.value.rule == "3.3"
    assert refused.value.facts["head_dim"] == 80


def test_q8_0_needs_a_backend_that_reads_it() -> None:
    with pytest.raises(Refusal, match="cuda cannot read a q8_0 cache") as refused:
        ask("q8_0", device_kind="cuda", reads_packed_kv=False)
    assert refused.value.rule == "3.3"
    assert ask("f16", device_kind="cuda", reads_packed_kv=False) is F16


def test_region_knows_its_width() -> None:
    import numpy as np

    region = Region(Q8_0, "canonical", 3, 32, (np.zeros((5, 26 * 4), np.uint8),))
    assert (region.n_cells, region.row_elems, region.row_words) == (5, 96, 26)
    assert region.row_bytes == 104
