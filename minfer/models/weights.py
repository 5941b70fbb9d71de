"""The weights of a model by name, in the formats that kernels read.

A matrix is a `Weight` in f32, f16 or q8_0; vectors (norms, biases) are float32 arrays. What comes
to its format is decoded by the `gguf` package and written a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer import registry
from minfer.device import cores
from minfer.errors import Refusal
from minfer.format import BLOCK, BLOCK_BYTES, Floats, KvFormat
from minfer.graph.weight import Weight
from minfer.memory import zeroed
from minfer.models.gguf import GgufFile
from minfer.ops import Kernel

AUTO = "auto"  # Q8_0 matrices as they are, the rest as f32
# Matrices that read the same rows lie one below the other, so that decode reads them in one launch;
# so do their biases.
STACKED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
}
TYPES = {KvFormat.F32: "F32", KvFormat.F16: "F16", KvFormat.Q8_0: "Q8_0"}  # as GGUF names them
MADE = {KvFormat.F32: "decoded", KvFormat.F16: "rounded", KvFormat.Q8_0: "requantized"}
LIMITS = {KvFormat.F16: "beyond 65504", KvFormat.Q8_0: "beyond 127 * 65504"}
CHUNK = 1 << 18  # elements decoded at once: they stay in the cache until they are written


def parse_weights(text: str | KvFormat | None) -> KvFormat | None:
    """Exactly f32, f16 or q8_0, or a format; None for `auto` and None. Refuses anything else."""
    if text is None or text == AUTO:
        return None
    for fmt in KvFormat:
        if text in (fmt, fmt.value):
            return fmt
    raise Refusal(
        "10",
        f"weights {text!r} is none of f32, f16, q8_0, auto; leave it out for auto, which uses "
        "Q8_0 tensors as they are and decodes the others to f32",
        {"weights": str(text)},
    )


@dataclass(frozen=True)
class Planned:
    """One array to load: of one tensor, or of several stacked ones.

    shape: of the whole, in elements. stack: name of the stack that is left in its parts, if this is
    one of them.
    """

    name: str
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    fmt: KvFormat
    origin: str
    stack: str = ""

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return math.prod(self.stored_shape) * self.dtype.itemsize

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of its array."""
        if self.fmt is not KvFormat.Q8_0:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // BLOCK * BLOCK_BYTES)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype({KvFormat.F32: "f4", KvFormat.F16: "f2", KvFormat.Q8_0: "u1"}[self.fmt])


def plan_weights(file: GgufFile, wanted: KvFormat | None) -> list[Planned]:
    """What `load_weights` makes of every tensor. wanted: format of the matrices, None for auto.

    A stack of which auto takes only some parts as they are is left in its parts.
    """
    plan: list[Planned] = []
    for name, tensors in _groups(file.tensor_names):
        n_as_they_are = sum(file.tensor_info(tensor).type == "Q8_0" for tensor in tensors)
        apart = wanted is None and 0 < n_as_they_are < len(tensors)
        if apart:
            plan += [replace(_planned(file, t, (t,), wanted), stack=name) for t in tensors]
        else:
            plan.append(_planned(file, name, tensors, wanted))
    return plan


