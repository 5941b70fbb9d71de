"""A decode step writes its rows in place: no second arena, by MLX's own count of its memory."""

from __future__ import annotations

import pytest
import under_test

mx = pytest.importorskip("mlx.core")

from device_models import Model  # noqa: E402

from minfer.format import KvFormat, cell_bytes  # noqa: E402

pytestmark = pytest.mark.skipif(under_test.device != "metal", reason="by --on metal")
MIB = 1 << 20
ARENA = 256 * MIB
ROOM = 24 * MIB  # for what a step computes, a tenth of the arena


@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_a_step_takes_no_second_arena(fmt: KvFormat) -> None:
    sizes = Model("metal", fmt.value, n_ctx=8).store
    row = 2 * sizes.n_layer * cell_bytes(fmt, sizes.n_head_kv * sizes.head_dim)
    model = Model("metal", fmt.value, n_ctx=ARENA // row)
    model.store.reserve(0, 20)
    model.feed(0, [5, 90, 41], "prefill")
    for token in (7, 8, 9):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        assert before >= ARENA
        model.feed(0, [token])
        assert mx.get_peak_memory() - before < ROOM
    assert model.store.pool_generation == 0
