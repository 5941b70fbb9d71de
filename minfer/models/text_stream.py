"""Text as it is generated, up to a stop string.

A stop string may begin in one token and end in another, or lie inside one. What is shown depends on
the text alone, never on where tokens end: the text is cut at the first character that completes a
stop string; if that character completes several, the longest counts. Nothing of the stop string and
nothing after it is shown, so text that may yet become one is held back until it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

from minfer.errors import Refusal
from minfer.models.tokenizer import Tokenizer


def checked_stops(stops: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple; one text counts as one. Refuses empty ones and what is no text."""
    given = (stops,) if isinstance(stops, str) else tuple(stops)
    for stop in given:
        if not isinstance(stop, str) or not stop or not _is_unicode(stop):
            raise Refusal(
                "10",
                f"stop string {stop!r} is no text that can appear; give at least one character",
                {"stop": stop},
            )
    return given


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


class TextStream:
    """Tokens to text that can be shown at once; characters appear whole.

    The pieces joined are `tokenizer.decode` of all tokens, cut at the first stop string. stopped:
    the stop string that was met, None before.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: str | Sequence[str] = (), *, continues: bool = False
    ) -> None:
        """continues: as in `Tokenizer.stream`."""
        self._characters = tokenizer.stream(continues=continues)
        self._stops = checked_stops(stops)
        self._held = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """The text that can be shown now that `token` is there; nothing once stopped."""
        return "" if self.stopped else self._show(self._characters.push(token))

    def finish(self) -> str:
        """What was held back, at the end of the tokens; a stop string may still be met."""
        if self.stopped:
            return ""
        shown = self._show(self._characters.finish())
        shown, self._held = shown + self._held, ""
        return shown

    def _show(self, characters: str) -> str:
        text = self._held + characters
        met = [
            (text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if met:
            end, _, self.stopped = min(met)
            shown, self._held = text[: end - len(self.stopped)], ""
            return shown
        start = len(text) - self._may_become_a_stop(text)
        shown, self._held = text[:start], text[start:]
        return shown

    def _may_become_a_stop(self, text: str) -> int:
        """How many of the last characters of `text` begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
