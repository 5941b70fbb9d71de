"""Which calls compile what, and a call compiled: rows of the report."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minfer import registry
from minfer.format import BLOCK, KvFormat
from minfer.ops import DECODE, KINDS, OPS, PREFILL, Variant
from minfer.window import WindowMode
from tuning.compiled.calls import CALLS, ROWS, Kit
from tuning.compiled.offline import compiling, kernel_package
from tuning.compiled.usage import Usage, usage

PACKAGE = "minfer.kernels_triton"
ATTENTION = ("attn_window", "attn_map")
BY_HEAD = (*ATTENTION, "store_cells", "qkv_rope_store", "map_q8_0_cells", "rope", "move_cells")


@dataclass(frozen=True)
class Job:
    """One call of one variant, compiled for sm_`arch`."""

    arch: int
    op: str
    variant: str
    fmt: KvFormat
    head_dim: int
    mode: WindowMode
    kind: str
    default: bool  # whether the variant is chosen for such a call without being named

    @property
    def words(self) -> tuple[str, str, str]:
        """Format, head_dim and window, "-" where kernels do not differ by them."""
        return (
            str(self.fmt) if OPS[self.op].formats or self.op == "move_cells" else "-",
            str(self.head_dim) if self.op in BY_HEAD else "-",
            self.mode.value if self.op in ATTENTION else "-",
        )

    def __str__(self) -> str:
        return " ".join((f"sm_{self.arch}", f"{self.op}_{self.variant}", *self.words))


@dataclass(frozen=True)
class Row:
    """One kernel of a job, or why the job gave none."""

    job: Job
    kernel: str = ""
    digest: str = ""
    usage: Usage | None = None
    error: str = ""

    def bad(self, allowed: int = 0) -> bool:
        """Whether the kernel does not compile, or is a default and spills more than that."""
        used = self.usage
        spills = used is not None and used.spills and max(used.stack, 1) > allowed
        return bool(self.error) or (self.job.default and spills)


def jobs(
    arches: Sequence[int],
    head_dims: Sequence[int],
    modes: Sequence[WindowMode],
    named: Sequence[str] = (),
    defaults: bool = False,
) -> Iterator[Job]:
    """Every variant once for each format, and attention for each head_dim and mode as well.

    named: only ops, variants or both as `op_variant`. defaults: only what is chosen unnamed.
    """
    table = registry.collect(PACKAGE)
    for arch in arches:
        for op, rows in table.items():
            for variant in rows:
                if not named or {op, variant.name, f"{op}_{variant.name}"} & set(named):
                    of_variant = _jobs(arch, op, variant, rows, head_dims, modes)
                    yield from (job for job in of_variant if job.default or not defaults)


def _jobs(
    arch: int,
    op: str,
    variant: Variant,
    rows: Sequence[Variant],
    head_dims: Sequence[int],
    modes: Sequence[WindowMode],
) -> Iterator[Job]:
    wanted = [mode for mode in modes if mode.op == op] if op in ATTENTION else [WindowMode.RUNS]
    for fmt in _formats(op, variant):
        for head_dim in head_dims if op in BY_HEAD else head_dims[:1]:
            kinds = _kinds(arch, op, variant, fmt, head_dim)
            for mode in wanted if kinds else ():
                chosen = any(_chosen(arch, rows, fmt, head_dim, k) is variant for k in kinds)
                yield Job(arch, op, variant.name, fmt, head_dim, mode, kinds[0], chosen)


def _formats(op: str, variant: Variant) -> tuple[KvFormat, ...]:
    """Those that the kernels of an op differ by."""
    if OPS[op].formats or op == "move_cells":
        return variant.formats
    return (KvFormat.Q8_0,) if "q8_0" in op else (KvFormat.F32,)


def _capability(arch: int) -> tuple[int, int]:
    return arch // 10, arch % 10


def _kinds(arch: int, op: str, variant: Variant, fmt: KvFormat, head_dim: int) -> list[str]:
    """The kinds that the variant takes at this size, decode first where it is for few rows."""
    if fmt is KvFormat.Q8_0 and head_dim % BLOCK:
        return []
    kinds = KINDS if op != "matvec" else (DECODE, PREFILL)
    shapes = {kind: Kit(None, ROWS[kind][0], fmt, head_dim, kind=kind).shape for kind in kinds}
    return [k for k in kinds if variant.limits.why_not(shapes[k], _capability(arch), fmt) is None]


def _chosen(
    arch: int, rows: Sequence[Variant], fmt: KvFormat, head_dim: int, kind: str
) -> Variant | None:
    """The variant that `registry.select` takes on such a GPU: the last default that can."""
    shape = Kit(None, ROWS[kind][0], fmt, head_dim, kind=kind).shape
    taking = [
        v
        for v in rows
        if v.default and registry.home_file(v.source[0])
        if not OPS[v.op].formats or fmt in v.formats
        if v.limits.why_not(shape, _capability(arch), fmt) is None
    ]
    return taking[-1] if taking else None


def compiled(job: Job) -> list[Row]:
    """The kernels that calls of few rows and of many launch."""
    package = kernel_package()
    variant = next(v for v in registry.collect(PACKAGE)[job.op] if v.name == job.variant)
    config = variant.config()
    block_m = config.get("block_m", 1)
    with compiling(job.arch) as seen:
        try:
            for n in ROWS[job.kind]:
                kit = Kit(package, n, job.fmt, job.head_dim, job.mode, job.kind, block_m)
                tensors, scalars = CALLS[job.op](kit)
                variant.launch(*tensors, **scalars, config=config)
        except Exception as error:  # whatever a compiler raises is a line of the report
            return [Row(job, error=_told(error))]
        if not seen:
            return [Row(job, error="launched no kernel")]
        return [Row(job, name, kernel.hash, usage(kernel)) for name, kernel in seen]


def _told(error: BaseException) -> str:
    """The last lines of an error, where compilers say what they mean."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return "\n".join(lines[-12:])
