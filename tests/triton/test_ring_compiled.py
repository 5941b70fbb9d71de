"""What numpy cannot see of `ring`: layouts, read from the compiler, which needs no GPU."""

from __future__ import annotations

import re

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from minfer.kernels_triton._ring import _attn_ring_kernel
from minfer.kernels_triton._ring_tile import copy_layout, key_layout, ring_layout, value_layout

pytestmark = pytest.mark.skipif(knobs.runtime.interpret, reason="the interpreter has no Gluon")

POINTERS = {
    "k_scales_ptr": "*i64", "v_scales_ptr": "*i64", "k_ptr": "*i32", "v_ptr": "*i32",
    "q_ptr": "*fp32", "states_ptr": "*fp32", "accs_ptr": "*fp32",
    "positions_ptr": "*i32", "window_ptr": "*i32",
}  # fmt: skip
SCALARS = {"width": "i32", "factor": "fp32", "n_split": "i32", "n_rows": "i32"}


def compile_for(kernel, types, constants, warps):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False, "maxnreg": 168}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def test_the_four_copies_of_a_word_are_neighbours():
    """Assembly that takes four elements takes neighbours in registers, whatever their indices."""
    sizes = {"HKV": 2, "GROUP": 4, "D": 128, "MODE": 2, "W": 2, "BN": 16, "STAGES": 3}
    compiled = compile_for(_attn_ring_kernel, POINTERS | SCALARS, sizes, 2)
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = #ttg.linear<{register = \[(.*?)\], lane", text, re.M))
    packed = re.findall(r"packed_element = 4.*?-> tensor<\S+ (#\w+)>", text)
    assert len(packed) == 2  # both halves of a head
    for name in packed:
        assert layouts[name].startswith("[0, 0, 1], [0, 0, 2], [0, 0, 4]")
    assert "ld.local" not in compiled.asm["ptx"]


@gluon.jit
def _conflicts_kernel(pointer, W: gl.constexpr, BN: gl.constexpr, D: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.int32, [W, BN, D // 4], ring_layout(W, BN, D))
    SHAPE: gl.constexpr = [W, BN, D // 4]
    COPY: gl.constexpr = gl.distributed_type(gl.int32, SHAPE, copy_layout(W, BN, D))
    KEYS: gl.constexpr = gl.distributed_type(gl.int32, SHAPE, key_layout(W, BN, D))
    VALUES: gl.constexpr = gl.distributed_type(gl.int32, SHAPE, value_layout(W, BN, D))
    gl.static_assert(gl.bank_conflicts(COPY, ring.type) == 0)
    gl.static_assert(gl.bank_conflicts(KEYS, ring.type) == 0)
    gl.static_assert(gl.bank_conflicts(VALUES, ring.type) == 0)


@pytest.mark.parametrize("warps", [2, 8])
@pytest.mark.parametrize("d", [64, 128])
def test_no_bank_conflicts(d, warps):
    compile_for(_conflicts_kernel, {"pointer": "*i32"}, {"W": warps, "BN": 16, "D": d}, warps)
