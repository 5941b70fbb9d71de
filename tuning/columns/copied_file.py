"""A plain copy of a file that is brought to the disk, beside session files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

from tuning.bench.cases import Case
from tuning.bench.file_cases import File
from tuning.bench.protocol import Message
from tuning.columns.files import folder, forget, to_disk
from tuning.columns.subjects import Measure, Subject, run_column

PART = 1 << 20


def copied(case: Case, how: Message) -> Subject:
    """A file of as many bytes, copied over another and synced. values: the last bytes of both."""
    assert isinstance(case, File)
    kept = folder()
    source, target = (Path(kept.name) / name for name in ("source", "target"))
    rng, left = np.random.default_rng(0), case.bytes_of(how["fmt"])
    with source.open("wb") as out:
        while left:
            left -= out.write(rng.bytes(min(left, PART)))

    def copy() -> None:
        assert kept  # the folder lives as long as what is measured
        shutil.copyfile(source, target)
        to_disk(target)

    copy()
    measures = {
        "save": Measure([copy], most=1),
        "load": Measure([copy], most=1),
        "load cold": Measure([copy], lambda: forget(source), most=1),
    }
    ends = [path.read_bytes()[-PART:] for path in (target, source)]
    values = np.stack([np.frombuffer(end, np.uint8).astype(np.float32) for end in ends])
    return Subject(measures, values, note="copyfile, fsync")


if __name__ == "__main__":
    run_column({"file": copied}, lambda: {"python": sys.version.split()[0]})
