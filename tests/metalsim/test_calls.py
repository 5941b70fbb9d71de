"""Calls of the simulator are calls of MLX: its text, its words, its arrays."""

from __future__ import annotations

import threading
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

import numpy as np  # noqa: E402

from metalsim import MetalError, Mode, buffers, demo, launches, metal_kernel, running  # noqa: E402

COPY = "uint i = thread_position_in_grid.x;\nout[i] = x[i];"


def call(source: str, inputs: dict[str, Any], shape: tuple[int, ...], **options: Any) -> Any:
    """One output of `shape`, one thread an element."""
    maker = {k: options.pop(k) for k in ("header", "ensure_row_contiguous") if k in options}
    kernel = metal_kernel("called", list(inputs), ["out"], source, **maker)
    given = {
        "grid": (max(1, int(np.prod(shape))), 1, 1),
        "threadgroup": (64, 1, 1),
        "output_shapes": [shape],
        "output_dtypes": [mx.float32],
        **options,
    }
    with running(Mode.CHECKED):
        return kernel(inputs=list(inputs.values()), **given)[0]


def test_the_text_is_that_of_mlx() -> None:
    with launches() as seen:
        call(
            "out[thread_position_in_grid.x] = T(x[0]) + x_shape[0] * N;",
            {"x": mx.ones((9, 2), mx.float16)},
            (4,),
            template=[("T", mx.float32), ("N", 3), ("B", True)],
        )
    ((name, text),) = seen
    assert name == "called"
    assert text == (
        "template <typename T, int N, bool B>\n"
        "[[kernel]] void custom_kernel_called__float_3_1_float16_t_float(\n"
        "  const device float16_t* x [[buffer(0)]],\n"
        "  const constant int* x_shape [[buffer(1)]],\n"
        "  device float* out [[buffer(2)]],\n"
        "  uint3 thread_position_in_grid [[thread_position_in_grid]]) {\n"
        "out[thread_position_in_grid.x] = T(x[0]) + x_shape[0] * N;\n"
        "}\n\n"
        'template [[host_name("custom_kernel_called__float_3_1_float16_t_float")]] [[kernel]] '
        "decltype(custom_kernel_called__float_3_1_float16_t_float<float, 3, 1>) "
        "custom_kernel_called__float_3_1_float16_t_float<float, 3, 1>;\n"
    )


def test_template_arguments_arrive() -> None:
    source = "out[thread_position_in_grid.x] = T(2.75f) + (B ? N : 0);"
    out = call(source, {}, (2,), template=[("T", mx.int32), ("N", -3), ("B", True)])
    assert out.tolist() == [-1, -1]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::2, 1:],
        lambda x: x[::-1],
        lambda x: mx.broadcast_to(x[:, :1], (6, 4)),
        lambda x: x[2:4],
    ],
    ids=["transposed", "sliced", "reversed", "broadcast", "rows"],
)
def test_strided_inputs(view: Any) -> None:
    x = view(mx.arange(24.0).reshape(6, 4))
    source = (
        "uint i = thread_position_in_grid.x;\n"
        "out[i] = x[elem_to_loc(int64_t(i), x_shape, x_strides, x_ndim)];"
    )
    out = call(source, {"x": x}, x.shape, ensure_row_contiguous=False)
    assert mx.array_equal(out, x).item()


def test_strided_inputs_are_copied_to_rows() -> None:
    x = mx.arange(24.0).reshape(6, 4).T
    assert mx.array_equal(call(COPY, {"x": x}, x.shape), x).item()


def test_a_read_outside_of_a_strided_view_is_found() -> None:
    x = mx.arange(24.0).reshape(6, 4)[1:3, :2]
    source = "out[thread_position_in_grid.x] = x[7];"
    with pytest.raises(MetalError, match=r"'x'\[7\] \(size 6 elements\)"):
        call(source, {"x": x}, (1,), ensure_row_contiguous=False)


