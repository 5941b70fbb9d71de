"""What it costs to share, copy and rearrange rows of a store, for the column of this project."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats
from minfer.kv.batch import Batch
from minfer.kv.store import KvStore
from minfer.ops import DECODE
from minfer.rope import Rope
from tuning.bench.cases import Case
from tuning.bench.protocol import Message
from tuning.bench.store_cases import Store
from tuning.columns.subjects import Measure, Subject

MASTER, FIRST, SECOND = 0, 1, 2
PIECES, GAPS = 100, 200  # ids from here on
GAP_CELLS = 7
CHECKED = 97  # rows of each answer, about
BASE = 10000.0


class Scene:
    """A store whose sequence MASTER keeps all rows; the others are made anew for every call."""

    def __init__(self, case: Store, how: Message) -> None:
        self.case = case
        self.store = KvStore(
            case.n_layer, 3 * case.rows + 2 * case.pieces * GAP_CELLS, case.n_head_kv,
            case.head_dim, cache_type=how["fmt"], threads=how["threads"],
        )  # fmt: skip
        shape = (case.n_layer, case.rows, case.n_head_kv, case.head_dim)
        rng = np.random.default_rng(0)
        self.k, self.v = rng.standard_normal((2, *shape), dtype=np.float32)
        self.row = rng.standard_normal(shape[2:], dtype=np.float32)[None]
        self.store.reserve(MASTER, case.rows)
        self.store.import_rows(MASTER, self.k, self.v)

    def clear(self) -> None:
        """Only MASTER stays."""
        for seq in self.store.sequences():
            if seq != MASTER:
                self.store.release(seq)

    def empty(self) -> None:
        """FIRST has cells for all rows, and none."""
        self.clear()
        self.store.reserve(FIRST, self.case.rows)

    def copied(self) -> None:
        """FIRST has all rows, of its own."""
        self.empty()
        self.store.copy_prefix(MASTER, FIRST, self.case.rows)

    def sharer(self) -> None:
        """FIRST reads all rows of MASTER."""
        self.empty()
        self.store.share_prefix(MASTER, FIRST, self.case.rows)

    def donor(self) -> None:
        """FIRST has all rows, of its own, and SECOND reads them."""
        self.copied()
        self.store.reserve(SECOND, 1)
        self.store.share_prefix(FIRST, SECOND, self.case.rows)

    def pieces(self) -> None:
        """All rows in as many sequences as there are pieces, a gap below each."""
        self.clear()
        case, store = self.case, self.store
        for piece in range(case.pieces):
            store.reserve(GAPS + piece, GAP_CELLS)
            store.reserve(PIECES + piece, case.rows // case.pieces)
            store.copy_prefix(MASTER, PIECES + piece, case.rows // case.pieces)
        for piece in range(case.pieces):
            store.release(GAPS + piece)

    def write(self) -> None:
        """FIRST writes one row in the middle."""
        with self.store.step(Batch([FIRST], [self.case.middle], DECODE)) as step:
            for layer in range(self.case.n_layer):
                step.write(layer, k=self.row, v=self.row)

    def plain_copy(self) -> Measure:
        """The bytes of all rows from one array to another, layer by layer."""
        region = self.store.region(0)[0]
        source = np.ones((2 * self.case.n_layer, self.case.rows * region.row_bytes), np.uint8)
        target = source.copy()

        def copy() -> None:
            for into, out_of in zip(target, source, strict=True):
                into[:] = out_of

        return Measure([copy])


def measures(scene: Scene) -> dict[str, Measure]:
    """Every operation, with what it starts from."""
    case, store = scene.case, scene.store
    rope = Rope(case.head_dim, BASE)

    def once(call: object, reset: object) -> Measure:
        return Measure([call], reset, most=1, after=store.check)  # type: ignore[arg-type, list-item]

    made = {
        "share": once(lambda: store.share_prefix(MASTER, FIRST, case.rows), scene.empty),
        "sharer writes": once(scene.write, scene.sharer),
        "donor writes": once(scene.write, scene.donor),
        "copy": once(lambda: store.copy_prefix(MASTER, FIRST, case.rows), scene.empty),
        "defrag": once(store.defrag, scene.pieces),
        "remove": once(lambda: store.remove(FIRST, 0, case.removed, rope=rope), scene.copied),
        "plain copy": scene.plain_copy(),
    }
    return {name: made[name] for name in case.measures if case.takes(store.fmt.value, name)}


def turned_back(rows: Floats, by: int) -> NDArray[np.float64]:
    """Rotary embedding by -by positions, halves paired: RoFormer's formula in complex numbers."""
    n = rows.shape[-1] // 2
    angle = by * BASE ** -(np.arange(n) / n)
    pairs = (rows[..., :n] + 1j * rows[..., n:].astype(np.float64)) * np.exp(-1j * angle)
    return np.concatenate([pairs.real, pairs.imag], -1)


def answers(scene: Scene, name: str) -> list[tuple[Floats, NDArray[np.floating]]]:
    """Rows of the last layer after a call, and what they must be, as float32."""
    case, store = scene.case, scene.store
    last = case.n_layer - 1
    k, v = scene.k[last], scene.v[last]

    def held(seq: int, which: str = "k") -> Floats:
        return store.export(seq, last, which)

    if name == "remove":
        moved = turned_back(k[case.removed :], case.removed)
        return [(held(FIRST), moved), (held(FIRST, "v"), v[case.removed :])]
    if name == "defrag":
        each = len(k) // case.pieces
        return [(held(PIECES + piece), k[:each]) for piece in range(case.pieces)]
    if name in ("share", "copy"):
        return [(held(FIRST), k), (held(FIRST, "v"), v)]
    written = k.copy()
    written[case.middle] = scene.row[0]
    other = SECOND if name == "donor writes" else MASTER
    return [(held(FIRST), written), (held(other), k)]


def store(case: Case, how: Message) -> Subject:
    """Operations on the rows of one store; each is done once and read back before any is timed.

    values: some of the rows read back, and what they must be.
    """
    assert isinstance(case, Store)
    scene = Scene(case, how)
    made = measures(scene)
    kept, must = [], []
    for name, measure in made.items():
        if name == "plain copy":
            continue
        measure.sample(1)
        for got, right in answers(scene, name):
            stride = max(1, len(right) // CHECKED)
            kept.append(got[::stride])
            must.append(right[::stride].astype(np.float32))
    values = np.stack([np.concatenate(kept), np.concatenate(must)])
    return Subject(made, values, note="KvStore")
