"""Each architecture: logits of transformers, and the same bits however a batch is made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import ARCHITECTURES, write_tiny_gguf
from transformers_models import logits_in_transformers, write_tiny_model

from minfer import Batch, Engine
from minfer.errors import Damaged, Refusal
from minfer.format import Floats, KvFormat
from minfer.models import gemma3
from minfer.models.architecture import MODULES, find_architecture
from minfer.models.gguf import open_gguf
from minfer.models.hyperparameters import Hyperparameters
from minfer.rope import Llama3, Rope

PROMPT, LENGTH = 70, 100  # the rest is decoded; a window is 16 wide
TOKENS = [int(t) for t in np.random.default_rng(5).integers(3, 289, LENGTH)]


def load(path: Path, cache_type: str = "f32", **how: Any) -> Engine:
    return Engine.load(path, cache_type=cache_type, **{"n_ctx": 256, "threads": 2, **how})


def feed(engine: Engine, tokens: list[int], chunk: int = 33, seq: int = 0) -> Floats:
    """Logits of every token: `PROMPT` of them as a prompt in chunks, the others one by one."""
    if not engine.store.has(seq):
        engine.store.reserve(seq, LENGTH)
    rows, at = [], 0
    while at < len(tokens):
        kind = "prefill" if at < PROMPT else "decode"
        n = min(chunk, PROMPT - at) if kind == "prefill" else 1
        batch = Batch([seq] * n, list(range(at, at + n)), kind, tokens[at : at + n])
        rows.append(engine.forward(batch, n_out=n))
        at += n
    return np.concatenate(rows)


def assert_agree(ours: Floats, theirs: Floats, bound: float = 1e-4) -> None:
    # f32 sums in another order, and float64 rope tables here.
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < bound
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).all()


SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"n_head": 6, "n_embd": 96},
    "qwen3": {"head_dim": 16},
    "gemma3": {"n_layer": 7, "n_head_kv": 1},  # the sixth layer has no window
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    path = tmp_path / "m.gguf"
    model = write_tiny_model(path, architecture=architecture, tied=tied, **SIZES[architecture])
    ours = feed(load(path), TOKENS)
    assert_agree(ours, logits_in_transformers(model, TOKENS))
    assert len(set(ours.argmax(axis=1))) > 50


@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_narrow_formats_stay_close_to_f32(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "m.gguf"
    sizes = SIZES[architecture] | {"head_dim": 32}
    n_layer = write_tiny_gguf(path, architecture=architecture, **sizes).n_layer
    full = feed(load(path), TOKENS)
    # Each layer rounds K and V by 2**-11, or K, V and the query by half a step of 127.
    for fmt, bound in (("f16", n_layer * 2 * 2**-11), ("q8_0", n_layer * 3 / 254)):
        error = np.abs(feed(load(path, fmt), TOKENS) - full).max() / np.abs(full).max()
        assert 0 < error < bound


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma") / "m.gguf"
    write_tiny_gguf(path, architecture="gemma3", **SIZES["gemma3"])
    return path


@pytest.mark.parametrize("fmt", [fmt.value for fmt in KvFormat])
def test_chunks_placement_and_threads_change_no_bit(gemma: Path, fmt: str) -> None:
    expected = feed(load(gemma, fmt, threads=1), TOKENS, chunk=PROMPT)
    for chunk, threads, cells in ((1, 2, 0), (13, 3, 37), (33, 2, 150)):
        moved = load(gemma, fmt, threads=threads)
        if cells:
            moved.store.reserve(8, cells)
        assert np.array_equal(feed(moved, TOKENS, chunk, seq=1), expected)
        assert moved.store.spans(1)[0].cell == cells


@pytest.mark.parametrize("fmt", [fmt.value for fmt in KvFormat])
def test_company_in_a_batch_changes_no_bit(gemma: Path, fmt: str) -> None:
    """Two sequences of other lengths, one of them shorter than two windows."""
    prompts = {1: TOKENS[:60], 2: TOKENS[90:60:-1][:20]}
    alone, both = load(gemma, fmt), load(gemma, fmt)
    expected = {}
    for seq, tokens in prompts.items():
        for engine in (alone, both):
            engine.store.reserve(seq, 64)
        expected[seq] = [alone.prefill(tokens, seq), alone.decode(7, seq), alone.decode(9, seq)]
    order = (2, 1)
    logits = both.forward(
        Batch(
            [seq for seq in order for _ in prompts[seq]],
            [i for seq in order for i in range(len(prompts[seq]))],
            "prefill",
            [token for seq in order for token in prompts[seq]],
        )
    )
    rows = [logits]
    for token in (7, 9):
        at = [both.store.written(seq) for seq in order]
        rows.append(both.forward(Batch(list(order), at, "decode", [token, token])))
    for column, seq in enumerate(order):
        assert np.array_equal(np.stack([row[column] for row in rows]), expected[seq])


@pytest.mark.parametrize("fmt", [fmt.value for fmt in KvFormat])
def test_draft_rows_equal_one_token_at_a_time(gemma: Path, fmt: str) -> None:
    single, together = load(gemma, fmt), load(gemma, fmt)
    expected = feed(single, TOKENS[: PROMPT + 8])[PROMPT:]
    feed(together, TOKENS[:PROMPT])
    at = list(range(PROMPT, PROMPT + 8))
    logits = together.forward(Batch([0] * 8, at, "decode", TOKENS[PROMPT : PROMPT + 8]))
    assert np.array_equal(logits, expected)


def test_a_window_hides_what_lies_before_it(tmp_path: Path) -> None:
    """With windows in every layer, a token sees n_layer * (width - 1) tokens back and no more."""
    path = tmp_path / "m.gguf"
    period = {"gemma3.attention.sliding_window_pattern": 99}
    write_tiny_gguf(path, architecture="gemma3", metadata=period)
    changed = TOKENS[:]
    changed[40] = 3 if changed[40] != 3 else 4
    before, after = feed(load(path), TOKENS), feed(load(path), changed)
    differs = (before != after).any(axis=1)
    assert differs[40:71].all() and not differs[:40].any() and not differs[71:].any()


# --- rope ----------------------------------------------------------------------------------------

BASE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_context_length": 32}
LLAMA3 = YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_THEIRS = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"factor": 4.0}, {"rope_type": "linear"}),
    "llama3": (LLAMA3, LLAMA3_THEIRS),
    "yarn": (YARN, {"rope_type": "yarn"}),
    "yarn, all keys": (
        YARN
        | {"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0, "yarn_attn_factor": 1.25}
        | {"yarn_ext_factor": 1.0, "finetuned": True, "attn_factor": 1.0},
        {"rope_type": "yarn", "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.25},
    ),
}


@pytest.mark.parametrize("case", SCALINGS)
def test_scaled_rope_gives_the_logits_of_transformers(tmp_path: Path, case: str) -> None:
    keys, theirs = SCALINGS[case]
    keys = {"type": case.split(",")[0]} | keys
    metadata = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    path = tmp_path / "m.gguf"
    model = write_tiny_model(path, {"rope_parameters": BASE | theirs}, metadata=metadata)
    expected = logits_in_transformers(model, TOKENS)
    assert_agree(feed(load(path), TOKENS), expected)
    write_tiny_gguf(path)
    plain = feed(load(path), TOKENS)
    assert np.abs(plain - expected).max() / np.abs(expected).max() > 0.01


def test_factors_in_a_tensor_give_the_logits_of_transformers(tmp_path: Path) -> None:
    scaled = Llama3(4.0, 1.0, 4.0, 32).divisors(Rope(32, 1e4))
    path = tmp_path / "m.gguf"
    tensors = {"rope_freqs.weight": scaled.astype(np.float32)}
    theirs = {"rope_parameters": BASE | LLAMA3_THEIRS}
    model = write_tiny_model(path, theirs, tensors=tensors)
    assert_agree(feed(load(path), TOKENS), logits_in_transformers(model, TOKENS))


def test_gemma_scales_the_rope_of_global_layers_only(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.rope.freq_base_swa": 500.0,
        "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.final_logit_softcapping": 5.0,
    }
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    config = {"rope_parameters": ropes, "sliding_window_pattern": 2, "final_logit_softcapping": 5.0}
    sizes = {"architecture": "gemma3", "n_layer": 3}
    model = write_tiny_model(path, config, metadata=metadata, **sizes)
    ours = feed(load(path), TOKENS)
    assert_agree(ours, logits_in_transformers(model, TOKENS))
    assert 2.5 < np.abs(ours).max() < 5


# --- what a module says --------------------------------------------------------------------------


def test_gemma_scales_scores_by_its_size() -> None:
    def scale(n_layer: int, n_embd: int, n_head: int, head_dim: int) -> float:
        sizes = {"n_layer": n_layer, "n_embd": n_embd, "n_head": n_head, "head_dim": head_dim}
        return gemma3.attention_scale(SimpleNamespace(**sizes))  # type: ignore[arg-type]

    assert scale(26, 1152, 4, 256) == 1 / 16
    assert scale(62, 5376, 32, 128) == 168**-0.5


def test_layers_of_gemma(gemma: Path) -> None:
    hp = Hyperparameters.from_gguf(open_gguf(gemma))
    assert [layer.width if (layer := hp.sliding_of(i)) else 0 for i in range(7)] == [16] * 5 + [
        0,
        16,
    ]
    assert hp.rope == Rope(32, 1e6) and hp.ropes == (hp.rope, Rope(32, 1e4))
    assert load(gemma)._graphs.widths == [16] * 5 + [0, 16]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_known_by_its_name(name: str) -> None:
    assert find_architecture(name, Path("m.gguf")).name == name


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "sets 'gemma3.attn_logit_softcapping' to 50"),
        ("gemma3", {"attention.scale": 0.1}, "sets 'gemma3.attention.scale'"),
        ("qwen2", {"attention.sliding_window": 16}, "sets 'qwen2.attention.sliding_window' to 16"),
        ("qwen3", {"expert_count": 8}, "sets 'qwen3.expert_count' to 8"),
    ],
)
def test_keys_of_others_are_refused(
    tmp_path: Path, architecture: str, metadata: dict[str, Any], message: str
) -> None:
    path = tmp_path / "m.gguf"
    keys = {f"{architecture}.{key}": value for key, value in metadata.items()}
    write_tiny_gguf(path, architecture=architecture, metadata=keys)
    with pytest.raises(Refusal, match=message):
        Hyperparameters.from_gguf(open_gguf(path))


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        ("llama", "blk.0.attn_q.bias"),
        ("qwen2", "blk.1.attn_output.bias"),
        ("qwen3", "blk.0.attn_k.bias"),
        ("gemma3", "blk.1.ffn_down.bias"),
    ],
)
def test_tensors_of_others_are_refused(tmp_path: Path, architecture: str, tensor: str) -> None:
    path = tmp_path / "m.gguf"
    extra = {tensor: np.zeros(64, np.float32)}
    write_tiny_gguf(path, architecture=architecture, tensors=extra)
    with pytest.raises(Refusal, match=f"1 tensors that the {architecture} .* first '{tensor}'"):
        Hyperparameters.from_gguf(open_gguf(path))


def test_the_base_of_layers_with_a_window_is_above_1(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, architecture="gemma3", metadata={"gemma3.rope.freq_base_swa": 1.0})
    with pytest.raises(Damaged, match=r"its rope.freq_base_swa is 1\.0 and must be above 1"):
        Hyperparameters.from_gguf(open_gguf(path))


def test_gemma_without_a_window_sees_everything(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    absent = {"gemma3.attention.sliding_window": None}
    write_tiny_gguf(path, architecture="gemma3", metadata=absent)
    hp = Hyperparameters.from_gguf(open_gguf(path))
    assert hp.sliding is None and hp.ropes == (Rope(32, 1e6),)
