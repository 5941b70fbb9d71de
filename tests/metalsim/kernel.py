"""`metal_kernel` of the simulator: trace, build, run, check."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from metalsim import arrays, buffers, compiler, context, lines, signature, tracing, translate
from metalsim.arrays import Output
from metalsim.context import Launched, Mode, Settings
from metalsim.errors import MetalError
from metalsim.machine import (
    INPUT,
    MAX_CHECKED_GROUPS,
    MAX_THREADS,
    OUTPUT,
    Argument,
    Fault,
    Library,
    Schedule,
)
from metalsim.signature import Signature
from metalsim.tracing import Launch

MAX_GROUPS = 1 << 31
SCRATCH = "scratch"  # outputs whose names begin so may stay partly unwritten
_machine = threading.RLock()  # the runtime has one state


class _Kernel(NamedTuple):
    name: str  # the one given to metal_kernel
    text: str
    signature: Signature
    library: Library

    @property
    def file(self) -> str:
        return f"{self.name}.metal"


@functools.cache
def _load(
    name: str, function: str, text: str, names: tuple[tuple[str, ...], ...], checked: bool
) -> _Kernel:
    try:
        if (bare := translate.without_address_space(text)) is not None:
            raise MetalError(
                f"a pointer without an address space on line {bare[0]}: '{bare[1]}'; Metal wants "
                "device, constant, threadgroup or thread"
            )
        found = signature.read(function, text, *names)
        cpp = translate.to_cpp(f"{name}.metal", text, found)
        return _Kernel(name, text, found, Library(compiler.build_kernel(cpp, checked)))
    except MetalError as error:
        raise MetalError(f"{name}: {error}") from None


def _error(kernel: _Kernel, fault: Fault) -> MetalError:
    """The fault with its source line."""
    line = 0
    if fault.offset is not None:
        found = lines.line_of(kernel.library.path, fault.offset)
        line = found[1] if found and found[0] == kernel.file else 0
    elif told := re.search(r"\bline (\d+)", fault.message):
        line = int(told[1])
    message = translate.names_restored(f"{kernel.name}: {fault.message}")
    if line:
        text = kernel.text.split("\n")[line - 1].strip()
        message += f" [{kernel.file}:{line}]\n    > {text}"
    return MetalError(message)


def _group(name: str, launch: Launch, mode: Mode) -> tuple[int, ...]:
    """The threadgroup as Metal clamps it to the grid."""
    if min(launch.grid) < 0:
        raise MetalError(f"a grid of {launch.grid} threads is none")
    group = tuple(max(1, min(g, t)) for g, t in zip(launch.grid, launch.threadgroup, strict=True))
    threads = int(np.prod(group))
    if threads > MAX_THREADS:
        raise MetalError(
            f"{name}: a threadgroup of {threads} threads is over the limit of {MAX_THREADS}"
        )
    groups = int(np.prod([-(-g // t) for g, t in zip(launch.grid, group, strict=True)]))
    if groups >= MAX_GROUPS:
        raise MetalError(f"{groups} threadgroups are over the limit of {MAX_GROUPS}")
    if mode is Mode.CHECKED and groups >= MAX_CHECKED_GROUPS:
        raise MetalError(
            f"{name}: {groups} threadgroups are too many for a checked run; use Mode.FAST"
        )
    return group


def _inputs(kernel: _Kernel, launch: Launch, names: Sequence[str]) -> dict[str, Argument]:
    """The input arguments by parameter name, shapes and strides among them."""
    views = {
        name: arrays.input_view(array, launch.row_contiguous)
        for name, array in zip(names, launch.inputs, strict=True)
    }
    found = {}
    for buffer in kernel.signature.buffers:
        if buffer.kind == "output":
            continue
        view = views[buffer.name]
        if buffer.kind != "input":
            view = arrays.FACTS[buffer.kind](view)
        memory = buffers.of_array(view)
        found[buffer.parameter] = Argument(buffer.parameter, INPUT, view.itemsize, memory)
    return found


class _Call:
    """One call of a kernel: its inputs in memory, run once or in two schedules."""

    def __init__(
        self,
        kernel: _Kernel,
        launch: Launch,
        names: tuple[tuple[str, ...], ...],
        settings: Settings,
        start: float | None,
    ) -> None:
        self.kernel, self.launch, self.settings, self.start = kernel, launch, settings, start
        self.group = _group(kernel.name, launch, settings.mode)
        self.output_names = names[1]
        self.inputs = _inputs(kernel, launch, names[0])

    def run(self, schedule: Schedule) -> list[Output]:
        share = not schedule.checked
        outputs = [Output(shape, dtype, self.start, share) for shape, dtype in self.launch.outputs]
        given = dict(self.inputs)
        for name, out in zip(self.output_names, outputs, strict=True):
            size = out.dtype.size
            given[name] = Argument(name, OUTPUT, size, out.memory, out.initialised)
        order = [given[b.parameter] for b in self.kernel.signature.buffers]
        fault = self.kernel.library.run(order, self.launch.grid, self.group, schedule)
        if fault:
            raise _error(self.kernel, fault)
        for name, out in zip(self.output_names, outputs, strict=True):
            if given[name].unwritten and not name.startswith(SCRATCH):
                raise MetalError(
                    f"{self.kernel.name}: output {name!r} is not wholly written: "
                    f"{given[name].unwritten} of {out.count} elements are not, "
                    f"the first is [{given[name].first_unwritten}]"
                )
        return outputs

    def compare(self, first: list[Output], second: list[Output]) -> None:
        for name, a, b in zip(self.output_names, first, second, strict=True):
            if not np.array_equal(a.bytes, b.bytes):
                at = int(np.flatnonzero(a.bytes != b.bytes)[0]) // a.dtype.size
                raise MetalError(
                    f"{self.kernel.name}: output {name!r}[{at}] depends on the order of the "
                    f"threads (random schedule of seed {self.settings.seed})"
                )

    def results(self) -> list[Any]:
        checked, timeout = self.settings.mode is Mode.CHECKED, self.settings.timeout_ms
        outputs = self.run(Schedule(checked, timeout_ms=timeout))
        if checked:
            s = self.settings
            self.compare(outputs, self.run(Schedule(True, True, s.seed, s.preempt_every, timeout)))
        return [out.array() for out in outputs]


def _edit(name: str, text: str, settings: Settings) -> tuple[str, Mode]:
    """The text after the edits of the context, and the mode it runs in."""
    changed = text
    for edit in settings.edits:
        changed = edit(name, changed)
    fast = settings.only_edited and changed == text
    return changed, Mode.FAST if fast else settings.mode


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, Any] | None = None,
) -> Callable[..., list[Any]]:
    """Takes the place of `mx.fast.metal_kernel`: same arguments, same callable, run on the CPU.

    Calls are eager. They raise what MLX raises for arguments it refuses, and MetalError for what
    the text or the run does wrong.
    """
    real = tracing.MLX_METAL_KERNEL(
        name,
        input_names,
        output_names,
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        compile_options,
    )
    names = (tuple(input_names), tuple(output_names))

    def call(
        *, inputs: Sequence[Any], init_value: float | None = None, **options: Any
    ) -> list[Any]:
        settings = context.current()
        launch = tracing.trace(real, inputs, {**options, "init_value": init_value})
        text, mode = _edit(name, launch.text, settings)
        context.note(Launched(name, text))
        with _machine:
            kernel = _load(name, launch.name, text, names, mode is Mode.CHECKED)
            how = replace(settings, mode=mode)
            try:
                return _Call(kernel, launch, names, how, init_value).results()
            finally:
                buffers.release_all()

    return call