def test_scalars_small_and_empty_inputs() -> None:
    source = "out[thread_position_in_grid.x] = a + b + (c ? 100 : 0) + small[2] + empty_shape[0];"
    inputs = {"a": 1.5, "b": 2, "c": True, "small": mx.arange(3), "empty": mx.zeros((0, 5))}
    with launches() as seen:
        out = call(source, inputs, (1,))
    assert out.item() == 105.5
    assert "const constant float& a [[buffer(0)]]" in seen[0].text
    assert "const constant int32_t* small [[buffer(3)]]" in seen[0].text


@pytest.mark.parametrize("mode", Mode, ids=lambda m: m.value)
def test_empty_output(mode: Mode) -> None:
    with running(mode):
        out = call("out[thread_position_in_grid.x + 1] = 0;", {}, (0, 3), grid=(0, 1, 1))
    assert out.shape == (0, 3)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.int8, mx.uint64, mx.bool_])
def test_init_value_fills_every_type(dtype: Any) -> None:
    source = "uint i = thread_position_in_grid.x;\nif (i == 1) out[i] = 0;"
    out = call(source, {}, (3,), output_dtypes=[dtype], init_value=1.0)
    assert out.dtype == dtype
    assert out.astype(mx.int32).tolist() == [1, 0, 1]


def test_fast_mode_poisons_what_is_not_initialised() -> None:
    source = """
      threadgroup uint s[32];
      uint t = thread_index_in_threadgroup, i = thread_position_in_grid.x;
      uint before = s[t];
      s[t] = 1;
      if (i % 3) out[i] = before & 0xFFFFFFF0;
    """
    kernel = metal_kernel("poison", ["x"], ["out"], source)
    out = kernel(
        inputs=[mx.ones(8)],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.uint32],
    )[0]
    expected = np.where(np.arange(64) % 3, 0xFFFFFFF0, 0xFFFFFFFF)
    np.testing.assert_array_equal(np.array(out), expected)


def test_ragged_threadgroups_and_thread_attributes() -> None:
    names = {
        "thread_position_in_grid": lambda i: i,
        "thread_position_in_threadgroup": lambda i: i % 48,
        "threadgroup_position_in_grid": lambda i: i // 48,
        "threads_per_threadgroup": lambda i: np.where(i < 96, 48, 4),
        "dispatch_threads_per_threadgroup": lambda i: i * 0 + 48,
        "threads_per_grid": lambda i: i * 0 + 100,
        "grid_size": lambda i: i * 0 + 100,
        "threadgroups_per_grid": lambda i: i * 0 + 3,
        "grid_origin": lambda i: i * 0,
    }
    scalars = {
        "thread_index_in_threadgroup": lambda i: i % 48,
        "simdgroup_index_in_threadgroup": lambda i: i % 48 // 32,
        "thread_index_in_simdgroup": lambda i: i % 48 % 32,
        "simdgroups_per_threadgroup": lambda i: np.where(i < 96, 2, 1),
        "dispatch_simdgroups_per_threadgroup": lambda i: i * 0 + 2,
        "dispatch_quadgroups_per_threadgroup": lambda i: i * 0 + 12,
        "quadgroups_per_threadgroup": lambda i: np.where(i < 96, 12, 1),
        "quadgroup_index_in_threadgroup": lambda i: i % 48 // 4,
        "thread_index_in_quadgroup": lambda i: i % 48 % 4,
        "threads_per_simdgroup": lambda i: i * 0 + 32,
        "thread_execution_width": lambda i: i * 0 + 32,
    }
    values = [f"{name}.x" for name in names] + list(scalars)
    source = "".join(
        f"out[thread_position_in_grid.x * {len(values)} + {k}] = {v};\n"
        for k, v in enumerate(values)
    )
    out = call(source, {}, (100, len(values)), grid=(100, 1, 1), threadgroup=(48, 1, 1))
    i = np.arange(100)
    expected = np.stack([f(i) for f in [*names.values(), *scalars.values()]], 1)
    np.testing.assert_array_equal(np.array(out), expected)


