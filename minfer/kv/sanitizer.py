"""The sanitizer: which cell made the output of an attention not finite (contract 5.10).

With it on, every cell that is free or unwritten holds NaN, so a kernel that reads past its window
gives NaN. The cell is found by bisection: the same launch over copies of the layer in which fewer
and fewer of the cells that are not finite keep their bytes, the others being zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minfer import window
from minfer.errors import Refusal
from minfer.format import Int32, Region
from minfer.kv.arena import ROWS_AT_ONCE
from minfer.kv.plan import Plan
from minfer.kv.runs import FREE
from minfer.receipt import Receipt
from minfer.window import CellSpan

if TYPE_CHECKING:
    from minfer.kv.store import KvStore


@dataclass(frozen=True, eq=False)
class Attended:
    """An attention that ran, and can be run again over other K and V cells of its layer.

    q: its queries. width: sliding width, 0 for none. regions: the K and V cells it read.
    """

    layer: int
    q: Any
    width: int
    receipt: Receipt
    regions: tuple[Region, Region]
    launch: Callable[[Region, Region], Any]


class Culprit(NamedTuple):
    """A cell with which the output is not finite, and the first row of which that is so."""

    which: str
    cell: int
    row: int


@dataclass(frozen=True)
class Place:
    """Whose a cell is while a step is open.

    owner: the sequence whose run it lies in, None for an orphan. readers: who may read the row in
    it. span: of a span list that names it.
    """

    cell: int
    run: int
    owner: int | None
    readers: tuple[int, ...]
    span: CellSpan

    @property
    def position(self) -> int:
        """The same in every sequence: a share begins at position 0 of its run."""
        return self.span.position + self.cell - self.span.cell

    def __str__(self) -> str:
        whose = f"orphan run {self.run}"
        if self.owner is not None:
            whose = f"sequence {self.owner}, run {self.run}"
        others = ", ".join(str(seq) for seq in self.readers if seq != self.owner)
        first, cell, length = self.span
        return (
            f"{'' if self.readers else 'unwritten '}position {self.position} of {whose}"
            f"{others and ', read by '}{others}; span: {length} from position {first}, cell {cell}"
        )


def check(store: KvStore, plan: Plan, attended: Attended, out: Any) -> None:
    """Refuse an output [n_q, n_head, d] that is not finite, naming where that comes from."""
    kernels = store.stretch_of(attended.layer).kernels
    bad = _bad_rows(kernels, out)
    if not bad.any():
        return
    culprit = find_culprit(kernels, attended, bad)
    if culprit is None:
        raise _of_its_own(kernels, plan, attended, int(np.argmax(bad)))
    raise _from_a_cell(store, plan, attended, culprit)


def find_culprit(kernels: Any, attended: Attended, bad: NDArray[np.bool_]) -> Culprit | None:
    """The cell without which fewer bad cells leave the output finite; None if no cell does.

    bad: the rows of the output that are not finite as it ran. Cells are taken in the order K then
    V, each from cell 0 on: the first n of them leave it finite, the first n + 1 do not.
    """
    k, v = (_bad_cells(kernels, region) for region in attended.regions)

    def rows_with(n: int) -> NDArray[np.bool_]:
        """Bad rows of the output where only the first n bad cells keep their bytes."""
        zeroed = k[n:], v[max(0, n - len(k)) :]
        copies = [
            _zeroed(kernels, region, cells)
            for region, cells in zip(attended.regions, zeroed, strict=True)
        ]
        return _bad_rows(kernels, attended.launch(copies[0], copies[1]))

    if rows_with(0).any():
        return None
    fine, wrong, rows = 0, len(k) + len(v), bad
    while wrong - fine > 1:
        middle = (fine + wrong) // 2
        found = rows_with(middle)
        if found.any():
            wrong, rows = middle, found
        else:
            fine = middle
    row = int(np.argmax(rows))
    if fine < len(k):
        return Culprit("K", int(k[fine]), row)
    return Culprit("V", int(v[fine - len(k)]), row)


def _bad_rows(kernels: Any, out: Any) -> NDArray[np.bool_]:
    """Which rows of an output are not finite."""
    host = kernels.to_host(out)
    return np.asarray(~np.isfinite(host.reshape(len(host), -1)).all(axis=1))


def _bad_cells(kernels: Any, region: Region) -> Int32:
    """The cells that hold a value that is not finite, ascending."""
    found = [np.zeros(0, np.int32)]
    for first in range(0, region.n_cells, ROWS_AT_ONCE):
        cells = np.arange(first, min(first + ROWS_AT_ONCE, region.n_cells), dtype=np.int32)
        found.append(cells[_bad_rows(kernels, kernels.decode_cells(region, cells))])
    return np.concatenate(found)


def _zeroed(kernels: Any, region: Region, cells: Int32) -> Region:
    """A copy of `region` in which `cells` are zero."""
    shape = (region.fmt, region.n_cells, region.n_head_kv, region.head_dim)
    (copy,) = kernels.empty_regions(1, *shape)
    kept = np.setdiff1d(np.arange(region.n_cells, dtype=np.int32), cells)
    whole: Region = kernels.write_cells(copy, kept, kernels.read_cells(region, kept))
    return whole


def place_of(store: KvStore, plan: Plan, cell: int) -> Place | None:
    """Whose cell it is while the step of `plan` is open; None if it is free."""
    run = store.owners()[cell]
    if run == FREE:
        return None
    ends = {group.seq: group.t + group.n for group in plan.groups}
    owner, readers, named = None, [], CellSpan(0, cell, 1)
    for seq in store.sequences():
        *_, own = spans = store.spans(seq)
        for span in spans:
            if not 0 <= cell - span.cell < span.length:
                continue
            if span is own:
                owner = seq
            if span is own or owner is None:
                named = span
            if span.position + cell - span.cell < ends.get(seq, store.written(seq)):
                readers.append(seq)
    return Place(cell, run, owner, tuple(readers), named)


def _from_a_cell(store: KvStore, plan: Plan, attended: Attended, culprit: Culprit) -> Refusal:
    facts, cell = _facts(plan, attended, culprit.row), culprit.cell
    inside = any(first <= cell < first + n for first, n in facts["window"])
    place = place_of(store, plan, cell)
    why = "outside the window: the variant must not read it"
    if inside:
        why = f"inside the window: store a row that is finite in {store.fmt}"
    facts |= {"which": culprit.which, "cell": cell, "inside": inside}
    if place is not None:
        facts |= {"run": place.run, "owner": place.owner, "readers": place.readers}
        facts |= {"cell_position": place.position, "span": tuple(place.span)}
    whose = "free" if place is None else str(place)
    what = f"{_query(facts)}, because of {culprit.which} cell {cell} ({whose}), {why}"
    return Refusal("5.10", what, facts)


def _of_its_own(kernels: Any, plan: Plan, attended: Attended, row: int) -> Refusal:
    """No cell did it."""
    facts = _facts(plan, attended, row)
    finite = not _bad_rows(kernels, attended.q)[row]
    why = (
        "and stays so where such cells are zero: the arithmetic overflows; give smaller numbers"
        if finite
        else "as the query itself is; give finite queries"
    )
    return Refusal("5.10", f"{_query(facts)}, {why}", {**facts, "query_is_finite": finite})


def _facts(plan: Plan, attended: Attended, row: int) -> dict[str, Any]:
    """About the query of a row. window: the (cell, length) of its runs."""
    group, spans = next(
        (group, spans)
        for group, spans in zip(plan.groups, plan.spans, strict=True)
        if group.row <= row < group.row + group.n
    )
    position, receipt = group.t + row - group.row, attended.receipt
    return {
        "layer": attended.layer,
        "row": row,
        "seq": group.seq,
        "position": position,
        "window": window.runs(spans, position, attended.width),
        "variant": f"{receipt.op}_{receipt.variant}",
        "file": f"{receipt.file}:{receipt.line}",
    }


def _query(facts: dict[str, Any]) -> str:
    cells = ", ".join(f"[{first}, {first + n})" for first, n in facts["window"])
    return (
        f"attention of layer {facts['layer']} is not finite at query row {facts['row']}, "
        f"position {facts['position']} of sequence {facts['seq']}, which sees cells {cells} "
        f"({facts['variant']}, {facts['file']})"
    )
