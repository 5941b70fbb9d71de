"""Runs MLX's custom Metal kernels on a Linux CPU, and checks what they do.

How it works
    `metal_kernel` takes the place of `mx.fast.metal_kernel`. At each call MLX itself is asked, by
    `mx.export_function`, for the Metal text and the launch it would hand to a GPU (tracing.py).
    The text is C++ but for two rewrites (translate.py) and a header (shim/metal_stdlib); clang
    builds it (compiler.py) and the runtime runs it (shim/runtime.cpp, machine.py): one fiber per
    GPU thread, threadgroups one after the other. Barriers and simdgroup operations are true
    meetings of the threads concerned.

    `running(Mode.FAST)`, the default, puts inaccessible pages around buffers and does no more.
    `running(Mode.CHECKED)` first compiles with Metal's address spaces as part of the types, then
    runs with a hook before each memory access (clang's -fsanitize=thread hooks, without its
    library), in order and then in a random order with preemption. It finds: accesses out of
    bounds or misaligned, indices outside of arrays, reads of uninitialised threadgroup memory and
    outputs, data races by happens-before with barriers of the right memory kind, barriers and
    simdgroup operations that not all threads reach, outputs not wholly written, and results that
    depend on the order. Outputs whose names begin with "scratch" may stay partly unwritten.

What it fixes
    Reductions combine lanes 16, 8, 4, 2 and 1 apart. A product of simdgroup matrices adds its
    terms in order, in float, by fused multiply-add. Nothing else is fused. Half and bfloat round
    at every operation, whatever the math mode. Division and square root are IEEE; the other
    functions are the C library's.

What it cannot show
    Whether Apple's compiler takes the text; the rounding of a GPU's fast:: functions and the
    order of its reductions; denormals flushed to zero; fewer threads per threadgroup where
    registers run short; races between separate launches; uninitialised variables of a thread;
    speed. It is stricter than Metal where a lane that has returned, or a divergent branch, meets
    a simdgroup operation. Texture, quad and tensor functions are absent, and vectors of bool. In
    FAST mode large buffers (64 MiB) have no guard. On AArch64 an integer division by zero gives 0
    and is not reported.

What it needs
    clang 17 or newer: the command in METALSIM_CXX, clang++ on the PATH, or the pip package
    ziglang. Builds are kept in the folder `metalsim` of minfer's cache.

For tests
    `launches()` lists what was launched, `edited(...)` changes texts before they are built,
    `unnoticed(...)` deletes barriers one by one. All settings are local to their context; a new
    thread starts with the defaults.
"""

from metalsim.compiler import unavailable
from metalsim.context import Launched, Mode, checking_edited_only, edited, launches, running
from metalsim.errors import MetalError
from metalsim.kernel import metal_kernel
from metalsim.mutation import Unnoticed, barriers, unnoticed, without

__all__ = [
    "Launched",
    "MetalError",
    "Mode",
    "Unnoticed",
    "barriers",
    "checking_edited_only",
    "edited",
    "launches",
    "metal_kernel",
    "running",
    "unavailable",
    "unnoticed",
    "without",
]
