"""The host's part of a session as an engine writes it: JSON that names what it was made with (8.6).

A store hands the host's bytes through as they are. What an engine says in them is for people:
nothing that a load depends on is taken from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minfer.errors import Refusal
from minfer.kv.session.header import damaged

VERSION = 1
LINE = 200  # characters of a text out of a file that a message has
UNREADABLE = (KeyError, TypeError, ValueError, RecursionError)


@dataclass(frozen=True)
class HostPart:
    """What an engine wrote; of other bytes version is None and the rest is empty.

    model: the name of its file. model_hash: of all weights. facts: what numbers depend on.
    content: the whole JSON object.
    """

    version: int | None = None
    model: str = ""
    model_hash: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    content: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, host: bytes) -> HostPart:
        """As far as the bytes tell it; never an error."""
        try:
            content = json.loads(host.decode("utf-8"))
            version = content.get("minfer_host") if isinstance(content, dict) else None
        except UNREADABLE:
            version = None
        if type(version) is not int:
            return cls()
        try:
            facts = {str(name): str(value) for name, value in dict(content["numerics"]).items()}
        except UNREADABLE:
            facts = {}
        model, model_hash = (str(content.get(name, "")) for name in ("model", "model_hash"))
        return cls(version, model, model_hash, facts, content)

    def state(self, where: str) -> dict[str, Any]:
        """The host's own state, empty for none.

        Refuses another version; raises Damaged for a state that is no JSON object.
        """
        if self.version != VERSION:
            raise Refusal(
                "8.6",
                f"{where} has a host part of version {self.version} and this minfer reads "
                f"{VERSION}; open it with the minfer that wrote it",
                {"version": self.version, "reads": VERSION},
            )
        kept = self.content.get("state")
        if kept is not None and not isinstance(kept, dict):
            raise damaged(where, "the state in its host part is no JSON object")
        return kept or {}

    def packed(self, **values: Any) -> bytes:
        """Its bytes with other values of these names in the JSON object."""
        return json.dumps({**self.content, **values}).encode()


def pack(
    model: str, model_hash: str, facts: Mapping[str, str], state: Mapping[str, Any] | None
) -> bytes:
    """The host's bytes of an engine, see `HostPart`.

    state: what JSON can hold, None for nothing; refused otherwise.
    """
    named = {"minfer_host": VERSION, "model": model, "model_hash": model_hash}
    content = {**named, "numerics": dict(facts), "state": state}
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        message = f"the host state is no plain JSON: {error}; give texts, numbers, lists, mappings"
        raise Refusal("8.6", message) from None


def state(host: bytes, where: str) -> dict[str, Any]:
    """The state that an engine saved; empty for no bytes. Raises Damaged for what none wrote."""
    if not host:
        return {}
    part = HostPart.parse(host)
    if part.version is None:
        raise damaged(where, "its host part is no JSON object that an engine wrote")
    return part.state(where)


def line(text: str) -> str:
    """A text out of a file that neither steers a terminal nor fills it."""
    return "".join(c if c.isprintable() else "?" for c in text[:LINE])
