"""The host's part of a session as an engine writes it: JSON that names what it was made with (8.6).

A store hands the host's bytes through as they are. What is said here is for people: nothing that a
load depends on is taken from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minfer.errors import Refusal
from minfer.kv.session.header import damaged

VERSION = 1
LINE = 200  # characters of a text out of a file that a message has
Facts = dict[str, str]


def pack(
    model: str, model_hash: str, facts: Mapping[str, str], state: Mapping[str, Any] | None
) -> bytes:
    """The host's bytes: the model's name, what numbers depend on, and the host's own state.

    model_hash: of all its weights. state: what JSON can hold, None for nothing; refused otherwise.
    """
    named = {"minfer_host": VERSION, "model": model, "model_hash": model_hash}
    told = {**named, "numerics": dict(facts), "state": state}
    try:
        return json.dumps(told, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        message = f"the host state is no plain JSON: {error}; give texts, numbers, lists, mappings"
        raise Refusal("8.6", message) from None


def told(host: bytes) -> tuple[str, Facts]:
    """The model's name and the facts of numbers, as far as `host` tells them; fit for a message."""
    try:
        found = _parsed(host)
        facts = {_line(name): _line(value) for name, value in dict(found["numerics"]).items()}
        return _line(found["model"]), facts
    except (KeyError, TypeError, ValueError, RecursionError):
        return "", {}


def facts(host: bytes) -> Facts:
    """The facts of numbers as they are, none where `host` tells none."""
    try:
        return {str(name): str(value) for name, value in dict(_parsed(host)["numerics"]).items()}
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}


def model_hash(host: bytes) -> str:
    """The hash of all weights, "" where `host` tells none."""
    try:
        return str(_parsed(host).get("model_hash", ""))
    except (ValueError, RecursionError):
        return ""


def version(host: bytes) -> int | None:
    """The version of a host part that an engine wrote; None for any other bytes."""
    try:
        found = _parsed(host).get("minfer_host")
    except (ValueError, RecursionError):
        return None
    return found if type(found) is int else None


def changed(host: bytes, **values: Any) -> bytes:
    """The host part with other values of these names; as it is where no engine wrote it."""
    if version(host) is None:
        return host
    return json.dumps({**_parsed(host), **values}).encode()


def state(host: bytes, where: str) -> dict[str, Any]:
    """The host's own state; empty for none. Raises Damaged for what no engine wrote."""
    if not host:
        return {}
    try:
        found = _parsed(host)
    except (ValueError, RecursionError):
        raise damaged(where, "its host part is no JSON object that an engine wrote") from None
    if found.get("minfer_host") != VERSION:
        raise Refusal(
            "8.6",
            f"{where} has a host part of version {found.get('minfer_host')!r} and this minfer "
            f"reads {VERSION}; open it with the minfer that wrote it",
            {"version": found.get("minfer_host"), "reads": VERSION},
        )
    kept = found.get("state")
    if kept is not None and not isinstance(kept, dict):
        raise damaged(where, "the state in its host part is no JSON object")
    return kept or {}


def _parsed(host: bytes) -> dict[str, Any]:
    found = json.loads(host.decode("utf-8"))
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def _line(value: object) -> str:
    """A text out of a file that neither steers a terminal nor fills it."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:LINE])
