"""GGUF files: values as written, and every kind of damage answered by one clear error."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Tiny, halve, interleave, tiny_metadata, tiny_weights, write_tiny_gguf

from minfer.errors import Damaged, Refusal
from minfer.models import gguf_guard
from minfer.models.gguf import GgufFile, open_gguf
from minfer.models.hyperparameters import Hyperparameters
from minfer.models.tokenizer import Tokenizer

U8, U32, F32, STRING, ARRAY, U64 = 0, 4, 6, 8, 9, 10  # GGUF value types
TYPE_F32, TYPE_Q8_0 = 0, 8  # ggml tensor types


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def row(name: str, shape: tuple[int, ...], kind: int = TYPE_F32, offset: int = 0) -> bytes:
    """A tensor table entry; `shape` row-major."""
    dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def raw_gguf(
    pairs: tuple[bytes, ...] = (),
    rows: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_rows: int | None = None,
    n_pairs: int | None = None,
) -> bytes:
    counts = struct.pack(
        "<QQ",
        len(rows) if n_rows is None else n_rows,
        len(pairs) if n_pairs is None else n_pairs,
    )
    head = b"GGUF" + struct.pack("<I", version) + counts + b"".join(pairs) + b"".join(rows)
    return head + bytes(-len(head) % 32) + data


def opened(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return open_gguf(path)


# --- what is read -------------------------------------------------------------------------------


def test_reads_the_metadata_that_was_written(tiny_gguf: Path) -> None:
    metadata, written = open_gguf(tiny_gguf).metadata, tiny_metadata(Tiny())
    assert metadata.keys() == written.keys() | {"general.architecture"}
    for key, value in written.items():
        kept = np.float32(value) if isinstance(value, float) else value
        assert metadata[key] == kept and type(metadata[key]) is type(value), key


def test_names_types_and_shapes_in_the_order_of_the_file(tiny_gguf: Path) -> None:
    file, weights = open_gguf(tiny_gguf), tiny_weights(Tiny())
    assert file.tensor_names == tuple(weights)
    assert {n: file.tensor_info(n) for n in weights} == {
        name: ("F32", weight.shape) for name, weight in weights.items()
    }


def test_reads_the_weights_that_were_written(tiny_gguf: Path) -> None:
    file, weights = open_gguf(tiny_gguf), tiny_weights(Tiny())
    for name in ("token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"):
        np.testing.assert_array_equal(file.tensor(name), weights[name])
    q = weights["blk.0.attn_q.weight"]
    np.testing.assert_array_equal(file.tensor("blk.0.attn_q.weight"), interleave(q, 4))
    assert interleave(np.arange(16.0, dtype=np.float32)[:, None], 2).ravel().tolist() == [
        *(0, 4, 1, 5, 2, 6, 3, 7),
        *(8, 12, 9, 13, 10, 14, 11, 15),
    ]


def test_f32_is_a_view_of_the_map(tiny_gguf: Path) -> None:
    values = open_gguf(tiny_gguf).tensor("token_embd.weight")
    assert values.dtype == np.float32
    assert not values.flags.owndata and not values.flags.writeable and values.flags.aligned


def test_q8_0_by_hand(tmp_path: Path) -> None:
    codes = np.arange(-32, 32, dtype=np.int8).reshape(2, 32)
    scales = np.array([[0.5], [-3.0]], dtype="<f2")
    data = b"".join(scales[i].tobytes() + codes[i].tobytes() for i in range(2))
    file = opened(tmp_path, raw_gguf(rows=(row("w", (2, 32), TYPE_Q8_0),), data=data))
    assert file.tensor_info("w") == ("Q8_0", (2, 32))
    np.testing.assert_array_equal(file.tensor("w"), scales.astype("f4") * codes.astype("f4"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_other_types_stay_close_to_what_was_quantized(tmp_path: Path, kind: str) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "w.gguf", "llama")
    stored = quants.quantize(values, GGMLQuantizationType[kind])
    writer.add_tensor("w", stored, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "w.gguf")
    read = file.tensor("w")
    assert file.tensor_info("w") == (kind, (6, 64)) and read.dtype == np.float32
    steps = {"F16": 4096, "BF16": 256, "Q8_0": 200, "Q5_0": 28, "Q5_1": 28, "Q4_0": 14, "Q4_1": 14}
    assert 0 < np.abs(read - values).max() <= np.abs(values).max() / steps[kind] * 1.2


def test_types_of_integers_are_refused_by_name(tmp_path: Path) -> None:
    file = opened(tmp_path, raw_gguf(rows=(row("w", (4,), 26),), data=bytes(16)))
    with pytest.raises(Refusal, match=r"'w'.* type I32, which cannot be decoded") as caught:
        file.tensor("w")
    assert caught.value.exit_code == 2


def test_metadata_of_every_type(tmp_path: Path) -> None:
    pairs = (
        pair("u8", U8, b"\xff"),
        pair("i8", 1, b"\xff"),
        pair("u16", 2, b"\xff\xff"),
        pair("i16", 3, b"\xfe\xff"),
        pair("u32", U32, b"\xff\xff\xff\xff"),
        pair("i32", 5, b"\xfd\xff\xff\xff"),
        pair("f32", F32, struct.pack("<f", 1e-5)),
        pair("bool", 7, b"\x01"),
        pair("text", STRING, text("né")),
        pair("u64", U64, struct.pack("<Q", 2**64 - 1)),
        pair("i64", 11, struct.pack("<q", -(2**63))),
        pair("f64", 12, struct.pack("<d", 1e-5)),
        pair("texts", ARRAY, struct.pack("<IQ", STRING, 2) + text("") + text("b")),
        pair("floats", ARRAY, struct.pack("<IQff", F32, 2, 0.5, -2.0)),
    )
    assert opened(tmp_path, raw_gguf(pairs)).metadata == {
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -2,
        "u32": 2**32 - 1,
        "i32": -3,
        "f32": float(np.float32(1e-5)),
        "bool": True,
        "text": "né",
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 1e-5,
        "texts": ["", "b"],
        "floats": [0.5, -2.0],
    }


def test_alignment_is_obeyed(tmp_path: Path) -> None:
    head = raw_gguf((pair("general.alignment", U32, struct.pack("<I", 64)),), (row("w", (2,)),))
    head += bytes(-len(head) % 64)
    file = opened(tmp_path, head + struct.pack("<ff", 3.0, 4.0))
    assert file.tensor("w").tolist() == [3.0, 4.0]
    with pytest.raises(Damaged, match="'w' ends at byte 136, but the file ends at byte 135"):
        opened(tmp_path, head + bytes(7))


def test_halve_undoes_interleave() -> None:
    weight = np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)
    np.testing.assert_array_equal(halve(interleave(weight, 3), 3), weight)


# --- damage -------------------------------------------------------------------------------------

HUGE = struct.pack("<Q", 2**63)
DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "magic": (b"GGML" + bytes(60), "is no GGUF file: it starts with b'GGML'"),
    "half the magic": (b"GG", "the magic at byte 0 needs 4 bytes, but the file ends at byte 2"),
    "no counts": (b"GGUF\x03\0\0\0", "number of tensors.* ends at byte 8"),
    "version 1": (raw_gguf(version=1), r"GGUF version 1 is none of \[2, 3\]"),
    "version 99": (raw_gguf(version=99), "GGUF version 99"),
    "tensor count": (raw_gguf(n_rows=2**64 - 1), "claims 18446744073709551615 tensors"),
    "pair count": (raw_gguf(n_pairs=9), "claims 9 metadata pairs, but only 8 bytes follow"),
    "key length": (raw_gguf((HUGE + b"key" + bytes(8),)), "a metadata key at byte 32 needs"),
    "key no text": (raw_gguf((pair("k", U8, b"\1").replace(b"k", b"\xff"),)), "no UTF-8"),
    "key twice": (raw_gguf((pair("k", U8, b"\1"),) * 2), "metadata key 'k' appears twice"),
    "value type": (raw_gguf((pair("k", 77, b"\1"),)), "'k' has the unknown value type 77"),
    "value cut": (raw_gguf((pair("k", STRING, text("x" * 50)),))[:60], "the value of 'k' at byte"),
    "array length": (
        raw_gguf((pair("k", ARRAY, struct.pack("<I", U8) + HUGE),)),
        "claims 9223372036854775808 items of 'k'",
    ),
    "array of texts": (
        raw_gguf((pair("k", ARRAY, struct.pack("<IQ", STRING, 2**40)),)),
        "claims 1099511627776 items of 'k'",
    ),
    "array of texts without lengths": (
        raw_gguf((pair("k", ARRAY, struct.pack("<IQ", STRING, 2)),)),
        "claims 2 items of 'k', but only 15 bytes follow",
    ),
    "array of texts cut": (
        raw_gguf((pair("k", ARRAY, struct.pack("<IQ", STRING, 1) + text("x" * 50)),))[:90],
        "the value of 'k' at byte 57 needs 50 bytes, but the file ends at byte 90",
    ),
    "array of texts no text": (
        raw_gguf((pair("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text(b"\xff")),)),
        "the value of 'k' at byte 66 is no UTF-8",
    ),
    "array type": (
        raw_gguf((pair("k", ARRAY, struct.pack("<IQ", 55, 1) + bytes(64)),)),
        "'k' has the unknown value type 55",
    ),
    "alignment": (
        raw_gguf((pair("general.alignment", U32, struct.pack("<I", 48)),)),
        "general.alignment 48 is no power of two",
    ),
    "alignment of zero": (
        raw_gguf((pair("general.alignment", U32, struct.pack("<I", 0)),)),
        "general.alignment 0 is no power of two from 8 on",
    ),
    "alignment below 8": (
        raw_gguf((pair("general.alignment", U32, struct.pack("<I", 4)),)),
        "general.alignment 4 is no power of two from 8 on",
    ),
    "alignment type": (
        raw_gguf((pair("general.alignment", STRING, text("32")),)),
        "general.alignment '32' is no power of two from 8 on",
    ),
    "no dimensions": (raw_gguf(rows=(row("w", ()) + bytes(8),)), "tensor 'w' has 0 dimensions"),
    "dimensions": (raw_gguf(rows=(row("w", (1,) * 5),)), "tensor 'w' has 5 dimensions"),
    "empty dimension": (raw_gguf(rows=(row("w", (3, 0)),)), r"cannot have the shape \[3, 0\]"),
    "half a block": (
        raw_gguf(rows=(row("w", (2, 48), TYPE_Q8_0),), data=bytes(200)),
        r"'w' of type Q8_0 cannot have the shape \[2, 48\]: rows come in blocks of 32",
    ),
    "tensor type": (raw_gguf(rows=(row("w", (1,), 99),)), "'w' has the unknown type 99"),
    "tensor twice": (raw_gguf(rows=(row("w", (1,)),) * 2, data=bytes(8)), "'w' appears twice"),
    "offset beyond": (
        raw_gguf(rows=(row("w", (1,), offset=1 << 40),), data=bytes(32)),
        "'w' ends at byte 1099511627844, but the file ends at byte 96",
    ),
    "offset odd": (raw_gguf(rows=(row("w", (1,), offset=4),), data=bytes(8)), "no multiple of 32"),
    "size wraps": (
        raw_gguf(rows=(row("w", (2**33, 2**33)),), data=bytes(8)),
        "'w' ends at byte 295147905179352825952",
    ),
    "overlap": (
        raw_gguf(rows=(row("a", (16,)), row("b", (16,), offset=32)), data=bytes(96)),
        "tensors 'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, message = DAMAGE[case]
    monkeypatch.setattr("gguf.gguf_reader.GGUFReader", None)  # its reads need not end
    with pytest.raises(Damaged, match=message) as caught:
        opened(tmp_path, content)
    line = str(caught.value)
    assert caught.value.exit_code == 3
    assert "\n" not in line and str(tmp_path / "model.gguf") in line


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"big-endian GGUF.*convert the model again") as caught:
        opened(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert caught.value.exit_code == 2


def test_arrays_of_arrays_are_refused(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", ARRAY, 2) + 2 * (struct.pack("<IQ", U8, 2) + b"\x01\x02")
    with pytest.raises(Refusal, match=r"sets 'k' to an array of arrays.*without it") as caught:
        opened(tmp_path, raw_gguf((pair("k", ARRAY, nested),)))
    assert caught.value.exit_code == 2 and caught.value.facts["key"] == "k"


def test_arrays_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = raw_gguf(tuple(pair(k, ARRAY, struct.pack("<IQ", U8, 6) + bytes(6)) for k in "ab"))
    assert opened(tmp_path, content).metadata == {"a": [0] * 6, "b": [0] * 6}
    monkeypatch.setattr(gguf_guard, "MAX_ELEMENTS", 11)
    with pytest.raises(Damaged, match="'b' brings the metadata to 12 array items, more than 11"):
        opened(tmp_path, content)


def test_every_cut_is_damage(tmp_path: Path, tiny_gguf: Path) -> None:
    """Header, metadata, tensor table, data, and the last byte."""
    content = tiny_gguf.read_bytes()
    header = content.index(b"output_norm.weight") + 64
    cuts = [*range(0, 64), *range(64, header, 61), *range(header, len(content), 9973)]
    for cut in [*cuts, len(content) - 1]:
        with pytest.raises(Damaged, match=r"but the file ends|bytes follow|is empty"):
            opened(tmp_path, content[:cut])


def test_flipped_bytes_never_escape(tmp_path: Path) -> None:
    """Whatever a byte of the header becomes, the model loads or is refused in one line."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, n_layer=1)
    content = bytearray(path.read_bytes())
    header = content.index(b"output_norm.weight") + 64
    rng, refused = np.random.default_rng(0), 0
    for _ in range(400):
        at, value = int(rng.integers(header)), int(rng.integers(256))
        changed = content[:]
        changed[at] = value
        try:
            file = opened(tmp_path, bytes(changed))
            Hyperparameters.from_gguf(file)
            Tokenizer.from_gguf(file.metadata).encode("the cat")
        except Refusal as refusal:
            refused += 1
            assert "\n" not in str(refusal)
    assert 50 < refused < 400


@pytest.mark.parametrize(
    "name, message", [("none.gguf", "does not exist"), (".", "is no regular file")]
)
def test_paths_that_are_no_files(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        open_gguf(tmp_path / name)
    assert caught.value.exit_code == 2 and not isinstance(caught.value, Damaged)


def test_a_file_that_cannot_be_read(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(Refusal, match="cannot be read: Permission denied"):
        open_gguf(tiny_gguf)
