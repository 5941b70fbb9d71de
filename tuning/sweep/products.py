"""Products with a weight as problems: `4096x14336-r16` is 16 rows of 4096 by 14336 columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from minfer import reference
from minfer.format import BLOCK, KvFormat
from minfer.ops import DECODE, PREFILL, Numerics, Shape
from tuning.bench.cases import ELEMENT_BYTES, Work
from tuning.bench.checks import Check
from tuning.sweep.problem import Case, Problem, Truths, misshapen, same_values, within

NAME = re.compile(r"(?P<n_in>\d+)x(?P<n_out>\d+)-r(?P<rows>\d+)")
CHECKED = 4  # rows whose products are compared with the oracle
SMALL = ((1, 96, 33), (3, 256, 130), (17, 576, 65))  # rows, n_in, n_out


@dataclass(frozen=True)
class Product(Case):
    """x [rows, n_in] @ weight.T, weight [n_out, n_in]."""

    rows: int
    n_in: int
    n_out: int

    @property
    def shape(self) -> Shape:
        return Shape(DECODE if self.op == "matvec" else PREFILL, self.rows)

    @property
    def cold(self) -> bool:
        return self.op == "matvec"

    def fits(self, fmt: KvFormat) -> bool:
        return fmt is not KvFormat.Q8_0 or self.n_in % BLOCK == 0

    def work(self, fmt: KvFormat) -> Work:
        products = float(self.rows * self.n_out * self.n_in)
        read = ELEMENT_BYTES[fmt.value] * self.n_out * self.n_in if self.cold else 0
        if fmt is KvFormat.Q8_0:
            return Work(bytes=read, int8=products)
        return Work(bytes=read, fma=products)

    def problem(self, fmt: KvFormat) -> Problem:
        return _problem(self.op, fmt, self.rows, self.n_in, self.n_out)

    def gate(self, fmt: KvFormat) -> list[Problem]:
        return [_problem(self.op, fmt, *size) for size in SMALL]


class Matvec(Product):
    op: ClassVar[str] = "matvec"


class Matmul(Product):
    op: ClassVar[str] = "matmul"


def parse(op: str, name: str) -> Product | None:
    """The case of that name; None if it is not a name of such a case."""
    found = NAME.fullmatch(name)
    size = {key: int(text) for key, text in found.groupdict().items()} if found else {}
    kind = Matvec if op == "matvec" else Matmul
    return kind(name, **size) if size and min(size.values()) > 0 else None


def _problem(op: str, fmt: KvFormat, rows: int, n_in: int, n_out: int) -> Problem:
    rng = np.random.default_rng([rows, n_in, n_out])
    weight = rng.standard_normal((n_out, n_in), dtype=np.float32) * np.float32(n_in**-0.5)
    stored = reference.encode_weight(weight, fmt)
    versions = [rng.standard_normal((rows, n_in), dtype=np.float32) for _ in range(2)]
    picked = np.unique(np.linspace(0, rows - 1, min(rows, CHECKED)).astype(int))

    def truth(version: int, numerics: Numerics) -> tuple[Any, float]:
        """Products of the picked rows, and how far from them an answer may be."""
        x = versions[version][picked]
        if fmt is KvFormat.Q8_0:
            return reference.matvec(stored, x, fmt=fmt), 0.0
        seen = reference.round_query(x, numerics.query)
        exact = reference.matvec(stored, seen, fmt=fmt)
        plain = np.abs(_plain(stored.astype(np.float32), seen) - exact).max()
        return exact, float(2 * plain + 1e-6)

    truths = Truths(truth)

    def judge(version: int, numerics: Numerics, out: Any) -> Check:
        wanted, allowed = truths(version, numerics)
        if (wrong := misshapen(out, (rows, n_out))) is not None:
            return wrong
        if not np.isfinite(out).all():
            return within(np.nan, 0, "values that are not finite")
        if fmt is KvFormat.Q8_0:
            return same_values(out[picked], wanted)
        return within(np.abs(out[picked] - wanted).max(), allowed, "absolute")

    tensors = (stored, versions[0])
    return Problem(op, tensors, {"fmt": fmt}, {1: versions[1]}, judge, read=(0,))


def _plain(weight: Any, x: Any) -> Any:
    """x @ weight.T in f32, one product after the other added to one sum."""
    return np.stack([np.cumsum(weight * row, axis=1, dtype=np.float32)[:, -1] for row in x])