def test_grids_have_three_dimensions() -> None:
    source = (
        "uint3 p = thread_position_in_grid, n = threads_per_grid;\n"
        "out[(p.z * n.y + p.y) * n.x + p.x] = p.x + 10 * p.y + 100 * p.z + "
        "1000 * thread_index_in_threadgroup;"
    )
    out = np.array(call(source, {}, (2, 3, 5), grid=(5, 3, 2), threadgroup=(4, 2, 512)))
    assert out[1, 2, 4] == 124 + 1000 * 1  # the corner threadgroup is 1 x 1 x 2
    assert out[1, 1, 3] == 113 + 1000 * (3 + 4 * 1 + 8 * 1)


def test_mlx_refuses_in_its_own_words() -> None:
    with pytest.raises(ValueError, match=r"\[metal_kernel\] Must specify at least one output."):
        metal_kernel("none", ["x"], [], COPY)
    kernel = metal_kernel("refused", ["x"], ["out"], COPY)
    good = {
        "inputs": [mx.ones(4)],
        "grid": (4, 1, 1),
        "threadgroup": (4, 1, 1),
        "output_shapes": [(4,)],
        "output_dtypes": [mx.float32],
    }
    with pytest.raises(ValueError, match=r"\[metal_kernel\] .*inputs.*1.*2"):
        kernel(**{**good, "inputs": [mx.ones(4), mx.ones(4)]})
    with pytest.raises(ValueError, match=r"\[metal_kernel\] .*GPU"):
        kernel(**good, stream=mx.cpu)


def test_mlx_drops_parameters_when_no_attribute_is_used() -> None:
    # MLX ends the list after the first of two outputs if shapes are injected: a Mac refuses it.
    source = "a[0] = x_shape[0] + x_strides[0]; b[0] = x_ndim;"
    kernel = metal_kernel("short", ["x"], ["a", "b"], source)
    with pytest.raises(MetalError, match="does not compile"):
        kernel(
            inputs=[mx.ones(9)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,), (1,)],
            output_dtypes=[mx.float32] * 2,
        )


def test_two_threads_at_once() -> None:
    results: dict[int, Any] = {}

    def work(seed: int) -> None:
        case = demo.softmax(2, 100 + seed)
        with running(Mode.CHECKED if seed % 2 else Mode.FAST):
            outs = [np.array(case.run()[0]) for _ in range(5)]
        results[seed] = max(float(abs(out - case.answer()).max()) for out in outs)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and max(results.values()) < 2e-7


def test_memory_is_that_of_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LARGE", 1 << 20)
    view = np.zeros(2 << 20, np.uint8)[4:]
    assert buffers.of_array(view).pointer == view.ctypes.data  # no copy
    source = """
      uint i = thread_position_in_grid.x;
      ((device float4*)out)[i] = ((const device float4*)x)[i * 1024];  // aligned to 8 bytes here
    """
    kernel = metal_kernel("large", ["x"], ["out"], source)
    x = mx.ones((4 << 20,))
    mx.eval(x)
    for mode, size in ((Mode.FAST, 4096), (Mode.FAST, 512 << 10), (Mode.CHECKED, 512 << 10)):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with running(mode):
            out = kernel(
                inputs=[x],
                grid=(1024, 1, 1),
                threadgroup=(64, 1, 1),
                output_shapes=[(size,)],
                output_dtypes=[mx.float32],
                init_value=0.0,
            )[0]
        assert mx.get_peak_memory() - before <= out.nbytes + 4096
        assert out[:4096].sum().item() == 4096
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    x = x + 1  # in place, if nobody else holds the old one
    mx.eval(x)
    assert mx.get_peak_memory() - before < x.nbytes / 2
