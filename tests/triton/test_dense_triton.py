"""Dense steps and products where a GPU has its own way: strides, rounded operands, packed rows.

What every package promises of them is in tests/kernels, which runs with `--on cuda` too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from arrays import normal  # noqa: E402
from test_cells_triton import GPU, needs_triton  # noqa: E402
from under_test import apart  # noqa: E402

from minfer import kernels_triton as backend  # noqa: E402
from minfer import reference  # noqa: E402
from minfer.errors import Refusal  # noqa: E402
from minfer.format import KvFormat  # noqa: E402
from minfer.kernels_triton import dense, matmul, matvec  # noqa: E402
from minfer.reference.rounding import rounded  # noqa: E402

pytestmark = needs_triton
F32, F16, Q8_0 = KvFormat
ROWS = [1, 2, 17, 65] if not GPU else [*range(1, 18), 63, 64, 65, 512]
PRODUCTS: dict[str, dict[KvFormat, Any]] = {
    "matvec": {F32: matvec.matvec_lanes, F16: matvec.matvec_lanes, Q8_0: matvec.matvec_blocks},
    "matmul": {F32: matmul.matmul_tiles, F16: matmul.matmul_tiles, Q8_0: matmul.matmul_blocks},
}
EACH = pytest.mark.parametrize("name", PRODUCTS)


def product(
    name: str, fmt: KvFormat, weight: np.ndarray, x: Any, activations: str = "f32"
) -> np.ndarray:
    """The product of a weight in `fmt` and rows, numpy or a tensor."""
    x = backend.from_host(x) if isinstance(x, np.ndarray) else x
    config = {} if fmt is Q8_0 else {"activations": activations}
    out = PRODUCTS[name][fmt](backend.from_host(weight), x, fmt=fmt, config=config)
    return backend.to_host(out)


# -- products -------------------------------------------------------------------------------------

ROUNDINGS = ["f16", "bf16"] if GPU else ["f16"]


@EACH
@pytest.mark.parametrize("fmt", [F32, F16], ids=str)
@pytest.mark.parametrize("activations", ROUNDINGS)
@pytest.mark.parametrize(("n_in", "n_out"), [(1, 1), (33, 64), (577, 65), (1100, 17), (33, 2050)])
def test_operands_are_rounded_and_sums_are_not(
    name: str, fmt: KvFormat, activations: str, n_in: int, n_out: int
) -> None:
    weight, x = reference.encode_weight(normal(n_out, n_in), fmt), normal(18, n_in, seed=1)
    seen = rounded(weight.astype(np.float32), activations)
    exact = reference.matvec(seen, rounded(x, activations), fmt=F32)
    out = product(name, fmt, weight, x, activations)
    # tensor cores drop what is below the last bit of the sums they add to
    bound = 2**-21 * (np.abs(rounded(x, activations)) @ np.abs(seen).T).max()
    assert out.dtype == np.float32 and np.abs(out - exact).max() <= bound
    plain = reference.matvec(weight.astype(np.float32), x, fmt=F32)
    assert n_in == 1 or np.abs(out - plain).max() > bound  # so that something was rounded


@EACH
@pytest.mark.parametrize("activations", ROUNDINGS)
@pytest.mark.parametrize("n_out", [33, 2048])
def test_a_rounded_row_depends_on_itself_only(name: str, activations: str, n_out: int) -> None:
    if n_out == 2048 and not GPU and name == "matvec":
        pytest.skip("tiles do not change with the width of a weight")
    n_in = 577 if n_out < 2048 else 64
    weight, x = normal(n_out, n_in).astype(np.float16), normal(max(ROWS), n_in, seed=1)
    whole = product(name, F16, weight, x, activations)
    for n in ROWS:
        assert (product(name, F16, weight, x[-n:], activations) == whole[-n:]).all(), n


@EACH
@pytest.mark.parametrize("fmt", KvFormat, ids=str)
@pytest.mark.parametrize("n", [1, 5, 33])
@pytest.mark.parametrize(("shift", "extra"), [(0, 32), (16, 16), (3, 5)])
def test_rows_that_lie_apart_have_the_same_bits(
    name: str, fmt: KvFormat, n: int, shift: int, extra: int
) -> None:
    weight, x = reference.encode_weight(normal(9, 96), fmt), normal(n, 96, seed=1)
    found = product(name, fmt, weight, apart(x, shift, extra))
    assert (found == product(name, fmt, weight, x)).all()


@pytest.mark.parametrize("n", [1, 3, 9, 17])
@pytest.mark.parametrize("pack", [True, False])
def test_rows_packed_before_are_those_packed_on_the_way(
    monkeypatch: pytest.MonkeyPatch, n: int, pack: bool
) -> None:
    monkeypatch.setattr(matvec, "PACK_BYTES", 0 if pack else 1 << 40)
    weight, x = reference.encode_weight(normal(35, 1088), Q8_0), normal(n, 1088, seed=1)
    x[0, :64], x[-1, 70] = 0, 1e-30
    wanted = reference.matvec(weight, x, fmt=Q8_0)
    assert (product("matvec", Q8_0, weight, x) == wanted).all()


@EACH
@pytest.mark.parametrize("pack", [True, False])
def test_damaged_blocks_reach_their_row_and_column_only(
    monkeypatch: pytest.MonkeyPatch, name: str, pack: bool
) -> None:
    monkeypatch.setattr(matvec, "PACK_BYTES", 0 if pack else 1 << 40)
    weight, x = normal(19, 96), normal(18, 96, seed=1)
    weight[18, 95], x[17, 40] = np.inf, np.nan  # in the last row, which other lanes read again
    stored = reference.encode_weight(weight, Q8_0)
    stored[16, -34:-32] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)  # a last block's
    out, wanted = product(name, Q8_0, stored, x), reference.matvec(stored, x, fmt=Q8_0)
    assert np.isnan(out[17]).all() and np.isnan(out[:, 18]).all()
    assert np.isinf(out[:17, 16]).all() and np.isfinite(out[:17, :16]).all()
    assert (out[:17, :18] == wanted[:17, :18]).all()


@pytest.mark.skipif(GPU, reason="a GPU multiplies bf16")
@EACH
def test_the_interpreter_says_that_it_has_no_bf16(name: str) -> None:
    with pytest.raises(Refusal, match="interpreter multiplies no bf16"):
        product(name, F32, normal(2, 8), normal(2, 8), "bf16")


# -- rows -----------------------------------------------------------------------------------------


def test_rows_of_activations_are_taken_by_number() -> None:
    """The rows of a batch whose logits are wanted, named by a tensor."""
    x = backend.from_host(normal(6, 1100))
    at = backend.from_host(np.array([5, 0, 5], np.int32))
    assert torch.equal(dense.embed_rows(x, at, fmt=F32, config={}), x[[5, 0, 5]])


def test_products_refuse_rows_of_another_type() -> None:
    with pytest.raises(Refusal, match="x must be float32, not float16"):
        product("matvec", F32, normal(2, 8), normal(2, 8).astype(np.float16))
