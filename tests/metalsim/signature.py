"""Reads the parameter list of a kernel from the MSL text that MLX made.

MLX writes one parameter a line between `[[kernel]] void NAME(` and `) {`: inputs with the shape,
strides and ndim of some, outputs, thread attributes; the buffers are numbered in that order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from metalsim.errors import MetalError

_BUFFER = re.compile(r"(const )?(device|constant) ([\w<>]+)([*&]) (\w+) \[\[buffer\(\d+\)\]\]")
_ATTRIBUTE = re.compile(r"(?:uint|uint3) (\w+) \[\[(\w+)\]\]")
_INSTANCE = re.compile(r"^template \[\[host_name.*decltype\((\w+<.*>)\) \1;$", re.MULTILINE)
_FACTS = ("shape", "strides", "ndim")
MAX_BUFFERS = 31  # of a Metal function


@dataclass(frozen=True)
class Buffer:
    """One buffer argument: `kind` is "input", "output", or the fact of an input it holds."""

    kind: str
    name: str  # of the input or output it belongs to
    type: str  # as written: "const device float16_t"
    by_reference: bool

    @property
    def parameter(self) -> str:
        return self.name if self.kind in ("input", "output") else f"{self.name}_{self.kind}"


@dataclass(frozen=True)
class Signature:
    call: str  # the kernel's name, with template arguments if there are any
    buffers: tuple[Buffer, ...]
    attributes: tuple[str, ...]


def _buffer(match: re.Match[str], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Buffer:
    const, space, type_, mark, parameter = match.groups()
    type_ = f"{const or ''}{space} {type_}"
    if parameter in inputs or parameter in outputs:
        kind = "input" if parameter in inputs else "output"
        return Buffer(kind, parameter, type_, mark == "&")
    name, _, fact = parameter.rpartition("_")
    if name not in inputs or fact not in _FACTS:
        raise MetalError(f"parameter {parameter!r} belongs to no input or output")
    return Buffer(fact, name, type_, mark == "&")


def read(name: str, text: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Signature:
    """The signature of kernel `name` in `text`."""
    start = f"[[kernel]] void {name}("
    at = text.find(start)
    if at < 0:
        raise MetalError(f"no kernel {name!r} in the text")
    parameters = text[at + len(start) : text.index(") {", at)]
    buffers = [_buffer(m, inputs, outputs) for m in _BUFFER.finditer(parameters)]
    if len(buffers) > MAX_BUFFERS:
        raise MetalError(f"{len(buffers)} buffers are over Metal's limit of {MAX_BUFFERS}")
    attributes = [m[1] for m in _ATTRIBUTE.finditer(parameters)]
    instance = _INSTANCE.search(text, at)
    return Signature(instance[1] if instance else name, tuple(buffers), tuple(attributes))
