"""How a kernel variant is declared: the shapes it takes, how it rounds, what may be tuned."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops.table import OPS, PREFILL, check_kind

Config = Mapping[str, Any]
Kernel = Callable[..., Any]
Fn = TypeVar("Fn", bound=Kernel)


@dataclass(frozen=True)
class Numerics:
    """Where a variant rounds, and nowhere else (contract 4.6). query: of a product, its rows x."""

    query: str
    key: str
    prob: str
    value: str
    acc: str


@dataclass(frozen=True)
class Shape:
    """What a choice of variant may depend on; never positions, cells or sequences."""

    kind: str = PREFILL
    n_q: int = 1
    n_head: int = 1
    n_head_kv: int = 1
    head_dim: int = 64

    def __post_init__(self) -> None:
        check_kind(self.kind)
        for name in ("n_q", "n_head", "n_head_kv", "head_dim"):
            size, least = getattr(self, name), int(name != "n_q")  # a call may hold no query
            if not isinstance(size, int) or size < least:
                raise Refusal(
                    "10",
                    f"{name} is {size!r}; a shape has a whole number of at least {least}",
                    {"name": name, "value": size, "least": least},
                )


@dataclass(frozen=True)
class Limits:
    """What a variant takes, as data, so that a refusal can be printed. Empty means anything."""

    kinds: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    head_dim_multiple: int = 1
    max_head_dim: int = 0
    max_head_dim_f32: int = 0  # over f32 cells
    max_group: int = 0  # query heads a KV head
    capability: tuple[int, int] | None = None  # of a GPU, at least

    def why_not(
        self,
        shape: Shape,
        capability: tuple[int, int] | None = None,
        fmt: KvFormat | None = None,
    ) -> str | None:
        """Why `shape` is not taken, or None if it is.

        capability: of the GPU, None for none. fmt: of the cells, None where it does not matter.
        """
        if self.capability and (capability is None or capability < self.capability):
            wanted = ".".join(map(str, self.capability))
            here = "none here" if capability is None else ".".join(map(str, capability))
            return f"needs a GPU of compute capability {wanted}, and there is {here}"
        if self.kinds and shape.kind not in self.kinds:
            return f"is for {' and '.join(self.kinds)}, not {shape.kind}"
        if self.head_dims and shape.head_dim not in self.head_dims:
            return f"head_dim {shape.head_dim} is not one of {list(self.head_dims)}"
        if shape.head_dim % self.head_dim_multiple:
            return f"head_dim {shape.head_dim} is no multiple of {self.head_dim_multiple}"
        if 0 < self.max_head_dim < shape.head_dim:
            return f"takes a head_dim of {self.max_head_dim} at most, not {shape.head_dim}"
        largest = self.max_head_dim_f32
        if fmt is KvFormat.F32 and 0 < largest < shape.head_dim:
            return f"takes a head_dim of {largest} at most over f32 cells, not {shape.head_dim}"
        group = shape.n_head // shape.n_head_kv
        if self.max_group and group > self.max_group:
            return f"takes {self.max_group} query heads a KV head, not {group}"
        return None


@dataclass(frozen=True)
class Tunable:
    """A knob. `numeric` ones may change bits and are never tuned by shape (contract 6.4).

    values: what a sweep tries; the default need not be among them. searched: False for what the
    caller decides, such as threads.
    """

    default: Any
    values: tuple[Any, ...]
    numeric: bool = False
    searched: bool = True


@dataclass(frozen=True, eq=False)
class Variant:
    """One algorithm for one op, as the registry sees it."""

    op: str
    name: str
    launch: Kernel
    formats: tuple[KvFormat, ...]
    limits: Limits
    query: Mapping[KvFormat, str]
    prob: Mapping[KvFormat, str]
    decoded: Mapping[KvFormat, str]
    key: Mapping[KvFormat, str]
    invariant: bool
    space: Mapping[str, Tunable]
    default: bool

    @property
    def source(self) -> tuple[str, int]:
        """File and line of the launcher."""
        code = inspect.unwrap(self.launch).__code__
        return code.co_filename, code.co_firstlineno

    def numerics(self, fmt: KvFormat) -> Numerics:
        """Where this variant rounds when it reads cells of `fmt`."""
        cells = self.decoded.get(fmt, fmt.value)
        key, query, prob = self.key.get(fmt, cells), self.query.get(fmt, "f32"), self.prob.get(fmt)
        return Numerics(query, key, prob or "f32", cells, "f32")

    def config(self) -> dict[str, Any]:
        """The default configuration."""
        return {name: tunable.default for name, tunable in self.space.items()}


def split_name(function_name: str) -> tuple[str, str]:
    """`attn_window_split` -> (`attn_window`, `split`); raises ValueError for an unknown op."""
    for op in sorted(OPS, key=len, reverse=True):
        name = function_name.removeprefix(op + "_")
        if name != function_name and re.fullmatch("[a-z][a-z0-9]*", name):
            return op, name
    raise ValueError(
        f"{function_name} is not named <op>_<variant> with an op of {', '.join(OPS)} "
        "and a variant of one lower-case word"
    )


def variant(
    *,
    formats: tuple[KvFormat, ...] = tuple(KvFormat),
    limits: Limits | None = None,
    query: Mapping[KvFormat, str] | None = None,
    prob: Mapping[KvFormat, str] | None = None,
    decoded: Mapping[KvFormat, str] | None = None,
    key: Mapping[KvFormat, str] | None = None,
    invariant: bool = True,
    space: Mapping[str, Tunable] | None = None,
    default: bool = True,
) -> Callable[[Fn], Fn]:
    """Tag a launcher as a variant. Only a tag: `registry.collect` finds it.

    formats: storage formats it reads (ops without formats ignore this). limits: shapes it takes.
    query: how it rounds the queries of attention or the rows x of a product, per format; prob: the
    weights of attention; decoded: K and V after decoding, key: K where it is otherwise. What is
    absent is not rounded.
    invariant: whether contract 6 holds for it. space: its tunables. default: whether it may
    be chosen without being named.
    """

    def tag(launch: Fn) -> Fn:
        op, name = split_name(launch.__name__)
        wanted, given = OPS[op].parameters, tuple(inspect.signature(launch).parameters)
        if given != wanted:
            raise TypeError(f"{launch.__name__}{given} must take {wanted}")
        launch.__minfer_variant__ = Variant(  # type: ignore[attr-defined]
            op=op,
            name=name,
            launch=launch,
            formats=formats,
            limits=limits or Limits(),
            query=dict(query or {}),
            prob=dict(prob or {}),
            decoded=dict(decoded or {}),
            key=dict(key or {}),
            invariant=invariant,
            space=dict(space or {}),
            default=default,
        )
        return launch

    return tag
