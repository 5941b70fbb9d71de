"""`minfer session advise`: what narrower caches do to a text, and which one is recommended."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from saved_sessions import engine_session, through, told_store
from tiny_models import write_tiny_gguf

from minfer import Engine, KvFormat, Refusal
from minfer.ops import DECODE, PREFILL
from minfer.perplexity import Versus, Window, measure, summarize
from minfer.perplexity.feeding import SEQ
from minfer.sessions import advice as module
from minfer.sessions import picture
from minfer.sessions.advice import Advice, Candidate, advise, by_layer, worst_heads
from minfer.sessions.deviation import Deviation
from minfer.sessions.wording import percent

NOVEL = Path(__file__).parent / "data" / "austen-persuasion.txt"
FORMATS = ("f16", "q8_0")


@pytest.fixture
def call(call):
    """`minfer session advise` in this process."""
    return functools.partial(call, "session", "advise")


@pytest.fixture
def saved(tiny_gguf: Path, tmp_path: Path) -> Path:
    engine_session(tiny_gguf, tmp_path / "e.kv")
    return tmp_path / "e.kv"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(NOVEL.read_text()[:400])
    return path


@pytest.mark.parametrize("kind", [PREFILL, DECODE])
def test_figures_are_those_of_the_oracle_and_of_ppl(
    call, tiny_gguf: Path, saved: Path, text: Path, kind: str
) -> None:
    flags = ("--decode",) if kind == DECODE else ()
    report = json.loads(call(tiny_gguf, saved, "--text", text, "--json", *flags).out)
    engine = Engine.load(tiny_gguf, cache_type="f32", n_ctx=512)
    ids = engine.encode(text.read_text())
    n = len(ids)
    assert (report["kind"], report["tokens"]) == (kind, n) and n > 200
    engines = [engine, engine.with_cache("f16"), engine.with_cache("q8_0")]
    for scores in measure(engines, ids, [Window(0, 1, n)], kind):
        rows = {(i, w): engine.store.export(SEQ, i, w) for i in range(2) for w in "kv"}
        results = summarize([scores])
    assert report["cache_bytes_f32"] == 2 * 2 * n * 64 * 4
    for found, fmt, result in zip(report["candidates"], FORMATS, results[1:], strict=True):
        assert found["cache_type"] == fmt and found["versus"] == vars(result.versus)
        for which in "kv":
            for layer in range(2):
                wide = rows[layer, which].astype(np.float64)
                away = through(rows[layer, which], fmt) - wide
                errors = np.sqrt((away**2).sum(axis=(0, 2)) / (wide**2).sum(axis=(0, 2)))
                told = found["relative_rms"][which][layer]
                np.testing.assert_allclose(told, errors, rtol=1e-12)
    sizes = [report["cache_bytes_f32"] / c["cache_bytes"] for c in report["candidates"]]
    assert sizes == pytest.approx([2.0, 256 / 68])


def test_logit_drift_is_the_largest_difference(tiny_gguf: Path) -> None:
    engine = Engine.load(tiny_gguf, cache_type="f32", n_ctx=32)
    ids = engine.encode("the cat hat, the hat cat")
    found = advise(engine, ids, DECODE)
    largest = {}
    for fmt in ("f32", *FORMATS):
        one = engine.with_cache(fmt)
        one.store.reserve(0, 32)
        largest[fmt] = np.stack([one.decode(token) for token in ids[:-1]])
    for candidate in found.candidates:
        assert candidate.versus is not None
        away = np.abs(largest[candidate.fmt.value] - largest["f32"]).max()
        assert candidate.versus.drift_max == away > 0
    assert engine.store.sequences() == []


def test_tokens_are_those_of_the_session(call, tiny_gguf: Path, saved: Path) -> None:
    with_state = json.loads(call(tiny_gguf, saved, "--json").out)
    engine = Engine.load(tiny_gguf, n_ctx=48)
    ids = engine.resume(saved).host["stream_tokens"]
    given = ",".join(map(str, ids))
    by_hand = json.loads(call(tiny_gguf, saved, "--tokens", given, "--json").out)
    assert with_state == by_hand and with_state["tokens"] == len(ids)
    fewer = json.loads(call(tiny_gguf, saved, "--max-tokens", 4, "--json").out)
    assert fewer["tokens"] == 4


def test_text_for_people(call, tiny_gguf: Path, saved: Path, text: Path) -> None:
    report = json.loads(call(tiny_gguf, saved, "--text", text, "--json").out)
    done = call(tiny_gguf, saved, "--text", text)
    lines = done.out.splitlines()
    assert done.code == 0 and lines[0] == f"{report['tokens']} tokens replayed by prefill with " + (
        tiny_gguf.name
    )
    _, q8_0 = report["candidates"]
    versus = q8_0["versus"]
    (line,) = [line for line in lines if line.startswith("q8_0")]
    agreed = percent(versus["top1_agreement"], 4)
    assert line.split()[3:] == [
        f"{versus['drift_max']:.3g}",
        f"{versus['kl_mean']:.2e}",
        f"{versus['kl_max']:.2e}",
        *agreed.split(),
    ]
    errors = np.array([q8_0["relative_rms"][which] for which in "kv"])
    which, layer, head = np.unravel_index(errors.argmax(), errors.shape)
    worst = f"  {'KV'[which]} of layer {layer}, head {head}: {100 * errors.max():.3g} %"
    assert lines[lines.index("worst heads with q8_0") + 1] == worst
    assert any(line.startswith(f"advice: {report['recommended']}") for line in lines)


def versus(kl_mean: float = 0.0, kl_max: float = 0.0, top1: float = 1.0) -> Versus:
    return Versus(1.0, None, kl_mean, kl_max, top1, 0.0, 0.0)


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({}, []),
        ({"kl_mean": 0.01, "kl_max": 1.0, "top1": 0.95}, []),
        ({"kl_mean": 0.02}, ["mean KL 0.02 nats a token, limit 0.01"]),
        ({"kl_max": 1.5}, ["largest KL 1.5 nats, limit 1.0"]),
        ({"top1": 0.9}, ["same likeliest token in 90.00 %, limit 95 %"]),
    ],
)
def test_what_speaks_against_a_format(figures: dict[str, float], told: list[str]) -> None:
    assert module._against(versus(**figures), {}) == told
    lost = Deviation(2)
    lost.lost = 3
    found = module._against(versus(**figures), {(0, "k"): lost})
    assert found == ["overflow in 3 elements of its rows", *told]


def test_the_smallest_format_that_nothing_speaks_against() -> None:
    def best(*against: tuple[str, ...]) -> KvFormat:
        named = zip((KvFormat.F16, KvFormat.Q8_0), against, strict=True)
        made = tuple(Candidate(fmt, 1, {}, None, why) for fmt, why in named)
        return Advice(9, 4, made).recommended

    assert best((), ()) is KvFormat.Q8_0
    assert best((), ("x",)) is KvFormat.F16
    assert best(("x",), ("x",)) is KvFormat.F32
    assert best(("x",), ()) is KvFormat.Q8_0


def test_limits_decide(call, tiny_gguf: Path, saved: Path, text: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "KL_MEAN", 0.0)
    done = call(tiny_gguf, saved, "--text", text)
    lines = done.out.splitlines()
    assert "advice: f32" in lines
    assert [line.split(":")[0] for line in lines[-2:]] == ["not f16", "not q8_0"]
    short = call(tiny_gguf, saved).out.splitlines()[-1]
    assert short.endswith(" tokens say little; a longer text says more")


def test_worst_heads_come_first(tiny_gguf: Path) -> None:
    engine = Engine.load(tiny_gguf, cache_type="f32", n_ctx=16)
    one = advise(engine, [5, 6, 7, 8], PREFILL).candidates[1]
    listed = worst_heads(one, 100)
    assert len(listed) == 2 * 2 * 2 and listed == sorted(listed, key=lambda x: -x[3])
    layer, which, head, error = listed[0]
    assert by_layer(one, which)[layer][head] == error
    assert worst_heads(one, 3) == listed[:3]


def test_heads_that_are_no_blocks(call, tmp_path: Path) -> None:
    model = tmp_path / "d16.gguf"
    write_tiny_gguf(model, head_dim=16, n_head=8, n_head_kv=4)
    told_store().store.save(tmp_path / "s.kv")
    done = call(model, tmp_path / "s.kv", "--tokens", "5,6,7,8")
    assert done.code == 0
    assert "not q8_0: a q8_0 cache needs head_dim and n_kv_embd in whole blocks" in done.out
    (line,) = [line for line in done.out.splitlines() if line.startswith("q8_0 ")]
    assert line.endswith("cannot be used")


def test_a_format_whose_logits_are_not_finite(
    call, tiny_gguf: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = module.scored_pieces

    def failing(engines, *more):
        for engine in engines:
            if engine.store.fmt is KvFormat.F16:
                raise Refusal("4.2", "logits are not finite with f16", {"fmt": "f16"})
        return scored(engines, *more)

    monkeypatch.setattr(module, "scored_pieces", failing)
    report = json.loads(call(tiny_gguf, saved, "--json").out)
    f16, q8_0 = report["candidates"]
    assert f16["versus"] is None and f16["against"] == ["logits are not finite with f16"]
    assert f16["relative_rms"] == {"k": [], "v": []}
    assert q8_0["versus"]["kl_mean"] > 0


def test_a_picture(call, tiny_gguf: Path, saved: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "heads.png"
    assert call(tiny_gguf, saved, "--plot", out).code == 0
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    again = call(tiny_gguf, saved, "--plot", out)
    assert again.code == 2 and "--force to replace it" in again.err
    assert call(tiny_gguf, saved, "--plot", tmp_path / "heads.jpg").code == 2
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    without = call(tiny_gguf, saved, "--plot", tmp_path / "x.png")
    assert without.code == 2 and "pip install 'minfer[bench]'" in without.err


def test_refusals(call, tiny_gguf: Path, saved: Path, tmp_path: Path) -> None:
    plain = tmp_path / "s.kv"
    told_store().store.save(plain)
    other = tmp_path / "other.gguf"
    write_tiny_gguf(other, seed=9)
    engine = Engine.load(tiny_gguf, n_ctx=8)
    engine.save(tmp_path / "odd.kv", {"stream_tokens": [1, "2"]})
    engine.save(tmp_path / "new.kv", {"stream_tokens": []})
    for argv, code, told in (
        ((tiny_gguf, plain), 2, "does not tell its tokens (stream_tokens in the host's state)"),
        ((tiny_gguf, tmp_path / "new.kv"), 2, "new.kv has no tokens; give --text or --tokens"),
        ((tiny_gguf, tmp_path / "odd.kv"), 3, "stream_tokens in its host part is no list of tok"),
        ((other, saved), 2, f"belongs to {tiny_gguf.name}"),
        ((tiny_gguf, saved, "--tokens", "5"), 2, "one token has nothing before it"),
        ((tiny_gguf, saved, "--tokens", "5,x"), 2, "--tokens '5,x' is no list of ids such as"),
        ((tiny_gguf, saved, "--tokens", "5,100000"), 2, "token 100000 is above"),
        ((tiny_gguf, saved, "--max-tokens", 1), 2, "--max-tokens 1 is below 2"),
        ((tiny_gguf, saved, "--text", tmp_path / "none"), 2, "cannot read the text from"),
        ((tiny_gguf, tmp_path / "none.kv"), 2, "does not exist; name a session file"),
    ):
        done = call(*argv)
        assert (done.code, done.out) == (code, "") and told in done.err, done.err


@pytest.mark.model
def test_smollm2_on_a_novel(call, smollm2: Path, tmp_path: Path) -> None:
    told_store().store.save(tmp_path / "s.kv")
    done = call(smollm2, tmp_path / "s.kv", "--text", NOVEL, "--max-tokens", 300, "--json")
    report = json.loads(done.out)
    f16, q8_0 = report["candidates"]
    assert report["recommended"] == "q8_0"
    assert 1e-5 < f16["versus"]["kl_mean"] < 1e-4 < q8_0["versus"]["kl_mean"] < 5e-3
    assert q8_0["versus"]["drift_max"] > f16["versus"]["drift_max"] > 0.01
    errors = np.array([q8_0["relative_rms"][which] for which in "kv"])
    assert errors.shape == (2, 30, 3) and 0.004 < errors.min() < errors.max() < 0.012
