"""Environment settings, read here and nowhere else (contract 9.5).

A flag is off when unset, empty or "0", on when "1", and refused otherwise. `SETTINGS` is the list
that `docs/settings.md` and `minfer devices` show.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from minfer.errors import Refusal


@dataclass(frozen=True)
class Setting:
    """One environment variable: its default as text, and what it does."""

    name: str
    default: str
    meaning: str


FLAGS = (
    "MINFER_NO_TUNED",
    "MINFER_NO_FUSED_Q8_KV",
    "MINFER_SANITIZE_CELLS",
    "MINFER_NO_KV_DEFRAG",
    "MINFER_NO_CONTEXT_SHIFT",
    "MINFER_METAL_SIM",
    "TRITON_INTERPRET",
)
SETTINGS = (
    Setting("MINFER_CACHE_TYPE", "auto", "KV cache format: f32, f16 or q8_0; --cache-type wins"),
    Setting("MINFER_CACHE_DIR", "~/.cache/minfer", "folder of pulled models and compiled kernels"),
    Setting("MINFER_NO_TUNED", "0", "1: promoted rows of sweeps choose no variant"),
    Setting("MINFER_NO_FUSED_Q8_KV", "0", "1: decode a q8_0 cache to f32 first, then attend"),
    Setting("MINFER_SANITIZE_CELLS", "0", "1: unwritten cells hold NaN, reads of them are traced"),
    Setting("MINFER_NO_KV_DEFRAG", "0", "1: the cell store never compacts"),
    Setting("MINFER_NO_CONTEXT_SHIFT", "0", "1: a full chat is fed again, never shifted in place"),
    Setting("MINFER_METAL_SIM", "0", "1: device metal runs in the simulator"),
    Setting("TRITON_INTERPRET", "0", "1: device cuda runs on the CPU, slowly, for checking"),
)


def values() -> dict[str, str]:
    """Every setting as it stands: the variable's text, or the default where unset or empty."""
    given = {s.name: os.environ.get(s.name) or s.default for s in SETTINGS}
    return {**given, "MINFER_CACHE_DIR": str(cache_dir())}


def check_flags() -> None:
    """Refuse a flag that is neither on nor off, whether or not it is read later."""
    for name in FLAGS:
        flag(name)


def flag(name: str) -> bool:
    """The on/off value of environment variable `name`."""
    value = os.environ.get(name, "")
    if value in ("", "0"):
        return False
    if value == "1":
        return True
    raise Refusal(
        "9.5",
        f"{name}={value!r} is neither 0 nor 1; unset it or use one of them",
        {"name": name, "value": value},
    )


def cache_type() -> str | None:
    """MINFER_CACHE_TYPE as it stands, None where unset or empty; `format` parses it."""
    return os.environ.get("MINFER_CACHE_TYPE") or None


def cache_dir() -> Path:
    """The user's folder for pulled models and compiled kernels; not created here."""
    chosen = os.environ.get("MINFER_CACHE_DIR")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise Refusal(
                "9.5",
                f"MINFER_CACHE_DIR={chosen!r} names no home folder; give a full path",
                {"MINFER_CACHE_DIR": chosen},
            ) from None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "minfer"
