"""Pulling from the hub: the real library against a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from minfer import cli
from minfer.errors import Damaged, Refusal
from minfer.memory import human
from minfer.pull import MODELS, model_path, pull, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY = "hf:someone/tiny:tiny.gguf"


class LittleHub(BaseHTTPRequestHandler):
    """Answers `/OWNER/REPO/resolve/REVISION/FILE` as the hub does."""

    server: Served

    def do_HEAD(self) -> None:
        if "/resolve/" not in self.path:  # the library asks for other things at times
            self._answer(404, {})
            return
        self.server.asked.append(f"{self.command} {self.path}")
        owner, _, _, revision, file = self.path.strip("/").split("/", 4)
        content = self.server.files.get(file)
        if owner == "gated":
            self._answer(403, {"X-Error-Code": "GatedRepo"})
        elif owner != "someone":
            self._answer(401, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1%2Fbeta", COMMIT):
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        elif content is None:
            self._answer(404, {"X-Error-Code": "EntryNotFound"})
        else:
            sizes = {"X-Linked-Size": str(self.server.sizes.get(file, len(content)))}
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self._answer(200, {"ETag": etag, "X-Repo-Commit": COMMIT, **sizes}, content)

    do_GET = do_HEAD

    def _answer(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Served(ThreadingHTTPServer):
    """files by name; sizes it claims where they are others; asked: the requests."""

    files: dict[str, bytes]
    sizes: dict[str, int]
    asked: list[str]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_gguf: Path) -> Iterator[Served]:
    """The little hub, where the library finds it; the cache folder is `tmp_path`."""
    server = Served(("127.0.0.1", 0), LittleHub)
    server.files = {"tiny.gguf": tiny_gguf.read_bytes(), "text.gguf": b"no model at all"}
    server.files |= {"q8/tiny.gguf": server.files["tiny.gguf"], "cut.gguf": b"GGUF"}
    server.sizes, server.asked = {"cut.gguf": 5}, []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    yield server
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    "name, place",
    [
        (TINY, "someone/tiny/tiny.gguf"),
        ("hf:someone/tiny:q8/tiny.gguf", "someone/tiny/q8/tiny.gguf"),
        (f"{TINY}@{COMMIT}", f"someone/tiny@{COMMIT}/tiny.gguf"),
        (f"{TINY}@v1/beta", "someone/tiny@v1%2Fbeta/tiny.gguf"),
    ],
)
def test_a_file_is_fetched_once(hub: Served, tmp_path: Path, name: str, place: str) -> None:
    with pytest.raises(Refusal, match=f"{name} is not there yet; run: minfer pull {name}"):
        resolve_model(name)
    path = pull(name, tmp_path)
    assert path == tmp_path / "models" / "hf" / place == resolve_model(name)
    assert path.read_bytes() == hub.files["tiny.gguf"]
    assert files(tmp_path) == [f"models/hf/{place}"]
    assert [line for line in hub.asked if line.startswith("GET")] == [
        f"GET /someone/tiny/resolve/{COMMIT}/{'q8/' if 'q8' in name else ''}tiny.gguf"
    ]
    n_asked = len(hub.asked)
    assert pull(name, tmp_path) == path and len(hub.asked) == n_asked


REFUSED = {
    "no repository": ("hf:nobody/none:a.gguf", "the hub has no repository nobody/none, or it is"),
    "gated": ("hf:gated/model:a.gguf", "gated/model is gated; accept its terms"),
    "no file": ("hf:someone/tiny:b.gguf", "someone/tiny has no file b.gguf at revision main; look"),
    "no revision": (f"{TINY}@v2", "someone/tiny has no revision v2"),
    "a bad name": ("hf:some--one/tiny:a.gguf", r"could not be fetched \(Cannot have -- or"),
    "another size": ("hf:someone/tiny:cut.gguf", r"could not be fetched \(Consistency check"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hub_refuses(hub: Served, tmp_path: Path, case: str) -> None:
    name, message = REFUSED[case]
    with pytest.raises(Refusal, match=message) as caught:
        pull(name, tmp_path)
    assert caught.value.exit_code == 2 and caught.value.facts == {"model": name}
    assert [p.name for p in tmp_path.rglob("*")] == ["models"]


def test_a_file_that_is_no_model_is_not_kept(hub: Served, tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="is no GGUF file: it starts with b'no m'"):
        pull("hf:someone/tiny:text.gguf", tmp_path)
    assert [p.name for p in tmp_path.rglob("*")] == ["models"]


def test_a_small_disk_is_refused_before_the_download(
    hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, usage = len(hub.files["tiny.gguf"]), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    with pytest.raises(Refusal, match=f"pulling {TINY} needs .* of disk at .*models") as caught:
        pull(TINY, tmp_path)
    assert caught.value.facts["needed"] == size
    assert not [line for line in hub.asked if line.startswith("GET")]
    assert [p.name for p in tmp_path.rglob("*")] == ["models"]


def test_offline(hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Refusal, match=rf"the hub cannot be reached for {TINY} \(.*offline.*\); ch"):
        pull(TINY, tmp_path)
    assert [p.name for p in tmp_path.rglob("*")] == ["models"] and not hub.asked


def unreachable() -> Exception:
    error = errors.LocalEntryNotFoundError("An error happened while trying to locate the file")
    error.__cause__ = OSError(111, "Connection refused")
    return error


FAILURES = [
    (unreachable(), r"cannot be reached for .* \(\[Errno 111\] Connection refused\); check the"),
    (errors.HTTPError("connection reset"), r"could not be fetched \(connection reset\); pull"),
    (RuntimeError("no chunk"), r"could not be fetched \(no chunk\); pull again"),
    (OSError(28, "No space left on device"), "cannot be written: No space left on device; make"),
]


@pytest.mark.parametrize("error, message", FAILURES, ids=lambda value: type(value).__name__)
def test_failures_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(repo: str, file: str, *, local_dir: Path, **_: Any) -> None:
        (local_dir / file).write_bytes(b"half")
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(Refusal, match=message) as caught:
        pull(TINY, tmp_path)
    assert caught.value.exit_code == 2
    assert [p.name for p in tmp_path.rglob("*")] == ["models"]


@pytest.mark.parametrize(
    "name",
    [
        *("hf:", "hf:tiny.gguf", "hf:tiny:tiny.gguf", "hf:a/b/c:d.gguf", "hf:a/b:c", "hf:a/b:.bin"),
        *("hf:a/b:../../c.gguf", "hf:a/b:/c.gguf", "hf:../b:c.gguf", "hf:a/..:c.gguf"),
        *(r"hf:a/b:..\c.gguf", "hf:a/b:c@/../d.gguf", "hf:a/b:c//d.gguf", "hf:a/b:c.gguf@"),
    ],
)
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    for act in (lambda: model_path(name, tmp_path), lambda: pull(name, tmp_path)):
        with pytest.raises(Refusal, match="does not read hf:OWNER/REPO:FILE"):
            act()
    assert files(tmp_path) == []


def test_the_list_has_what_was_pulled(
    hub: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [TINY, "hf:someone/tiny:q8/tiny.gguf", f"{TINY}@v1/beta"]
    for name in names:
        pull(name, tmp_path)
    for stray in ("note.gguf", "a/b.gguf", "a/b/c d.gguf", "a/b/c.txt", "a/b/folder.gguf/x"):
        path = tmp_path / "models/hf" / stray
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no pull left this")
    assert cli.main(["pull", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert set(rows) == {*MODELS, *names}
    told: dict[str, Any] = {"license": None, "sha256": None, "terms": None, "packages": []}
    size = len(hub.files["tiny.gguf"])
    for name in names:
        row = {"name": name, "file": "tiny.gguf", "size": size, "pulled": True}
        assert rows[name] == row | told
    assert rows["smollm2"]["pulled"] is False
    assert cli.main(["pull"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[len(MODELS) :] == [
        [name, *human(size).split(), "pulled"] for name in sorted(names)
    ]


def test_the_command_line(
    hub: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["run", TINY, "-p", "the cat"]) == 2
    assert f"run: minfer pull {TINY}" in capsys.readouterr().err
    assert cli.main(["pull", TINY, "--json"]) == 0
    pulled = {"name": TINY, "path": str(tmp_path / "models/hf/someone/tiny/tiny.gguf")}
    assert json.loads(capsys.readouterr().out) == pulled
    assert cli.main(["pull", "hf:x"]) == 2
    assert "hf:OWNER/REPO:FILE.gguf" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert cli.main(["pull", f"{TINY}@v1"]) == 2
    missing = "minfer: huggingface_hub is not installed; pip install 'minfer[cpu,models]'\n"
    assert capsys.readouterr().err == missing
