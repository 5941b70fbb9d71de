"""Hyperparameters: read strictly, and checked against every tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Tiny, tiny_metadata, write_tiny_gguf

from minfer.errors import Damaged, Refusal
from minfer.models import llama
from minfer.models.gguf import open_gguf
from minfer.models.hyperparameters import Hyperparameters
from minfer.rope import Divided, Linear, Llama3, Rope, Scaling, Yarn, yarn_temperature


def read(tmp_path: Path, metadata: dict[str, Any] | None = None, **sizes: Any) -> Hyperparameters:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, metadata=metadata, **sizes)
    return Hyperparameters.from_gguf(open_gguf(path))


def test_hyperparameters_of_a_tiny_model(tmp_path: Path) -> None:
    hp = read(tmp_path, head_dim=16)
    assert hp == Hyperparameters(
        architecture=llama.ARCHITECTURE,
        n_layer=2,
        n_ctx_train=512,
        n_embd=64,
        n_ff=96,
        n_head=4,
        n_head_kv=2,
        head_dim=16,
        rms_eps=float(np.float32(1e-5)),
        n_vocab=289,
        tied_embeddings=True,
        rope=Rope(16, 10000.0),
    )
    assert not read(tmp_path, tied=False).tied_embeddings


def test_defaults_where_the_format_has_them(tmp_path: Path) -> None:
    absent = dict.fromkeys(
        [
            "llama.attention.head_count_kv",
            "llama.attention.key_length",
            "llama.attention.value_length",
            "llama.rope.dimension_count",
            "llama.rope.freq_base",
            "llama.vocab_size",
        ]
    )
    hp = read(tmp_path, absent, head_dim=16, n_head_kv=4)
    assert (hp.n_head_kv, hp.head_dim, hp.rope) == (4, 16, Rope(16, 10000.0))
    assert hp.n_vocab == 289


REQUIRED = [
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [None, "12", 0, float("nan"), True])
def test_a_key_that_is_missing_or_mistyped(tmp_path: Path, key: str, value: Any) -> None:
    message = f"lacks the metadata key '{key}'" if value is None else f"'{key}' is .* instead of"
    with pytest.raises(Damaged, match=message):
        read(tmp_path, {key: value})


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "gpt2.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(Refusal, match="architecture 'gpt2'; supported: llama") as caught:
        Hyperparameters.from_gguf(open_gguf(tmp_path / "gpt2.gguf"))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"llama.expert_count": 8}, "sets 'llama.expert_count' to 8"),
        ({"llama.attention.head_count_kv": 3}, "4 heads are no multiple of 3 K/V heads"),
        ({"llama.attention.value_length": 16}, "keys have 32 dimensions a head and values 16"),
        ({"llama.rope.dimension_count": 64}, "rope turns 64 dimensions of a head of 32"),
        ({"llama.rope.dimension_count": 31}, "rope turns 31 dimensions"),
        ({"llama.vocab_size": 288}, "vocab_size is 288 and the tokenizer has 289 tokens"),
    ],
)
def test_values_that_are_not_supported(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        read(tmp_path, metadata)
    assert caught.value.rule == "0.3" and caught.value.exit_code == 2


def test_a_partial_rotation_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, {"llama.rope.dimension_count": 16}).rope.n_rot == 16


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
LLAMA3 = YARN | {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def scaled(keys: dict[str, Any]) -> dict[str, Any]:
    return {f"llama.rope.scaling.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"type": "none"}, None),
        ({"finetuned": False}, None),
        ({"type": "linear", "factor": 2.0, "finetuned": True}, Linear(2.0)),
        (LLAMA3, Llama3(4.0, 1.0, 4.0, 64)),
        (YARN, Yarn(4.0, 64, yarn_temperature(4.0), 32.0, 1.0)),
        (YARN | {"yarn_attn_factor": 0.5}, Yarn(4.0, 64, 0.5)),
        (YARN | {"attn_factor": 0.5}, Yarn(4.0, 64, 0.5 * yarn_temperature(4.0))),
        (
            YARN | {"yarn_ext_factor": 1.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            Yarn(4.0, 64, yarn_temperature(4.0), 16.0, 2.0),
        ),
    ],
)
def test_scalings_of_rope(tmp_path: Path, keys: dict[str, Any], scaling: Scaling | None) -> None:
    assert read(tmp_path, scaled(keys)).rope == Rope(32, 10000.0, scaling)


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"type": "longrope"}, "type' to 'longrope'"),
        ({"type": "LINEAR", "factor": 2.0}, "type' to 'LINEAR'"),
        ({"factor": 2.0}, "factor' to 2.0"),
        ({"type": "none", "factor": 2.0}, "factor' to 2.0"),
        (
            {"type": "linear", "factor": 2.0, "original_context_length": 9},
            "original_context_length' to 9",
        ),
        ({"type": "linear", "factor": 2.0, "alpha": 1.0}, "alpha' to 1.0"),
        (LLAMA3 | {"yarn_beta_fast": 32.0}, "yarn_beta_fast' to 32.0"),
        (YARN | {"low_freq_factor": 1.0}, "low_freq_factor' to 1.0"),
        (YARN | {"yarn_log_multiplier": 0.1}, "yarn_log_multiplier' to 0.1"),
        (YARN | {"yarn_ext_factor": 0.5}, "yarn_ext_factor' to 0.5"),
    ],
)
def test_another_scaling_of_rope_is_refused(
    tmp_path: Path, keys: dict[str, Any], refused: str
) -> None:
    with pytest.raises(Refusal, match=rf"sets 'llama\.rope\.scaling\.{refused}") as caught:
        read(tmp_path, scaled(keys))
    assert caught.value.rule == "0.3" and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (scaled({"type": "linear"}), "lacks the metadata key 'llama.rope.scaling.factor'"),
        (scaled({"type": "linear", "factor": 0.0}), "factor' is 0.0 instead of a positive float"),
        (scaled({"type": 3}), "type' is 3 instead of text"),
        (scaled(YARN | {"original_context_length": None}), "scaling.original_context_length'"),
        (scaled(LLAMA3 | {"low_freq_factor": 4.0}), "low_freq_factor 4.0 is not below its high"),
        (scaled(YARN | {"yarn_beta_slow": 32.0}), "yarn_beta_slow 32.0 is not below its yarn_beta"),
        ({"llama.rope.freq_base": 1.0}, "its rope.freq_base is 1.0 and must be above 1"),
    ],
)
def test_keys_of_rope_that_are_damaged(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(Damaged, match=message):
        read(tmp_path, metadata)


def test_factors_of_rope_in_a_tensor(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    tensors = {"rope_freqs.weight": factors}
    rope = read(tmp_path, tensors=tensors).rope
    assert rope.scaling == Divided(tuple(factors.tolist()))
    refused = scaled({"type": "linear", "factor": 2.0})
    with pytest.raises(Refusal, match=r"sets 'llama\.rope\.scaling\.type' to 'linear'"):
        read(tmp_path, refused, tensors=tensors)
    with pytest.raises(Damaged, match=r"'rope_freqs\.weight' has shape \[15\], .* asks for \[16\]"):
        read(tmp_path, tensors={"rope_freqs.weight": factors[1:]})
    for bad in (0.0, -1.0, np.inf, np.nan):
        wrong = np.full(16, bad, np.float32)
        with pytest.raises(Damaged, match="holds a factor that is not positive"):
            read(tmp_path, tensors={"rope_freqs.weight": wrong})


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"llama.block_count": 3}, "it has no tensor 'blk.2.attn_norm.weight'"),
        ({"llama.block_count": 2**32 - 1}, "it has no tensor 'blk.2.attn_norm.weight'"),
        (
            {"llama.feed_forward_length": 64},
            r"'blk.0.ffn_gate.weight' has shape \[96, 64\], its metadata asks for \[64, 64\]",
        ),
        (
            {"llama.attention.head_count_kv": 4},
            r"'blk.0.attn_k.weight' has shape \[64, 64\], its metadata asks for \[128, 64\]",
        ),
        (
            {"llama.attention.head_count": 65, "llama.attention.key_length": None},
            "lacks the metadata key 'llama.attention.key_length'",
        ),
        ({"llama.embedding_length": 2**31}, r"'token_embd.weight' has shape \[289, 64\]"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(Damaged, match=message):
        read(tmp_path, metadata)


def test_tensors_left_over_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="9 tensors that the llama"):
        read(tmp_path, {"llama.block_count": 1})


def test_tiny_metadata_has_no_typo() -> None:
    assert set(REQUIRED) < set(tiny_metadata(Tiny()))


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    file = open_gguf(smollm2)
    hp = Hyperparameters.from_gguf(file)
    assert (hp.n_layer, hp.n_embd, hp.n_ff, hp.n_vocab) == (30, 576, 1536, 49152)
    assert (hp.n_head, hp.n_head_kv, hp.head_dim, hp.rope) == (9, 3, 64, Rope(64, 100000.0))
    assert (hp.n_ctx_train, hp.tied_embeddings) == (8192, True)
    assert file.tensor_info("token_embd.weight") == ("Q8_0", (49152, 576))
    assert file.tensor_info("blk.0.attn_q.weight") == ("Q4_1", (576, 576))
