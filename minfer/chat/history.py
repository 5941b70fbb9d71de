"""The history of a chat as a JSON file, for people and for every next start (contract 9.1)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minfer.atomic import replacing
from minfer.errors import Damaged, Refusal

VERSION = 1
KEYS = {"version", "started", "left_out", "messages"}


@dataclass(frozen=True)
class History:
    """messages: {"role", "content"} each. started: None where the file does not say.

    unanswered: a last message that has no answer, which is not among `messages`.
    """

    messages: list[dict[str, str]]
    started: datetime.datetime | None
    unanswered: str = ""


def read(path: Path) -> History | None:
    """The history in a file, None where there is none.

    Raises Damaged for what is no JSON, and refuses what is no history, naming the place. Nothing is
    written.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror or error}; give another name"
        raise Refusal("9.1", what, {"path": str(path)}) from None
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise Damaged(
            "9.1", f"{path} is no JSON: {error}; mend it or give another name", {"path": str(path)}
        ) from None
    try:
        return _history(found)
    except Refusal as refusal:
        message = f"{path} is no history of a chat: {refusal.message}; mend it or give another name"
        raise Refusal("9.1", message, {"path": str(path), **refusal.facts}) from None


def write(
    path: Path, messages: Sequence[dict[str, str]], started: datetime.datetime, left_out: int
) -> None:
    """Put a history in place of the file's, whole or not at all."""
    told = {
        "version": VERSION,
        "started": started.isoformat(),
        "left_out": left_out,
        "messages": list(messages),
    }
    with replacing(path) as file:
        file.write((json.dumps(told, ensure_ascii=False, indent=2) + "\n").encode())


def _history(found: Any) -> History:
    if not isinstance(found, dict):
        raise _wrong("it is no object")
    if found.get("version") != VERSION:
        version = found.get("version")
        raise _wrong(f"its version is {version!r} and this minfer reads {VERSION}", version=version)
    if unknown := sorted(found.keys() - KEYS):
        raise _wrong(f"it has {unknown[0]!r}, which is none of {', '.join(sorted(KEYS))}")
    messages = checked_messages(found.get("messages"))
    started = found.get("started")
    unanswered = messages.pop()["content"] if messages and messages[-1]["role"] == "user" else ""
    return History(messages, None if started is None else checked_time(started), unanswered)


def checked_messages(messages: Any) -> list[dict[str, str]]:
    """Messages of a file: roles system (at the start), user and assistant, contents in Unicode."""
    if not isinstance(messages, list):
        raise _wrong("its messages are no list")
    roles = ("system", "user", "assistant")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise _wrong(f"message {number} is not a role and a content", message=number)
        role, content = message["role"], message["content"]
        if role not in roles:
            raise _wrong(f"message {number} has the role {role!r}, none of {', '.join(roles)}")
        if role == "system" and number > 1 and messages[number - 2]["role"] != "system":
            what = f"message {number} is a system prompt after other messages"
            raise _wrong(what, message=number)
        if not isinstance(content, str) or any("\ud800" <= c <= "\udfff" for c in content):
            raise _wrong(f"the content of message {number} is no text", message=number)
    return [dict(message) for message in messages]


def checked_time(started: Any) -> datetime.datetime:
    """A local time of a file."""
    try:
        return datetime.datetime.fromisoformat(started)
    except (TypeError, ValueError):
        raise _wrong(f"started {started!r} is no time such as 2024-01-31T12:00:00") from None


def _wrong(what: str, **facts: object) -> Refusal:
    return Refusal("9.1", what, facts)
