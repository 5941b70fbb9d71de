"""Promoted rows: what a sweep found better than the defaults, by kind of device (contract 6.4).

`<device_kind>.json` beside this file holds the rows of one kind of device; `python -m tuning
promote` writes them. A row says which variant an op gets for a format, head_dim and kind, with the
values of its tunables, and what it was made with. One that was made with other kernels or
libraries is not taken. A file is read once a process, when something is first chosen there.
"""

from minfer.tuned.choosing import Answer, Asked, answer, module_of, odd, settled, unfit
from minfer.tuned.machine import SIMULATED, device_kind, made_with
from minfer.tuned.rows import FAMILIES, HEADED, Key, Row, family, key_of
from minfer.tuned.sources import source_of
from minfer.tuned.table import NOTHING, Found, Table, dumped, found, loaded

__all__ = [
    "FAMILIES",
    "HEADED",
    "NOTHING",
    "SIMULATED",
    "Answer",
    "Asked",
    "Found",
    "Key",
    "Row",
    "Table",
    "answer",
    "device_kind",
    "dumped",
    "family",
    "found",
    "key_of",
    "loaded",
    "made_with",
    "module_of",
    "odd",
    "settled",
    "source_of",
    "unfit",
]
