"""Faults planted in the texts of our Metal kernels, and what sees each of them.

The simulator sees faults of memory and of order. A wrong number it cannot see; the oracle does.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import under_test

pytest.importorskip("mlx.core")

import metalsim
from every_kernel import TOUR
from metalsim import MetalError

pytestmark = pytest.mark.skipif(
    not under_test.simulated(), reason="runs by --on metal, in the simulator"
)

STEPS = {step.name: step for step in TOUR}


@dataclass(frozen=True)
class Fault:
    """A kernel with `new` in place of `old` in its text.

    step: the name of the step of the tour whose kernel it is. words: a pattern that the error of
    the simulator matches; none if only the oracle sees the fault.
    """

    title: str
    step: str
    old: str
    new: str
    words: str = ""

    def edit(self, name: str, text: str) -> str:
        if name != STEPS[self.step].kernel:
            return text
        assert text.count(self.old) == 1, f"{self.title} fits {text.count(self.old)} places"
        return text.replace(self.old, self.new)


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FIRST_LANE, STORE = (
    "if (thread_index_in_simdgroup == 0)",
    "parts[simdgroup_index_in_threadgroup] = sum;",
)

SEEN_BY_THE_SIMULATOR = (
    Fault(
        "a key past the window is scored",
        "attn_rows-causal-q8_0",
        "lane <= ahead;",
        "lane <= ahead + 1;",
        r"out-of-bounds read of 2 bytes: 'k_scales'",
    ),
    Fault(
        "a value past the window is added",
        "attn_rows-causal-q8_0",
        "n <= min(ahead, 31)",
        "n <= min(ahead + 1, 31)",
        r"out-of-bounds read of 2 bytes: 'v_scales'",
    ),
    Fault(
        "rows of K are one element wider than they are",
        "attn_rows-runs-f16",
        "k = {k_rows, k_scales, row_width, n_scales}",
        "k = {k_rows, k_scales, row_width + 1, n_scales}",
        r"out-of-bounds read of 2 bytes: 'k_rows'",
    ),
    Fault(
        "pieces are read from rows that are not aligned to them",
        "attn_split-runs-f16",
        "v = {v_rows, v_scales, row_width, n_scales}",
        "v = {v_rows, v_scales, row_width - 1, n_scales}",
        r"misaligned read of 8 bytes: 'v_rows'",
    ),
    Fault(
        "a pointer to device memory is a thread's own",
        "attn_rows-runs-f16",
        "query_window(const device int* window",
        "query_window(const thread int* window",
        r"does not compile",
    ),
    Fault(
        "a pointer has no address space",
        "matvec_blocks-rows",
        "scale_of(const device uint8_t* block)",
        "scale_of(const uint8_t* block)",
        r"a pointer without an address space",
    ),
    Fault(
        "a barrier orders the wrong memory",
        "rms_norm_rows",
        BARRIER,
        "threadgroup_barrier(mem_flags::mem_device);",
        r"data race on 'parts'",
    ),
    Fault(
        "a simdgroup's barrier stands for a threadgroup's",
        "rms_norm_rows",
        BARRIER,
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
        r"read of uninitialised threadgroup memory 'parts'",
    ),
    Fault(
        "lanes wait at different barriers",
        "rms_norm_rows",
        f"{FIRST_LANE} {STORE}\n  {BARRIER}",
        f"{FIRST_LANE} {{ {STORE} {BARRIER} }}\n  else {BARRIER}",
        r"divergent threadgroup_barrier",
    ),
    Fault(
        "threads without a row leave before a barrier",
        "attn_flash-runs-f16",
        "if (count > 0) {",
        "if (row < count) {",
        r"divergent",
    ),
    Fault(
        "a reduction in a branch",
        "matvec_lanes-f32",
        "const float4 total = simd_sum(sums[c]);",
        "const float4 total = lane < 4 ? simd_sum(sums[c]) : sums[c];",
        r"divergent simd operation",
    ),
    Fault(
        "an array is too small by one",
        "attn_flash-runs-f16",
        "threadgroup int cells[32];",
        "threadgroup int cells[31];",
        r"index 31 is outside of 'cells' of type 'int\[31\]'",
    ),
    Fault(
        "a tile is larger than a threadgroup's memory",
        "attn_flash-runs-f16",
        "threadgroup float4 pieces[8 * LD];",
        "threadgroup float4 pieces[80 * LD];",
        r"threadgroup memory of \d+ bytes is over the limit",
    ),
    Fault(
        "the last element of a row is not written",
        "rope_rows-half",
        "start + i < n;",
        "start + i < n - 1;",
        r"output 'out' is not wholly written: 3 of 99 elements",
    ),
    Fault(
        "spare rows write the answer of the last one too",
        "attn_flash-runs-f16",
        "if (row < count) {",
        "if (row < ROWS) {",
        r"data race on 'out'",
    ),
    Fault(
        "simdgroups without keys leave no state",
        "attn_split-runs-f16",
        "if (lane == 0) {",
        "if (lane == 0 && l[h] > 0.0f) {",
        r"read of uninitialised threadgroup memory 'tops'",
    ),
    Fault(
        "the padding of a cell is left as it was",
        "store_cells_rows_q8_0",
        "  scales[row * parts + part] = ",
        "  if (part * 32 < n) scales[row * parts + part] = ",
        r"output 'out_scales' is not wholly written: 3 of 12",
    ),
)

SEEN_BY_THE_ORACLE = (
    Fault(
        "the scale of the next block",
        "attn_rows-causal-q8_0",
        "at / 32]);\n  return float(",
        "at / 32 + 1]);\n  return float(",
    ),
    Fault(
        "V is decoded with the scales of K",
        "attn_split-causal-q8_0",
        "v = {v_rows, v_scales,",
        "v = {v_rows, k_scales,",
    ),
    Fault(
        "older values do not decay",
        "attn_rows-runs-f16",
        "acc[i] *= decay;",
        "acc[i] *= 1.0f;",
    ),
    Fault(
        "older weights do not decay",
        "attn_flash-runs-f16",
        "l = l * decay + row_sum(total);",
        "l = l + row_sum(total);",
    ),
    Fault(
        "the last partition is not joined",
        "attn_combine-causal-q8_0",
        "index <= last;",
        "index < last;",
    ),
    Fault(
        "a partition is joined as if it had the largest score",
        "attn_combine-causal-q8_0",
        "acc = accs[n_waits] * a + acc * b;",
        "acc = accs[n_waits] * a + acc;",
    ),
    Fault(
        "a sliding window begins a key early",
        "attn_flash-causal-q8_0-sliding",
        "pos + 1 - width);",
        "pos - width);",
    ),
    Fault(
        "a causal window is read from the array of positions",
        "attn_rows-causal-q8_0",
        "} else if (!causal) {",
        "} else {",
    ),
    Fault(
        "a run ends a key late",
        "attn_split-runs-f16",
        "j < w.e1 ?",
        "j <= w.e1 ?",
    ),
    Fault(
        "query heads take KV heads in turn",
        "attn_rows-runs-f16",
        "row % n_head / (n_head / n_head_kv)",
        "row % n_head % n_head_kv",
    ),
    Fault(
        "keys before a row's own window are seen",
        "attn_flash-causal-q8_0-sliding",
        "key >= my_first - index && ",
        "",
    ),
    Fault(
        "float16 is rounded towards zero",
        "store_cells_rows_f16",
        "(size - 0x38000000u + 0xFFFu + (size >> 13 & 1u))",
        "(size - 0x38000000u)",
    ),
    Fault(
        "codes are rounded towards zero",
        "quantize_q8_0_blocks",
        "int8_t(rint(x[i] * inverse))",
        "int8_t(x[i] * inverse)",
    ),
    Fault(
        "pairs turn the wrong way",
        "qkv_rope_store_rows_f32",
        "(first ? -part : part)",
        "(first ? part : -part)",
    ),
    Fault(
        "scales of a tile are those of the tile before",
        "matmul-q8_0",
        "scale_at(given, start)",
        "scale_at(given, max(start - 32, 0))",
    ),
)


def by_title(faults: tuple[Fault, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.title.replace(" ", "-"))


@by_title(SEEN_BY_THE_SIMULATOR)
def test_the_simulator_sees_the_fault(fault: Fault) -> None:
    with metalsim.checking_edited_only(fault.edit), pytest.raises(MetalError, match=fault.words):
        STEPS[fault.step].run()


@by_title(SEEN_BY_THE_ORACLE)
def test_the_oracle_sees_the_fault(fault: Fault) -> None:
    step = STEPS[fault.step]
    with metalsim.edited(fault.edit):
        answers = step.run()
    assert step.error(answers) > 1e-3
