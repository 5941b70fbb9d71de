"""Source lines of code addresses, from the DWARF 4 line table of a shared object.

Only what clang writes for these kernels is read: 64-bit little-endian ELF, `.debug_line`
uncompressed. See the DWARF standard, version 4, section 6.2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

# Opcodes of the line program (section 6.2.5); those that are not named change no address or line.
EXTENDED, COPY, ADVANCE_PC, ADVANCE_LINE, SET_FILE = 0, 1, 2, 3, 4
CONST_ADD_PC, FIXED_ADVANCE_PC = 8, 9
END_SEQUENCE, SET_ADDRESS = 1, 2  # extended


class _Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return int(value)

    def text(self) -> str:
        end = self.data.index(b"\0", self.at)
        found = self.data[self.at : end].decode()
        self.at = end + 1
        return found

    def leb(self, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            shift += 7
            if not byte & 128:
                return value - (1 << shift) if signed and byte & 64 else value


def _section(data: bytes, name: bytes) -> bytes:
    table = struct.unpack_from("<Q", data, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for label, _, _, _, offset, length in headers:
        start = strings + label
        if data[start : start + len(name) + 1] == name + b"\0":
            return data[offset : offset + length]
    return b""


def _rows(data: bytes) -> Iterator[tuple[int, str, int, bool]]:
    """(address, file, line, end of sequence) of every row of every unit."""
    unit = _Reader(data)
    while unit.at < len(data):
        end = unit.take("I") + unit.at
        assert unit.take("H") == 4, "kernels are built with -gdwarf-4"
        program = unit.take("I") + unit.at
        step, _, _ = unit.take("B"), unit.take("B"), unit.take("B")
        line_base, line_range, base = unit.take("b"), unit.take("B"), unit.take("B")
        operands = [0] + [unit.take("B") for _ in range(base - 1)]
        while unit.text():  # folders
            pass
        files = [""]
        while name := unit.text():
            files.append(name)
            unit.leb(), unit.leb(), unit.leb()
        unit.at = program
        yield from _run(unit, end, files, (step, line_base, line_range, base), operands)


def _run(
    unit: _Reader,
    end: int,
    files: list[str],
    form: tuple[int, int, int, int],
    operands: list[int],
) -> Iterator[tuple[int, str, int, bool]]:
    step, line_base, line_range, base = form
    address, file, line = 0, 1, 1
    while unit.at < end:
        code = unit.take("B")
        if code >= base:  # a special opcode: both advance, and a row
            address += (code - base) // line_range * step
            line += line_base + (code - base) % line_range
            yield address, files[file], line, False
        elif code == EXTENDED:
            after = unit.leb() + unit.at
            extended = unit.take("B")
            if extended == END_SEQUENCE:
                yield address, files[file], line, True
                address, file, line = 0, 1, 1
            elif extended == SET_ADDRESS:
                address = unit.take("Q")
            unit.at = after
        elif code == COPY:
            yield address, files[file], line, False
        elif code == ADVANCE_PC:
            address += unit.leb() * step
        elif code == ADVANCE_LINE:
            line += unit.leb(signed=True)
        elif code == SET_FILE:
            file = unit.leb()
        elif code == CONST_ADD_PC:
            address += (255 - base) // line_range * step
        elif code == FIXED_ADVANCE_PC:
            address += unit.take("H")
        else:
            for _ in range(operands[code]):
                unit.leb()


def line_of(library: Path, offset: int) -> tuple[str, int] | None:
    """(file, line) of the code at byte `offset` of the loaded `library`, if it is known."""
    start, place = 0, None
    for address, file, line, last in _rows(_section(library.read_bytes(), b".debug_line")):
        if place and start <= offset < address:
            return place
        if last:
            place = None
        elif line:  # line 0 is code that the compiler gives no line: it goes with what is before
            start, place = address, (file, line)
    return None
