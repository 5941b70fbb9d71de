"""Shapes, kinds, pairings and limits: what is no shape is refused where it is written down."""

from __future__ import annotations

from typing import Any

import pytest

from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops import DECODE, HALF, INTERLEAVED, PREFILL, Limits, Shape, check_pairing, split_name


@pytest.mark.parametrize(
    ("rule", "wrong", "word"),
    [
        ("1", {"kind": "foo"}, "'foo' is none of prefill, decode"),
        ("10", {"n_q": -1}, "n_q is -1"),
        ("10", {"n_head": 0}, "n_head is 0"),
        ("10", {"n_head_kv": 1.5}, "n_head_kv is 1.5"),
        ("10", {"head_dim": 0}, "head_dim is 0"),
    ],
)
def test_a_shape_of_another_kind_or_size_is_refused(
    rule: str, wrong: dict[str, Any], word: str
) -> None:
    with pytest.raises(Refusal) as caught:
        Shape(**wrong)
    assert caught.value.rule == rule and word in caught.value.message


def test_a_call_may_hold_no_query() -> None:
    assert Shape(DECODE, 0, 4, 2, 64).n_q == 0


def test_limits_say_what_they_do_not_take() -> None:
    limits = Limits(kinds=(DECODE,), head_dims=(64, 100), head_dim_multiple=16)
    assert limits.why_not(Shape(DECODE, head_dim=64)) is None
    assert limits.why_not(Shape(PREFILL)) == "is for decode, not prefill"
    assert limits.why_not(Shape(DECODE, head_dim=32)) == "head_dim 32 is not one of [64, 100]"
    assert limits.why_not(Shape(DECODE, head_dim=100)) == "head_dim 100 is no multiple of 16"
    assert Limits().why_not(Shape()) is None


def test_limits_of_a_gpu_of_groups_and_of_f32_cells() -> None:
    on_gpu = Limits(capability=(8, 0))
    assert on_gpu.why_not(Shape(), (9, 0)) is None and on_gpu.why_not(Shape(), (8, 0)) is None
    assert "8.0, and there is 7.5" in str(on_gpu.why_not(Shape(), (7, 5)))
    assert "none here" in str(on_gpu.why_not(Shape()))
    four = Limits(max_group=4)
    assert four.why_not(Shape(n_head=8, n_head_kv=2)) is None
    assert "4 query heads a KV head, not 5" in str(four.why_not(Shape(n_head=10, n_head_kv=2)))
    assert Limits(max_head_dim=256).why_not(Shape(head_dim=256)) is None
    assert "128 at most, not 256" in str(Limits(max_head_dim=128).why_not(Shape(head_dim=256)))
    short, long = Limits(max_head_dim_f32=128), Shape(head_dim=256)
    assert short.why_not(Shape(head_dim=128), fmt=KvFormat.F32) is None
    assert short.why_not(long, fmt=KvFormat.F16) is None
    assert "128 at most over f32 cells, not 256" in str(short.why_not(long, fmt=KvFormat.F32))


def test_two_pairings_are_known() -> None:
    check_pairing(HALF)
    check_pairing(INTERLEAVED)
    with pytest.raises(Refusal, match="'neox' is neither half nor interleaved") as caught:
        check_pairing("neox")
    assert caught.value.rule == "5.7"


def test_a_launcher_is_named_after_its_op() -> None:
    assert split_name("attn_window_split") == ("attn_window", "split")
    for name in ("attn_split", "attn_window_Split", "attn_window_two_words"):
        with pytest.raises(ValueError, match=f"{name} is not named <op>_<variant>"):
            split_name(name)
