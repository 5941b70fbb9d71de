"""Metadata as the header walk reads it, held against the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf.gguf_reader import GGUFReader

from minfer.models.gguf import open_gguf


def test_metadata_is_what_the_package_reads(tiny_gguf: Path) -> None:
    fields = GGUFReader(tiny_gguf).fields
    expected = {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
    read = open_gguf(tiny_gguf).metadata
    assert list(read.items()) == list(expected.items())
    for key, value in expected.items():
        assert type(read[key]) is type(value), key
        if isinstance(value, list):
            assert [type(v) for v in read[key]] == [type(v) for v in value], key


def test_the_table_is_what_the_package_reads(tiny_gguf: Path) -> None:
    tensors, file = GGUFReader(tiny_gguf).tensors, open_gguf(tiny_gguf)
    assert file.tensor_names == tuple(t.name for t in tensors)
    for t in tensors:
        assert file.tensor(t.name).tobytes() == t.data.tobytes()


def test_the_package_is_spared_the_metadata(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("metadata was read twice")

    monkeypatch.setattr(GGUFReader, "_get_field_parts", refuse)
    with pytest.raises(AssertionError, match="read twice"):
        GGUFReader(tiny_gguf)
    assert open_gguf(tiny_gguf).metadata["general.architecture"] == "llama"
