"""The metadata keys of one architecture, read strictly: what would be left out is refused."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection
from typing import TypeVar

from minfer.errors import Refusal
from minfer.models.gguf import GgufFile
from minfer.models.gguf_guard import damaged

Number = TypeVar("Number", int, float)


def architecture_of(file: GgufFile) -> str:
    """The value of `general.architecture`; Damaged if there is none."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise damaged(file.path, "it lacks the metadata key 'general.architecture'")
    return name


def check_shape(file: GgufFile, name: str, shape: tuple[int, ...]) -> None:
    """Damaged if the tensor is missing or has another shape."""
    found = file.tensor_info(name).shape
    if found != shape:
        raise damaged(
            file.path,
            f"tensor {name!r} has shape {list(found)}, its metadata asks for {list(shape)}",
            tensor=name,
            wanted=shape,
            found=found,
        )


class Keys:
    """The keys `<architecture>.*` of a file. understood: all that may be there, without prefix."""

    def __init__(self, file: GgufFile, architecture: str, understood: Collection[str]) -> None:
        self.file, self._prefix = file, f"{architecture}."
        for key in file.metadata:
            if key.startswith(self._prefix) and key.removeprefix(self._prefix) not in understood:
                raise self.unsupported(key.removeprefix(self._prefix))

    def has(self, key: str) -> bool:
        return self._prefix + key in self.file.metadata

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; a default of 0 is none."""
        return self._number(key, int, default or None)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        return self._number(key, float, default)

    def text(self, key: str, default: str) -> str:
        value = self.file.metadata.get(self._prefix + key, default)
        if isinstance(value, str):
            return value
        raise self._mistyped(key, "text")

    def unsupported(self, key: str) -> Refusal:
        """The refusal of a key whose value would be left out."""
        name = self._prefix + key
        return Refusal(
            "0.3",
            f"{self.file.path} sets {name!r} to {reprlib.repr(self.file.metadata[name])}, which is "
            "not supported and could change answers; use a model without it",
            {"key": name},
        )

    def _number(self, key: str, kind: type[Number], default: Number | None) -> Number:
        value = self.file.metadata.get(self._prefix + key, default)
        if value is None:
            name = self._prefix + key
            raise damaged(self.file.path, f"it lacks the metadata key {name!r}", key=name)
        if isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf:
            return value
        raise self._mistyped(key, f"a positive {kind.__name__}")

    def _mistyped(self, key: str, wanted: str) -> Refusal:
        name = self._prefix + key
        found = reprlib.repr(self.file.metadata[name])
        message = f"metadata key {name!r} is {found} instead of {wanted}"
        return damaged(self.file.path, message, key=name)
