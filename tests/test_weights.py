"""Weights of a file in the format asked for: values, what is used in place, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import normal
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf import quants as gguf_quants
from tiny_models import write_tiny_gguf

from minfer import Engine
from minfer.cli import main
from minfer.errors import Refusal
from minfer.format import BLOCK_BYTES, KvFormat
from minfer.graph.weight import Weight
from minfer.kernels_numba.q8_0 import quantize_q8_0_blocks
from minfer.models import weights
from minfer.models.gguf import GgufFile, open_gguf
from minfer.models.weights import load_weights, parse_weights, plan_weights
from minfer.reference import encode_weight

F32, F16, Q8_0 = KvFormat
TYPES = [t.name for t in (GGMLQuantizationType.F16, *gguf_quants._type_traits)]
CAN_QUANTIZE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]


def encoded(values: np.ndarray, kind: str) -> np.ndarray:
    """Rows in a ggml type; random blocks of moderate values where `gguf` cannot quantize."""
    ggml = GGMLQuantizationType[kind]
    if kind in ("F32", *CAN_QUANTIZE):
        return np.asarray(gguf_quants.quantize(values, ggml))
    size, width = GGML_QUANT_SIZES[ggml]
    n = values.size // size
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (n, width), dtype=np.uint8)
    while True:
        with np.errstate(all="ignore"):
            bad = ~(np.abs(gguf_quants.dequantize(blocks, ggml)) < 1000).all(axis=1)
        if not bad.any():
            return blocks.reshape(len(values), -1)
        blocks[bad] = rng.integers(0, 256, (bad.sum(), width), dtype=np.uint8)


def write(path: Path, tensors: Mapping[str, tuple[np.ndarray, str]]) -> GgufFile:
    """A file of tensors, each rows encoded in a ggml type."""
    writer = GGUFWriter(path, "none")
    for name, (rows, kind) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


def load(file: GgufFile, wanted: str | None = None) -> dict[str, Any]:
    return load_weights(file, plan_weights(file, parse_weights(wanted)))


@pytest.fixture
def small(tmp_path: Path) -> GgufFile:
    """Two blocks whose matrices are of several types, and vectors."""
    kinds = {"attn_q": "Q4_1", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_gate": "Q8_0"}
    kinds |= {"ffn_up": "Q8_0", "ffn_down": "F16", "attn_output": "F32"}
    tensors = {
        f"blk.{i}.{part}.weight": (encoded(normal(8, 64, seed=seed), kind), kind)
        for i in (0, 1)
        for seed, (part, kind) in enumerate(kinds.items())
    }
    tensors["blk.0.attn_norm.weight"] = normal(64), "F32"
    tensors["blk.0.narrow.weight"] = normal(8, 48), "F32"
    tensors["blk.0.narrow_half.weight"] = normal(8, 48).astype(np.float16), "F16"
    for part in ("attn_q", "attn_k", "attn_v"):
        tensors[f"blk.0.{part}.bias"] = normal(8, seed=ord(part[-1])), "F32"
    return write(tmp_path / "small.gguf", tensors)


def test_formats_are_parsed_strictly() -> None:
    assert [parse_weights(text) for text in (None, "auto", "f16", Q8_0)] == [None, None, F16, Q8_0]
    for text in ("", "Q8_0", "q4_0", " f16", 8):
        with pytest.raises(Refusal, match=f"weights {text!r} is none of f32, f16, q8_0, auto"):
            parse_weights(text)  # type: ignore[arg-type]


def test_auto_takes_q8_0_as_it_is_and_decodes_the_rest(small: GgufFile) -> None:
    found = load(small)
    said = {name: (w.fmt, w.origin) for name, w in found.items() if isinstance(w, Weight)}
    apart = found["blk.0.attn_qkv.weight"]
    assert [(part.fmt, part.origin) for part in apart] == [
        *[(F32, "decoded from Q4_1")] * 2,
        (Q8_0, "as in the file"),
    ]
    assert (apart[1].array == small.tensor("blk.0.attn_k.weight")).all()
    assert (apart[2].array == small.stored("blk.0.attn_v.weight")).all()
    assert {name[6:]: how for name, how in said.items() if name.startswith("blk.0.")} == {
        "ffn_gate_up.weight": (Q8_0, "as in the file"),
        "ffn_down.weight": (F32, "decoded from F16"),
        "attn_output.weight": (F32, "as in the file"),
        "narrow.weight": (F32, "as in the file"),
        "narrow_half.weight": (F32, "decoded from F16"),
    }


def test_a_format_asked_for_is_given_to_every_matrix_that_can_take_it(small: GgufFile) -> None:
    parts = {
        name: small.tensor(f"blk.1.{name}.weight")
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down", "attn_output")
    }
    exact = {
        "attn_qkv": np.concatenate([parts["attn_q"], parts["attn_k"], parts["attn_v"]]),
        "ffn_gate_up": np.concatenate([parts["ffn_gate"], parts["ffn_up"]]),
        "ffn_down": parts["ffn_down"],
        "attn_output": parts["attn_output"],
    }
    for fmt in KvFormat:
        found = load(small, fmt.value)
        for name, values in exact.items():
            weight = found[f"blk.1.{name}.weight"]
            assert weight.fmt is fmt and weight.shape == values.shape
            assert weight.array.tobytes() == encode_weight(values, fmt).tobytes(), (name, fmt)
            assert not weight.array.flags.writeable


def test_q8_0_keeps_rows_that_are_not_whole_blocks_and_says_so(small: GgufFile) -> None:
    found = load(small, "q8_0")
    why = "because rows of 48 are not whole blocks of 32"
    for name, fmt in (("narrow", F32), ("narrow_half", F16)):
        weight = found[f"blk.0.{name}.weight"]
        assert (weight.fmt, weight.origin) == (fmt, f"as in the file {why}")
    assert found["blk.0.attn_qkv.weight"].origin == "requantized from Q4_1, Q8_0 as it is"


@pytest.mark.parametrize("wanted", [None, "f16", "q8_0"])
def test_vectors_stay_f32_and_biases_are_stacked_like_their_matrices(
    small: GgufFile, wanted: str | None
) -> None:
    found = load(small, wanted)
    biases = [small.tensor(f"blk.0.attn_{part}.bias") for part in "qkv"]
    assert (found["blk.0.attn_qkv.bias"] == np.concatenate(biases)).all()
    norm = found["blk.0.attn_norm.weight"]
    assert norm.dtype == np.float32 and (norm == normal(64)).all()
    assert not [name for name in found if "attn_q." in name or "ffn_up" in name]


def test_weights_do_not_lie_in_the_file(small: GgufFile) -> None:
    for wanted, name in (("f16", "ffn_down"), ("f32", "attn_output"), (None, "ffn_gate_up")):
        held = load(small, wanted)[f"blk.0.{name}.weight"].array
        assert held.ctypes.data % 64 == 0 and not held.flags.writeable
        assert not any(np.shares_memory(held, small.stored(n)) for n in small.tensor_names)


@pytest.mark.parametrize("wanted", [None, "f32", "f16", "q8_0"])
def test_the_plan_knows_how_much_memory_it_takes(small: GgufFile, wanted: str | None) -> None:
    plan = plan_weights(small, parse_weights(wanted))
    loaded = load_weights(small, plan).values()
    each = [part for w in loaded for part in (w if isinstance(w, tuple) else (w,))]
    arrays = [getattr(w, "array", w) for w in each]
    assert sum(planned.n_bytes for planned in plan) == sum(a.nbytes for a in arrays) > 0


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_that_gguf_decodes_loads(kind: str, tmp_path: Path) -> None:
    values = normal(6, 512)
    rows = encoded(values, kind)
    name = "blk.0.ffn_down.weight"
    file = write(tmp_path / "m.gguf", {name: (rows, kind)})
    exact = np.asarray(gguf_quants.dequantize(rows, GGMLQuantizationType[kind]), np.float32)
    assert np.isfinite(exact).all() and exact.any()
    full = load(file, "f32")[name]
    assert (full.array == exact).all()
    assert full.origin == f"decoded from {kind}"
    blocks = load(file, "q8_0")[name]
    wanted = rows if kind == "Q8_0" else encode_weight(exact, Q8_0)
    assert (blocks.array == wanted).all()
    assert (load(file, "f16")[name].array == encode_weight(exact, F16)).all()


def test_pieces_of_a_large_matrix_lie_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {
        f"blk.0.ffn_{part}.weight": normal(n, 64, seed=n) for part, n in (("gate", 37), ("up", 41))
    }
    rows = {name: (encoded(values, "Q5_0"), "Q5_0") for name, values in parts.items()}
    file = write(tmp_path / "m.gguf", rows)
    whole = {fmt: load(file, fmt)["blk.0.ffn_gate_up.weight"].array for fmt in ("f32", "q8_0")}
    monkeypatch.setattr(weights, "CHUNK", 5 * 64)
    for fmt, array in whole.items():
        assert (load(file, fmt)["blk.0.ffn_gate_up.weight"].array == array).all()
    exact = np.concatenate([file.tensor(name) for name in parts])
    assert (whole["f32"] == exact).all()


@pytest.mark.parametrize(("fmt", "value"), [("f16", 65520.0), ("q8_0", 1e7), ("q8_0", np.nan)])
def test_values_that_a_format_cannot_hold_are_refused(
    tmp_path: Path, fmt: str, value: float
) -> None:
    matrix = normal(4, 64)
    matrix[2, 40] = value
    file = write(tmp_path / "m.gguf", {"blk.0.ffn_down.weight": (matrix, "F32")})
    with pytest.raises(Refusal, match=rf"'blk\.0\.ffn_down\.weight' has values .* {fmt} cannot"):
        load(file, fmt)
    assert np.array_equal(load(file)["blk.0.ffn_down.weight"].array, matrix, equal_nan=True)
    matrix[2, 40] = {"f16": 65519.0, "q8_0": 8e6}[fmt]
    assert load(write(tmp_path / "n.gguf", {"a.weight": (matrix, "F32")}), fmt)


def write_in_types(path: Path, kinds: Iterable[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model of wide rows whose matrices are of the types in turn."""
    turn, add = cycle(kinds), GGUFWriter.add_tensor

    def add_in_type(writer: GGUFWriter, name: str, tensor: np.ndarray, **how: Any) -> None:
        kind = next(turn) if tensor.ndim == 2 else "F32"
        add(writer, name, encoded(tensor, kind), raw_dtype=GGMLQuantizationType[kind])

    with monkeypatch.context() as patched:
        patched.setattr(GGUFWriter, "add_tensor", add_in_type)
        write_tiny_gguf(path, n_embd=256, n_ff=256, n_head=8, n_head_kv=4, tied=False)


