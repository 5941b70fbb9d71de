"""What each operation is called with, from what there is (see `draws`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minfer.testing.draws import CAP, ROWS, Drawn, There


def reserve(d: Drawn) -> Sequence[int]:
    gap = d.free()[1]
    return d.new_seq(), d.one_of([0, gap, gap + 1]) if d.wild else d.number(1, min(CAP, gap))


def reserve_with_defrag(d: Drawn) -> Sequence[int]:
    free, gap = d.free()
    if free <= gap:
        return reserve(d)
    return d.new_seq(), free + 1 if d.wild else d.number(gap + 1, min(free, gap + 3))


def release(d: Drawn) -> Sequence[int]:
    """Often one that others read, which leaves an orphan, or the lowest, which leaves a gap."""
    read = d.known(lambda seq: d.read_by_others(seq) > 0)
    lowest = d.known(lambda seq: d.place(seq) == min(map(d.place, d.written)))
    return (d.any_seq() if d.wild else d.one_of([*read, *lowest, *d.known(lambda seq: True)]),)


def truncate(d: Drawn) -> Sequence[int]:
    """Often one that others read, which then read more than it has."""
    has = d.known(lambda seq: d.written[seq] > 0) or sorted(d.written)
    read = [seq for seq in has if d.read_by_others(seq)]
    if read and d.number(0, 2):
        seq = d.one_of(read)
        return seq, d.number(0, min(d.written[seq], d.read_by_others(seq)) - 1)
    seq = d.one_of(has)
    return seq, d.number(0, d.written[seq] + d.wild)


def resize(d: Drawn) -> Sequence[int]:
    seq = d.seq_of_several() if d.wild else d.seq()
    lowest, most = max(1, d.written[seq] - d.share(seq), d.read_by_others(seq)), d.most(seq)
    if d.wild:
        return seq, d.one_of([lowest - 1, most + 1])
    return seq, d.number(lowest, min(lowest + 5, most))


def resize_with_defrag(d: Drawn) -> Sequence[int]:
    seq = d.seq()
    own, free = d.own_cap(seq), d.free()[0]
    return seq, own + free + 1 if d.wild else d.number(own, own + min(3, free))


def defrag(d: Drawn) -> Sequence[int | None]:
    free, gap = d.free()
    everything = d.number(0, 1) == 0
    return (None if everything else d.number(min(gap + 1, free) or 1, free + d.wild),)


def can_share(there: There) -> bool:
    if there.wild:
        return bool(there.written)
    donors, empty = there.known(lambda seq: there.can_give(seq) > 0), there.known(there.is_empty)
    return bool(donors and empty) and len({*donors, *empty}) > 1


def share_prefix(d: Drawn) -> Sequence[int]:
    if d.wild:
        return bad_share(d)
    dst = d.seq(d.is_empty)
    src = d.seq(lambda seq: seq != dst and d.can_give(seq) > 0)
    return src, dst, d.number(1, d.can_give(src))


def bad_share(d: Drawn) -> Sequence[int]:
    """Another number of rows than can be given, or a target that cannot take them."""
    sharers = d.known(lambda seq: d.written[seq] > d.share(seq) > 0)
    donors = d.known(lambda seq: d.can_give(seq) > 0)
    src = d.one_of([*sharers, *donors] or sorted(d.written))
    if d.number(0, 1):
        return src, d.seq_of_several(), max(1, d.can_give(src))
    empty = d.known(lambda seq: seq != src and d.is_empty(seq)) or sorted(d.written)
    return src, d.one_of(empty), d.one_of([d.can_give(src) + 1, 0])


def can_fork(there: There) -> bool:
    return bool(there.known(lambda seq: there.can_give(seq) > 0)) and there.free()[1] > 0


def fork(d: Drawn) -> Sequence[int]:
    """Of a reservation and of a share for it: src, dst, cap, rows."""
    src = d.seq(lambda seq: d.can_give(seq) > 0)
    most = d.can_give(src)
    return src, d.new_seq(), d.number(1, min(5, d.free()[1])), d.number(max(1, most - 2), most)


def can_copy(there: There) -> bool:
    if there.wild:
        return bool(there.written)
    sources, takers = there.known(lambda s: there.written[s] > 0), there.known(there.takes_copies)
    return bool(sources and takers) and len({*sources, *takers}) > 1


def copy_prefix(d: Drawn) -> Sequence[int]:
    dst = d.seq(d.takes_copies)
    src = d.seq(lambda seq: seq != dst and d.written[seq] > d.written[dst])
    held, most = d.written[dst], min(d.written[src], d.cap(dst))
    if d.wild:
        return src, dst, d.one_of([max(1, held - 1), most + 1])
    return src, dst, d.number(max(1, held), most)


def can_remove(there: There) -> bool:
    if there.wild:
        return bool(there.written)
    return bool(there.known(lambda seq: there.written[seq] > there.fixed(seq)))


def remove(d: Drawn) -> Sequence[int]:
    if d.wild:
        seq = d.seq_of_several()
        rows = d.written[seq]
        start = d.one_of([max(0, d.fixed(seq) - 1), rows])
        return seq, start, d.number(1, max(1, rows - start))
    seq = d.seq(lambda seq: d.written[seq] > d.fixed(seq))
    rows = d.written[seq]
    start = d.number(d.fixed(seq), rows - 1)
    return seq, start, d.number(1, min(3, rows - start))


def can_shift(there: There) -> bool:
    if there.wild:
        return bool(there.written)
    return bool(there.known(lambda seq: there.written[seq] > 0 and not there.fixed(seq)))


def shift(d: Drawn) -> Sequence[int]:
    seq = d.seq(lambda seq: d.written[seq] > 0 and not d.fixed(seq))
    return seq, d.number(1, d.written[seq] + d.wild)


def write(d: Drawn) -> Sequence[int]:
    return d.group(d.seq())


def can_append(there: There) -> bool:
    if there.wild:
        return bool(there.written)
    return bool(there.known(lambda seq: there.cap(seq) > there.written[seq]))


def append(d: Drawn) -> Sequence[int]:
    seq = d.seq(lambda seq: d.cap(seq) > d.written[seq])
    room = d.cap(seq) - d.written[seq]
    return seq, room + 1 if d.wild else d.number(1, min(ROWS, room))


def step(d: Drawn) -> Sequence[list[tuple[int, int, int]]]:
    return (groups(d, []),)


def failing_step(d: Drawn) -> Sequence[Any]:
    return groups(d, []), d.number(0, 2)


def has_sharer(there: There) -> bool:
    return any(there.below_share(seq) for seq in there.written)


def rewrite_share(d: Drawn) -> Sequence[list[tuple[int, int, int]]]:
    """A step that copies rows of a sharer."""
    seq = d.one_of(d.known(lambda seq: bool(d.below_share(seq))))
    return (groups(d, [d.rewrite(seq, d.below_share(seq))]),)


def has_donor(there: There) -> bool:
    return any(there.below_readers(seq) for seq in there.written)


def rewrite_given(d: Drawn) -> Sequence[list[tuple[int, int, int]]]:
    """A step that makes a donor go on elsewhere."""
    seq = d.one_of(d.known(lambda seq: bool(d.below_readers(seq))))
    return (groups(d, [d.rewrite(seq, d.below_readers(seq))]),)


def groups(d: Drawn, begun: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Up to two more groups, of other sequences."""
    for _ in range(d.number(0 if begun else 1, 2)):
        taken = [group[0] for group in begun]
        left = [seq for seq in sorted(d.written) if seq not in taken]
        if left:
            begun.append(d.group(d.one_of(left)))
    return begun
