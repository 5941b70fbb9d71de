"""Real models against transformers, with equal dequantized weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers_models import logits_in_transformers, read_in_transformers

from minfer import Batch, Engine
from minfer.models.gemma3 import attention_scale
from minfer.rope import Rope

pytestmark = pytest.mark.model

POSITIONS = 200
TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to
do: once or twice she had peeped into the book her sister was reading, but it had no pictures or
conversations in it, "and what is the use of a book," thought Alice "without pictures or
conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very
sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of
getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to
hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over
afterwards, it occurred to her that she ought to have wondered at this, but at the time it all
seemed quite natural)
"""  # Lewis Carroll, Alice's Adventures in Wonderland, 1865
# fmt: off
GEMMA_IDS = {  # those of the tokenizer that transformers builds from the same file
    "The capital of France is": [818, 5279, 529, 7001, 563],
    "   leading,   inner   and trailing   ":
        [139, 26016, 236764, 139, 3859, 139, 624, 45330, 139],
    "def f(x):\n    return x**2  # comment\n\n\n\tprint('a')\r\n":
        [2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 1018, 236778, 138, 236865, 5739,
         109, 255968, 1995, 1033, 236746, 1606, 251, 107],
    "日本語、한국어 العربية 🙂👍🏽": [94951, 236951, 114216, 237430, 87595, 57235, 240493, 242713],
    "<start_of_turn>user\nhi": [236820, 3041, 236779, 1340, 236779, 887, 236813, 2364, 107, 2202],
    "3.14 <html>\t\t\tÅngström \x00":
        [236800, 236761, 236770, 236812, 236743, 217, 255970, 239685, 829, 80406, 236743, 238],
}
# fmt: on


@pytest.fixture(scope="module")
def gemma(gemma3: Path) -> Engine:
    return load(gemma3)


def load(path: Path) -> Engine:
    """Nothing is rounded but to float32."""
    return Engine.load(path, weights="f32", cache_type="f32", n_ctx=256)


def assert_same_top_1(engine: Engine) -> None:
    """The most likely next token after each of 200 positions of the text."""
    tokens = engine.encode(TEXT)[:POSITIONS]
    assert len(tokens) == POSITIONS
    engine.store.reserve(0, POSITIONS)
    batch = Batch([0] * POSITIONS, list(range(POSITIONS)), "prefill", tokens)
    ours = engine.forward(batch, n_out=POSITIONS)
    engine.store.release(0)
    theirs = logits_in_transformers(read_in_transformers(engine._loaded.file), tokens)
    best, second = np.sort(theirs, axis=1)[:, -2:].T[::-1]
    differ = np.flatnonzero(ours.argmax(axis=1) != theirs.argmax(axis=1))
    assert not differ.size, f"top 1 differs at {differ}, margins {(best - second)[differ]}"
    # f32 sums in another order, and float64 rope tables here
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 1e-4


def test_smollm2_has_the_top_1_of_transformers(smollm2: Path) -> None:
    assert_same_top_1(load(smollm2))


def test_gemma3_has_the_top_1_of_transformers(gemma: Engine) -> None:
    assert_same_top_1(gemma)


def test_gemma3_by_its_metadata(gemma: Engine) -> None:
    hp = gemma.hp
    assert (hp.n_layer, hp.n_embd, hp.n_ff, hp.n_vocab) == (18, 640, 2048, 262144)
    assert (hp.n_head, hp.n_head_kv, hp.head_dim) == (4, 1, 256)
    assert gemma._graphs.widths == ([512] * 5 + [0]) * 3
    assert hp.rope == Rope(256, 1e6) and hp.sliding and hp.sliding.rope == Rope(256, 1e4)
    assert attention_scale(hp) == 1 / 16 and hp.logit_softcap == 0


def test_gemma3_goes_on_with_a_list(gemma: Engine) -> None:
    prompt = gemma.encode("Monday, Tuesday, Wednesday, Thursday,")
    made = list(gemma.generate(prompt, 6))
    assert gemma.tokenizer.decode(made) == " Friday, Saturday, Sunday,"


@pytest.mark.parametrize("text", GEMMA_IDS)
def test_gemma3_encodes_like_transformers(gemma: Engine, text: str) -> None:
    assert gemma.tokenizer.encode(text) == GEMMA_IDS[text]
    assert gemma.encode(text) == [2, *GEMMA_IDS[text]]
    assert gemma.tokenizer.decode(GEMMA_IDS[text]) == text