def logits(path: Path, how: str | None) -> tuple[Engine, np.ndarray]:
    engine = Engine.load(path, n_ctx=32, threads=2, weights=how)
    engine.store.reserve(0, 32)
    return engine, np.stack([engine.prefill([5, 90, 41, 7, 201]), engine.decode(33)])


def test_a_model_of_many_types_equals_the_model_of_its_decoded_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed, plain = tmp_path / "mixed.gguf", tmp_path / "plain.gguf"
    write_in_types(mixed, CAN_QUANTIZE, monkeypatch)
    file = open_gguf(mixed)
    assert {file.tensor_info(n).type for n in file.tensor_names} == {"F32", *CAN_QUANTIZE}
    values = iter([file.tensor(n) for n in file.tensor_names])
    with monkeypatch.context() as patched:
        add = GGUFWriter.add_tensor
        patched.setattr(
            GGUFWriter, "add_tensor", lambda writer, name, tensor: add(writer, name, next(values))
        )
        write_tiny_gguf(plain, n_embd=256, n_ff=256, n_head=8, n_head_kv=4, tied=False)
    full, auto = logits(mixed, "f32")[1], logits(mixed, None)[1]
    assert 0 < np.abs(auto - full).max() < 8 / 254 * np.abs(full).max()
    for how in ("f32", "f16", "q8_0"):
        found, wanted = logits(mixed, how)[1], logits(plain, how)[1]
        if how == "q8_0":  # its Q8_0 tensors are used, the other file's are quantized again
            assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()
        else:
            assert np.array_equal(found, wanted)


