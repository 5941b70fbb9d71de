"""One step: the rows of a batch are written layer by layer, then attended to (contract 5.5, 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minfer import registry
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import Region
from minfer.kv import sanitizer
from minfer.kv.checks import checked_query, checked_rows, checked_scale, whole_number
from minfer.kv.inputs import StepInputs
from minfer.kv.plan import Plan
from minfer.kv.runs import LastRow
from minfer.kv.sanitizer import Attended
from minfer.offload import Stretch
from minfer.ops import Shape
from minfer.receipt import Receipt

if TYPE_CHECKING:
    from minfer.kv.store import KvStore


class Step:
    """What `store.step(batch)` hands to its block. Arrays are float32 and one row a token.

    They may be numpy's or the own ones of the layer's backend; what comes out is its own (10).
    inputs: the integer inputs, for a graph that writes and attends by itself.
    moves: the rows that copy-on-write copied, in order. receipts: by layer, which attention variant
    ran last and why. lasts: by sequence, what made the last row of its group; a model fills it.
    """

    def __init__(self, store: KvStore, plan: Plan) -> None:
        self.inputs = StepInputs.of(plan)
        self.moves = plan.moves
        self.receipts: dict[int, Receipt] = {}
        self.lasts: dict[int, LastRow] = {}
        self._store = store
        self._plan = plan
        self._written: set[int] = set()
        self._choices: dict[tuple[int, str, int, str | None], registry.Choice] = {}
        self._closed = False

    def write(self, layer: int, *, k: Any, v: Any) -> None:
        """Store the K and V rows [n_tokens, n_head_kv, head_dim] of `layer`; once a layer.

        They become readable to later steps when the block ends well.
        """
        layer = self._unwritten(layer)
        store, stretch = self._store, self._store.stretch_of(layer)
        shape = (self.inputs.n_tokens, store.n_head_kv, store.head_dim)
        rows = [checked_rows(*of, shape, stretch.kernels) for of in (("k", k), ("v", v))]
        choice = self._choose(stretch, "store_cells", store.n_head_kv, None)
        written = [
            choice.launch(region, array, self.inputs.cells, fmt=store.fmt, config=choice.config)
            for region, array in zip(store.region(layer), rows, strict=True)
        ]
        self.stored(layer, *written)

    def stored(self, layer: int, k: Region, v: Region) -> None:
        """Say that the rows of `layer` are stored in `inputs.cells`, by a graph for instance.

        k, v: the regions the storing op returned; a backend may not write in place.
        """
        layer = self._unwritten(layer)
        self._store.rebind(layer, k, v)
        self._written.add(layer)

    def replayed(self) -> None:
        """Say that recorded launches stored the rows of every layer, in the regions as they are."""
        self._in_block(0)
        if self._written:
            raise Refusal("5.5", f"layers {sorted(self._written)} are written already")
        self._written.update(range(self._store.n_layer))

    def region(self, layer: int) -> tuple[Region, Region]:
        """The K and the V cells of `layer`."""
        return self._store.region(self._in_block(layer))

    def attend(
        self,
        layer: int,
        *,
        q: Any,
        scale: float | None = None,
        width: int = 0,
        variant: str | None = None,
    ) -> Any:
        """Attention of q [n_tokens, n_head, head_dim] over the stored rows of `layer`.

        Returns float32 of q's shape, an array of the layer's backend. scale multiplies the score,
        1 / sqrt(head_dim) by default. width: sliding width in positions, 0 for none. variant: a
        name, else the default.
        """
        layer = self._in_block(layer)
        if layer not in self._written:
            raise Refusal(
                "5.5",
                f"layer {layer} is attended before its rows are written; write it first",
                {"layer": layer},
            )
        store, inputs, stretch = self._store, self.inputs, self._store.stretch_of(layer)
        q = checked_query(q, inputs.n_tokens, store.n_head_kv, store.head_dim, stretch.kernels)
        width = whole_number(width, "sliding width", "2.4")
        choice = self._choose(stretch, inputs.mode.op, q.shape[1], variant)
        regions = store.region(layer)
        windows = (inputs.positions, inputs.window, inputs.cut(choice.block_m))
        scalars = {
            "fmt": store.fmt,
            "scale": checked_scale(scale, store.head_dim),
            "width": width,
            "config": choice.config,
        }
        out = choice.launch(q, *regions, *windows, **scalars)
        self.receipts[layer] = choice.receipt
        if store.sanitize:

            def launch(k: Region, v: Region) -> Any:
                return choice.launch(q, k, v, *windows, **scalars)

            self.check(Attended(layer, q, width, choice.receipt, regions, launch), out)
        return out

    @property
    def pool(self) -> tuple[int, str]:
        """Which arrays hold the cells, as a number, and how cells are arranged in them (7.4)."""
        return self._store.pool_generation, self._store.layout

    @property
    def sanitizes(self) -> bool:
        """Whether every attention is to be checked; a graph does so by `check`."""
        return self._store.sanitize

    def check(self, attended: Attended, out: Any) -> None:
        """Refuse an output [n_tokens, n_head, head_dim] that is not finite (contract 5.10)."""
        sanitizer.check(self._store, self._plan, attended, out)

    def finish(self) -> None:
        """Refuse the end of the block while a layer is unwritten."""
        missing = sorted(set(range(self._store.n_layer)) - self._written)
        if missing:
            raise Refusal(
                "5.5",
                f"the step ends with layers {missing} of {self._store.n_layer} unwritten; "
                "nothing of it becomes readable",
                {"unwritten": missing, "n_layer": self._store.n_layer},
            )

    def close(self) -> None:
        """Make the step useless: its block has ended."""
        self._closed = True

    def _in_block(self, layer: int) -> int:
        if self._closed:
            raise Refusal("5.5", "this step is over; open another with store.step(batch)")
        return self._store.checked_layer(layer)

    def _unwritten(self, layer: int) -> int:
        layer = self._in_block(layer)
        if layer in self._written:
            raise Refusal(
                "5.5",
                f"layer {layer} is written a second time; a step writes each layer once",
                {"layer": layer},
            )
        return layer

    def _choose(
        self, stretch: Stretch, op: str, n_head: int, variant: str | None
    ) -> registry.Choice:
        """The choice for this step's shape; all layers of a stretch share it."""
        key = (stretch.layers.start, op, n_head, variant)
        if key not in self._choices:
            self._choices[key] = self._select(stretch.device, op, n_head, variant)
        return self._choices[key]

    def _select(self, device: Device, op: str, n_head: int, variant: str | None) -> registry.Choice:
        store = self._store
        return registry.select(
            op,
            device=device,
            fmt=store.fmt,
            shape=Shape(
                kind=self.inputs.kind,
                n_q=self.inputs.n_tokens,
                n_head=n_head,
                n_head_kv=store.n_head_kv,
                head_dim=store.head_dim,
            ),
            variant=variant,
            config={} if store.threads is None else {"threads": store.threads},
        )
