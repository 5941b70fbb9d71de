"""Messages for chat templates."""

from __future__ import annotations

HI = [{"role": "user", "content": "Hi"}]
CONVERSATIONS: list[list[dict[str, str]]] = [
    HI,
    [{"role": "system", "content": "Be brief."}, *HI],
    [*HI, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "  Bye \n"}],
]
