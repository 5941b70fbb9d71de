"""Fuzzing of session files: `python tests/fuzz/session.py [--seconds N] [corpus]`.

Files of the corpus are changed at random, without end or for N seconds, and loaded. One that
reaches lines of minfer/kv/session in an order that none before did is kept, and changed in its
turn. What must hold is said by `session_mutations.Target`; an input with which it does not is made
as like a sound file as it can be, written beside the corpus, and ends the run with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from session_mutations import HEAD_DIM, Target, checksummed, mutated  # noqa: E402

from minfer import atomic  # noqa: E402
from minfer.kv.session.header import FLAGS  # noqa: E402

CORPUS = Path(__file__).parent / "corpus"
Edges = set[tuple[str, int, int]]


class Fuzzer:
    """Inputs, and the edges (file, line, next line) that they have reached together."""

    def __init__(self, corpus: Path, folder: Path, seed: int) -> None:
        self.corpus, self.rng = corpus, random.Random(seed)
        self.targets = {fmt: Target(fmt, folder) for fmt in HEAD_DIM}
        kept = [path.read_bytes() for path in sorted(corpus.glob("*.kv"))]
        self.inputs = [*(target.base for target in self.targets.values()), *kept]
        self.reached: Edges = set()
        for data in self.inputs:
            self.reached |= self.edges(data)

    def edges(self, data: bytes) -> Edges:
        """What loading `data` reaches; raises what must not be raised."""
        with traced() as edges:
            self.target(data).loads(data)
        return edges

    def target(self, data: bytes) -> Target:
        """A store of the format of a file, of any format where it has none."""
        formats = {flags: str(fmt) for fmt, flags in FLAGS.items()}
        return self.targets[formats.get(int.from_bytes(data[12:16], "little"), "f32")]

    def run_once(self) -> None:
        """Change an input; keep what is new."""
        data = mutated(self.rng.choice(self.inputs), self.rng)
        try:
            edges = self.edges(data)
        except Exception:
            raise FailedError(self.like_sound(data)) from None
        if edges - self.reached:
            self.reached |= edges
            self.inputs.append(data)
            (self.corpus / f"{hashlib.sha256(data).hexdigest()[:12]}.kv").write_bytes(data)

    def failure(self, data: bytes) -> Exception | None:
        """What a store that saw nothing else raises."""
        target = self.target(data)
        try:
            Target(str(target.store.fmt), target.folder).loads(data)
        except Exception as error:
            return error
        return None

    def like_sound(self, data: bytes) -> bytes:
        """A failing input with all bytes of the sound file that it can have and still fail."""
        sound, size = self.target(data).base, 256
        while size and len(data) == len(sound):
            for at in range(0, len(data) - 16, size):
                part = slice(at, min(at + size, len(data) - 16))
                tried = checksummed(data[: part.start] + sound[part] + data[part.stop : -16])
                if data[part] != sound[part] and self.failure(tried):
                    data = tried
            size //= 4
        return data


class FailedError(Exception):
    """An input with which something does not hold that must."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data


@contextmanager
def traced() -> Iterator[Edges]:
    """The edges between lines of minfer/kv/session that the block reaches."""
    edges: Edges = set()
    before: dict[FrameType, int] = {}

    def lines(frame: FrameType, event: str, arg: object) -> object:
        if event == "line":
            name = frame.f_code.co_filename
            edges.add((name, before.get(frame, 0), frame.f_lineno))
            before[frame] = frame.f_lineno
        return lines

    def calls(frame: FrameType, event: str, arg: object) -> object:
        return lines if "/kv/session/" in frame.f_code.co_filename else None

    outer = sys.gettrace()
    sys.settrace(calls)
    try:
        yield edges
    finally:
        sys.settrace(outer)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 if an input failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpus", nargs="?", type=Path, default=CORPUS, help="a folder of inputs")
    parser.add_argument("--seconds", type=float, help="how long; without end if left out")
    parser.add_argument("--runs", type=int, help="how many inputs at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.corpus.mkdir(exist_ok=True)
    begin, sync = time.monotonic(), atomic.os.fsync
    with tempfile.TemporaryDirectory() as folder:
        atomic.os.fsync = lambda fd: None
        try:
            fuzzer = Fuzzer(args.corpus, Path(folder), args.seed)
            for n in count(1):
                fuzzer.run_once()
                if n == args.runs or (args.seconds and time.monotonic() - begin > args.seconds):
                    break
        except FailedError as failed:
            path = args.corpus / f"failing-{hashlib.sha256(failed.data).hexdigest()[:12]}.kv"
            path.write_bytes(failed.data)
            print(f"failing: {path}")
            traceback.print_exception(fuzzer.failure(failed.data))
            return 1
        finally:
            atomic.os.fsync = sync
    print(f"{n} inputs, {len(fuzzer.inputs)} kept, {len(fuzzer.reached)} edges")
    return 0


if __name__ == "__main__":
    sys.exit(main())
