"""The op table, and how a kernel variant is declared.

An op is one word with one meaning: the oracle in `reference`, the kernels in every
`kernels_*` package, the test id, the tuning row and the command line all use it. A variant is one
algorithm for an op, a function named `<op>_<variant>` tagged by `@variant`.
"""

from minfer.ops.declaration import (
    Config,
    Kernel,
    Limits,
    Numerics,
    Shape,
    Tunable,
    Variant,
    split_name,
    variant,
)
from minfer.ops.table import (
    ACTIVATIONS,
    CELLS,
    DECODE,
    F32,
    HALF,
    INTERLEAVED,
    KINDS,
    OPS,
    PAIRINGS,
    PREFILL,
    WEIGHT,
    Op,
    check_activations,
    check_kind,
    check_pairing,
)

__all__ = [
    "ACTIVATIONS",
    "CELLS",
    "DECODE",
    "F32",
    "HALF",
    "INTERLEAVED",
    "KINDS",
    "OPS",
    "PAIRINGS",
    "PREFILL",
    "WEIGHT",
    "Config",
    "Kernel",
    "Limits",
    "Numerics",
    "Op",
    "Shape",
    "Tunable",
    "Variant",
    "check_activations",
    "check_kind",
    "check_pairing",
    "split_name",
    "variant",
]
