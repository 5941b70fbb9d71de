"""Steps that work row by row as problems.

rms_norm, silu_mul, gelu_mul, add, scale, softcap: `r512-w4096` is 512 rows of 4096.
rope: `r512-h32-d128` is 512 rows of 32 heads of 128. embed: `r512-w576-v49152` is 512 rows out of
49152 of 576. An error may be twice that of the same equation in plain float32, plus 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from minfer import reference
from minfer.format import Floats, KvFormat
from minfer.ops import HALF, INTERLEAVED, Shape
from minfer.reference.dense import rotated
from tuning.bench.cases import ELEMENT_BYTES
from tuning.sweep.sized import Entry, Form, Given, Make, Sized, Wanted, kind_of

SPREAD = np.float32(4)  # of x: gates and caps bend, and are nearly straight in places
LESS = np.float32(0.25)  # of what x is multiplied by: 1e-6 stays more than a few roundings
SMALL = ((5, 1), (1, 577), (15, 17), (33, 15), (17, 576))  # rows, width
SMALL_HEADS = ((1, 1, 2), (15, 5, 7), (33, 3, 20), (17, 9, 64))  # rows, heads, head_dim
SMALL_VOCABULARIES = ((1, 1, 2), (15, 17, 33), (33, 32, 15), (17, 576, 577), (3, 96, 40))
ONE = np.float32(1)


class Rowwise(Sized):
    """A call of a step of the table."""

    table: ClassVar[dict[str, Entry]] = {}


def _budget(op: str, plain: Callable[..., Any], *tensors: Any, **scalars: Any) -> list[Wanted]:
    """The float64 answer, and how far from it an answer may be."""
    exact = getattr(reference, op)(*tensors, **scalars)
    with np.errstate(over="ignore"):
        error = np.abs(plain(*tensors, **scalars) - exact).max(initial=0)
    return [Wanted(exact, float(2 * error + 1e-6))]


def _exact(plain: Callable[..., Any], *tensors: Any, **scalars: Any) -> list[Wanted]:
    """Of steps that round once or not at all."""
    return [Wanted(plain(*tensors, **scalars))]


def _plain_rms_norm(x: Floats, weight: Floats, eps: float) -> Any:
    mean = np.cumsum(x * x, axis=1, dtype=np.float32)[:, -1:] / np.float32(x.shape[1])
    return x * (ONE / np.sqrt(mean + np.float32(eps))) * weight


def _plain_silu_mul(gate: Floats, up: Floats) -> Any:
    return gate / (ONE + np.exp(-gate)) * up


def _plain_gelu_mul(gate: Floats, up: Floats) -> Any:
    bent = np.float32((2 / np.pi) ** 0.5) * (gate + np.float32(0.044715) * gate * gate * gate)
    return gate / np.float32(2) * (ONE + np.tanh(bent)) * up


def _plain_softcap(x: Floats, cap: float) -> Any:
    return np.float32(cap) * np.tanh(x / np.float32(cap))


def plain_rope(x: Floats, positions: Any, cos: Floats, sin: Floats, pairing: str) -> Any:
    """rope of x [n, heads, d] in float32, every operation rounded by itself."""
    return rotated(x, cos[positions][:, None], sin[positions][:, None], pairing)


def _arrays(*last: str, **scalars: Any) -> Make:
    """Makes an x, and after it a tensor of its shape, or of one row, for each word in `last`."""

    def make(rng: np.random.Generator, _: KvFormat, rows: int, width: int) -> Given:
        shapes = [(rows, width) if word == "rows" else (width,) for word in last]
        first, again, *others = (
            rng.standard_normal(shape, dtype=np.float32)
            for shape in [(rows, width), (rows, width), *shapes]
        )
        tensors = (SPREAD * first, *(LESS * other for other in others))
        return Given(tensors, {0: SPREAD * again}, scalars)

    return make


def tables(n_pos: int, pairs: int) -> tuple[Floats, Floats]:
    """cos and sin [n_pos, pairs] of a model's angles."""
    angles = np.arange(n_pos)[:, None] * 10.0 ** -np.linspace(0, 4, pairs)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _heads(part: int, pairing: str) -> Make:
    """Makes arguments of rope, of which the first d // part dimensions turn."""

    def make(rng: np.random.Generator, _: KvFormat, *sizes: int) -> Given:
        first, again = (rng.standard_normal(sizes, dtype=np.float32) for _ in range(2))
        positions = rng.permutation(2 * len(first))[: len(first)].astype(np.int32)
        turned = tables(2 * len(first), sizes[-1] // part // 2)
        return Given((first, positions, *turned), {0: again}, {"pairing": pairing})

    return make


def _words(
    rng: np.random.Generator, fmt: KvFormat, rows: int, width: int, vocabulary: int
) -> Given:
    """Makes arguments of embed; the last token is among them."""
    weight = reference.encode_weight(
        rng.standard_normal((vocabulary, width), dtype=np.float32), fmt
    )
    tokens = rng.integers(0, vocabulary, rows).astype(np.int32)
    tokens[-1] = vocabulary - 1
    return Given((weight, tokens), {1: vocabulary - 1 - tokens}, {"fmt": fmt})


def _entry(truth: Any, way: Make, *ways: Make, arrays: int = 2) -> Entry:
    """An entry over rows [rows, width]; arrays: of that size that a call reads and writes."""
    return Entry(
        Form("r512-w4096"),
        shape=lambda rows, width: Shape(kind_of(rows), rows),
        bytes=lambda fmt, rows, width: 4 * arrays * rows * width,
        truth=truth,
        ways=(way, *ways),
        small=lambda rows, width: (*SMALL, (3, width)),
        stored=KvFormat.F32,
    )


def _embedded(weight: Any, tokens: Any, fmt: KvFormat) -> Any:
    return reference.decode_weight(weight[tokens], fmt)


Rowwise.table |= {
    "rms_norm": _entry(partial(_budget, "rms_norm", _plain_rms_norm), _arrays("one row", eps=1e-5)),
    "silu_mul": _entry(partial(_budget, "silu_mul", _plain_silu_mul), _arrays("rows"), arrays=3),
    "gelu_mul": _entry(partial(_budget, "gelu_mul", _plain_gelu_mul), _arrays("rows"), arrays=3),
    "add": _entry(partial(_exact, np.add), _arrays("rows"), _arrays("one row"), arrays=3),
    "scale": _entry(partial(_exact, lambda x, factor: x * np.float32(factor)), _arrays(factor=0.1)),
    "softcap": _entry(partial(_budget, "softcap", _plain_softcap), _arrays(cap=5.0)),
    "rope": Entry(
        Form("r512-h32-d128"),
        shape=lambda rows, heads, d: Shape(kind_of(rows), rows, heads, heads, d),
        bytes=lambda fmt, rows, heads, d: 4 * 2 * rows * heads * d,
        truth=partial(_budget, "rope", plain_rope),
        ways=(_heads(1, HALF), _heads(1, INTERLEAVED), _heads(2, HALF), _heads(2, INTERLEAVED)),
        small=lambda rows, heads, d: (*SMALL_HEADS, (3, heads, d)),
        stored=KvFormat.F32,
    ),
    "embed": Entry(
        Form("r512-w576-v49152"),
        shape=lambda rows, width, vocabulary: Shape(kind_of(rows), rows),
        bytes=lambda fmt, rows, width, vocabulary: (4 + ELEMENT_BYTES[fmt.value]) * rows * width,
        truth=partial(_exact, _embedded),
        ways=(_words,),
        small=lambda rows, width, vocabulary: (*SMALL_VOCABULARIES, (3, width, 5)),
        row=1,
    ),
}
