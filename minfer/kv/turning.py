"""How removal turns the K rows that move (contract 5.7): checked before anything is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minfer import rope as ropes
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.kv.arena import Turn
from minfer.ops import check_pairing
from minfer.rope import Rope


def refuse_without_map(fmt: KvFormat) -> None:
    """Refuse f16: there is no map of f16 cells."""
    if fmt is KvFormat.F16:
        raise Refusal(
            "5.7",
            "positions cannot be removed from an f16 cache: K rows that move are turned, and there "
            "is no map_f16_cells; use f32 or q8_0, or truncate where the rows are a tail",
            {"fmt": fmt.value},
        )


def turns(
    rope: Rope | Sequence[Rope | None] | None, by: int, n_layer: int, head_dim: int, pairing: str
) -> list[Turn | None]:
    """By layer, cos and sin of `by` positions; None where K rows are not rotated.

    rope: one for all layers, or one a layer.
    """
    check_pairing(pairing)
    each = list(rope) if isinstance(rope, Sequence) else [rope] * n_layer
    if len(each) != n_layer:
        raise Refusal(
            "5.7",
            f"{len(each)} ropes for {n_layer} layers; give one a layer, or one for all",
            {"ropes": len(each), "n_layer": n_layer},
        )
    for layer, one in enumerate(each):
        _check(one, layer, head_dim)
    made = {one: _turn(one, by) for one in set(each) if one is not None}
    return [None if one is None else made[one] for one in each]


def _turn(rope: Rope, by: int) -> Turn:
    """cos and sin of `by` positions; angles that are no numbers would make every key NaN."""
    with np.errstate(all="ignore"):
        cos, sin = ropes.turn(rope, by)
    if not np.isfinite(cos).all():
        raise Refusal(
            "5.7",
            f"{rope} turns by angles that are not finite; give a base above 0 and a finite scaling",
            {"rope": str(rope), "by": by},
        )
    return cos, sin


def _check(rope: object, layer: int, head_dim: int) -> None:
    if rope is None:
        return
    if not isinstance(rope, Rope):
        kind = type(rope).__name__
        raise Refusal(
            "5.7",
            f"the rope of layer {layer} is a {kind}; give a minfer.rope.Rope, or None for rows "
            "that are not rotated",
            {"layer": layer, "type": kind},
        )
    if rope.n_rot % 2 or not 0 < rope.n_rot <= head_dim:
        raise Refusal(
            "5.7",
            f"the rope of layer {layer} turns {rope.n_rot} dimensions of a head of {head_dim}; "
            f"give an even number of at most {head_dim}",
            {"layer": layer, "n_rot": rope.n_rot, "head_dim": head_dim},
        )
