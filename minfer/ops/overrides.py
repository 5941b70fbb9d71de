"""Values of tunables that a caller asks for, checked (contract 6.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minfer.errors import Refusal
from minfer.ops.declaration import Tunable, Variant
from minfer.ops.table import ACTIVATIONS, F32

MOST = 2**31 - 1  # kernels reckon with 64 bits; this times what they count fits
SHARED = {"threads": Tunable(1, ()), "activations": Tunable(F32, ACTIVATIONS)}  # if they concern


def configure(chosen: Variant, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of `chosen` with `overrides`, each checked against its tunable."""
    unknown = [k for k in overrides if k not in chosen.space and k not in SHARED]
    if unknown:
        raise Refusal(
            "6.4",
            f"{chosen.op}_{chosen.name} has no tunable {', '.join(unknown)}; "
            f"it has {', '.join(chosen.space) or 'none'}",
            {"unknown": unknown},
        )
    for name, value in overrides.items():
        _check_value(chosen, name, value, chosen.space.get(name) or SHARED[name])
    return {**chosen.config(), **{k: v for k, v in overrides.items() if k in chosen.space}}


def _check_value(chosen: Variant, name: str, value: object, tunable: Tunable) -> None:
    """Refuse another type than the default's, a number below 1 or above `MOST`, an odd word."""
    default = tunable.default
    if type(value) is type(default) and value == default:
        return  # what is below 1 there stands for what was measured
    if type(value) is not type(default):
        problem = f"is a {type(value).__name__}, not a {type(default).__name__}"
    elif isinstance(value, int) and value < 1:
        problem = "is below 1"
    elif isinstance(value, int) and value > MOST:
        problem = f"is above {MOST}"
    elif isinstance(value, str) and value not in tunable.values:
        problem = f"is none of {', '.join(tunable.values)}"
    else:
        return
    raise Refusal(
        "6.4",
        f"{name} {value!r} of {chosen.op}_{chosen.name} {problem}; the default is {default!r}",
        {"name": name, "value": value, "default": default},
    )