def test_receipts_tell_how_weights_came_to_their_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_in_types(tmp_path / "m.gguf", ["Q8_0", "Q4_1"], monkeypatch)
    engine, _ = logits(tmp_path / "m.gguf", None)
    auto = {(r.variant, r.fmt): set(r.weights) for r in engine.receipts() if r.op == "matvec"}
    assert auto == {
        ("lanes", "f32"): {"decoded from Q4_1"},
        ("blocks", "q8_0"): {"as in the file"},
    }
    engine, _ = logits(tmp_path / "m.gguf", "q8_0")
    (receipt,) = (r for r in engine.receipts() if r.op == "matmul")
    made = {"requantized from Q4_1", "requantized from Q4_1, Q8_0 as it is"}
    assert (receipt.variant, receipt.fmt) == ("blocks", "q8_0")
    assert set(receipt.weights) == {"as in the file", *made}
    assert set(receipt.as_dict()["weights"]) == set(receipt.weights)
    assert f"  weights   q8_0 {'; '.join(receipt.weights)}" in str(receipt).splitlines()
    embed = next(r for r in engine.receipts() if (r.op, r.fmt) == ("embed", "q8_0"))
    assert str(embed).endswith("; weights q8_0 as in the file")


def test_the_command_line_takes_a_format_of_weights(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(tiny_gguf), "-p", "the cat", "-n", "2", "--n-ctx", "32", "--json"]
    assert main([*command, "--weights", "q8_0"]) == 0
    receipts = json.loads(capsys.readouterr().out)["receipts"]
    products = {(r["variant"], *r["weights"]) for r in receipts if r["op"] in ("matvec", "matmul")}
    assert products == {("blocks", "requantized from F32")}
    assert main([*command, "--weights", "Q8_0"]) == 2
    assert "weights 'Q8_0' is none of f32, f16, q8_0, auto" in capsys.readouterr().err


def test_a_tied_table_is_one_array(tiny_gguf: Path) -> None:
    engine, _ = logits(tiny_gguf, "q8_0")
    table = engine._loaded.weights["token_embd.weight"].array
    for graph in engine._graphs:
        held = [s for s in graph.slots if isinstance(s, np.ndarray) and s.shape == table.shape]
        assert held and all(np.shares_memory(array, table) for array in held)


def test_requantizing_uses_the_quantizer_of_the_cache() -> None:
    values = normal(3, 96)
    cells = quantize_q8_0_blocks(values, config={"threads": 1})
    assert (cells[:, : 3 * BLOCK_BYTES] == encode_weight(values, Q8_0)).all()