def _groups(names: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every array's name and tensors, the parts of a stack in the order of `STACKED`."""
    left = dict.fromkeys(names)
    while left:
        name = next(iter(left))
        *block, part, kind = name.split(".")
        group: tuple[str, tuple[str, ...]] = name, (name,)
        for stack, parts in STACKED.items():
            full = tuple(".".join([*block, p, kind]) for p in parts)
            if part in parts and all(n in left for n in full):
                group = ".".join([*block, stack, kind]), full
        for used in group[1]:
            del left[used]
        yield group


def _planned(
    file: GgufFile, name: str, tensors: tuple[str, ...], wanted: KvFormat | None
) -> Planned:
    infos = [file.tensor_info(tensor) for tensor in tensors]
    types = list(dict.fromkeys(info.type for info in infos))
    width = infos[0].shape[-1]
    fmt, note = KvFormat.F32, ""
    if len(infos[0].shape) == 2:  # vectors stay f32
        native = KvFormat.Q8_0 if types == ["Q8_0"] else KvFormat.F32
        fmt = wanted or native
        if fmt is KvFormat.Q8_0 and width % BLOCK:
            fmt = KvFormat.F16 if types == ["F16"] else KvFormat.F32
            note = f" because rows of {width} are not whole blocks of {BLOCK}"
    made = [kind for kind in types if kind != TYPES[fmt]]
    as_is = "" if len(made) == len(types) else f", {TYPES[fmt]} as it is"
    origin = f"{MADE[fmt]} from {', '.join(made)}{as_is}" if made else "as in the file"
    return Planned(
        name=name,
        tensors=tensors,
        shape=(sum(info.shape[0] for info in infos), *infos[0].shape[1:]),
        fmt=fmt,
        origin=origin + note,
    )


def load_weights(
    file: GgufFile, plan: list[Planned], *, place: Kernel | None = None, progress: bool = False
) -> dict[str, Any]:
    """Every array of the plan by name, read-only: a `Weight` for a matrix, float32 for a vector.

    A stack that the plan leaves in its parts is a tuple of them. place: puts an array on the
    device; the host then holds one at a time. None leaves all where they are. progress: show a bar
    on stderr. Refuses a tensor that its format cannot hold.
    """
    from tqdm import tqdm

    total = sum(math.prod(p.shape) for p in plan)
    bar = tqdm(total=total, desc="weights", unit_scale=True, disable=not progress, leave=False)
    loaded: dict[str, Any] = {}
    with ThreadPoolExecutor(cores()) as pool, bar:
        for some in [plan] if place is None else [[p] for p in plan]:
            for p, area in zip(some, _read(file, some, pool, bar.update), strict=True):
                array = area if place is None else place(area)
                weight = Weight(array, p.fmt, p.origin) if area.ndim == 2 else array
                if p.stack:
                    loaded[p.stack] = (*loaded.get(p.stack, ()), weight)
                else:
                    loaded[p.name] = weight
    return loaded


def _read(
    file: GgufFile, plan: list[Planned], pool: Executor, done: Callable[[int], object]
) -> list[NDArray[Any]]:
    """The arrays of a plan, read-only, in one piece of memory. done: told of elements made."""
    # Not as they lie in the file, even where nothing changes: its pages are small, and a file that
    # another program cuts short would end this one.
    areas = zeroed(p.n_bytes for p in plan)
    arrays = [
        area.view(p.dtype).reshape(p.stored_shape) for p, area in zip(plan, areas, strict=True)
    ]
    jobs = [job for p, array in zip(plan, arrays, strict=True) for job in _jobs(file, p, array)]
    for n in pool.map(lambda job: job.run(file), jobs):
        done(n)
    for array in arrays:
        array.flags.writeable = False
    return arrays


@dataclass(frozen=True, eq=False)
class Job:
    """Some rows of one tensor to be written into `target` in a format."""

    tensor: str
    rows: slice
    fmt: KvFormat
    as_stored: bool
    target: NDArray[Any]

    def run(self, file: GgufFile) -> int:
        """Write them; returns the number of elements."""
        if self.as_stored:
            self.target[:] = file.stored(self.tensor)[self.rows]
            return int(self.target.size)
        values = file.tensor(self.tensor, self.rows)
        if self.fmt is KvFormat.F32:
            self.target[:] = values
        else:
            self._narrow(values)
        return int(values.size)

    def _narrow(self, values: Floats) -> None:
        if self.fmt is KvFormat.F16:
            with np.errstate(over="ignore"):
                self.target[:] = values
            scales = self.target
        else:
            quantize = registry.select("quantize_q8_0", config={"threads": 1})
            cells = quantize.launch(values, config=quantize.config)
            self.target[:] = cells[:, : self.target.shape[1]]
            blocks = self.target.reshape(len(values), -1, BLOCK_BYTES)
            scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")
        if not np.isfinite(scales).all():
            raise Refusal(
                "4.2",
                f"tensor {self.tensor!r} has values {LIMITS[self.fmt]} or not finite, which "
                f"{self.fmt} cannot hold; load with weights f32",
                {"tensor": self.tensor, "fmt": self.fmt.value},
            )


def _jobs(file: GgufFile, planned: Planned, array: NDArray[Any]) -> Iterator[Job]:
    """The work of one array, cut into pieces of about `CHUNK` elements."""
    step = max(1, CHUNK // math.prod(planned.shape[1:]))
    base = 0
    for tensor in planned.tensors:
        kind, shape = file.tensor_info(tensor)
        for first in range(0, shape[0], step):
            rows = slice(first, min(first + step, shape[0]))
            target = array[base + rows.start : base + rows.stop]
            yield Job(tensor, rows, planned.fmt, kind == TYPES[planned.fmt], target)
        base += shape[0]
