"""What a prompt and its continuation need, checked before anything runs (contract 0.1, 2.5)."""

from __future__ import annotations

from collections.abc import Sequence

from minfer.errors import Refusal
from minfer.kv.checks import whole_number
from minfer.kv.store import KvStore


def checked_prompt(tokens: Sequence[int], n_vocab: int) -> list[int]:
    """The ids of a prompt; an empty one and ids outside the vocabulary are refused."""
    if not len(tokens):
        raise Refusal("1", "the prompt has no tokens; give at least one character", {"tokens": 0})
    return [whole_number(id, "token", "7.5", high=n_vocab - 1) for id in tokens]


def budget(store: KvStore, n_prompt: int, max_tokens: int | None, seq: int) -> int:
    """How many tokens may be generated; the last one needs no cell of its own."""
    wanted = 1 if max_tokens is None else whole_number(max_tokens, "max_tokens", "10", low=1)
    end = n_prompt + (store.written(seq) if store.has(seq) else 0)
    what = f"{end} prompt tokens and {wanted} to generate need"
    cap = refuse_overflow(store, seq, end + wanted - 1, what)
    return cap - end + 1 if max_tokens is None else wanted


def refuse_overflow(store: KvStore, seq: int, cells: int, what: str) -> int:
    """Refuse more cells than `seq` has, or could have if it holds none; returns that number."""
    n_ctx = store.n_ctx
    cap = store.cap(seq) if store.has(seq) else n_ctx
    if cells <= cap:
        return cap
    if cap == n_ctx:
        limit = f"n_ctx is {n_ctx}; use a larger --n-ctx, a smaller -n or a shorter prompt"
    else:
        limit = f"sequence {seq} holds {cap} of {n_ctx}; reserve more for it"
    facts = {"seq": seq, "cells": cells, "cap": cap, "n_ctx": n_ctx}
    raise Refusal("2.5", f"{what} {cells} cells and {limit}", facts)
