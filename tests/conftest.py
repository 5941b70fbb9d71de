"""Fixtures: model files, the command line."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import under_test
from tiny_models import write_tiny_gguf

from minfer import cli, registry, settings
from minfer.device import BACKENDS, Backend, Device, DeviceKind
from minfer.pull import model_path

# Their assertions show values too.
pytest.register_assert_rewrite(
    "attention_oracle", "cell_tables", "errors_allowed", "refusals", "stores"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--on cuda`: whose kernels tests/kernels runs. Nothing else is imported for them."""
    names = [kind.label for kind in DeviceKind]
    parser.addoption(
        "--on", choices=names, default="cpu", help="the device under test: %(choices)s"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Test modules list the variants of the device as they are imported."""
    under_test.device = config.getoption("--on")
    if under_test.simulated():
        os.environ["MINFER_METAL_SIM"] = "1"
    why = Device.parse(under_test.device).unavailable()
    if why is not None:
        pytest.exit(why, returncode=2)


@pytest.fixture(autouse=True)
def interrupts_arrive() -> None:
    """A shell lets its background jobs ignore SIGINT; here it raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants that a test adds are gone after it."""
    monkeypatch.setattr(registry, "_added", {})


@pytest.fixture
def causal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device has the CPU's kernels, in a package that says it reads no spans."""
    from minfer import kernels_numba

    fake = ModuleType("causal_only")
    vars(fake).update(vars(kernels_numba), SUPPORTS_ATTN_SPAN=False)
    monkeypatch.setattr(Device, "package", lambda device: fake)


@pytest.fixture
def planes(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a device whose kernels are tests/planes, beside the CPU and its own."""
    monkeypatch.setitem(BACKENDS, DeviceKind.CUDA, Backend("planes", ("numba",), "cuda"))
    return DeviceKind.CUDA.label


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not wait."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, tied, head_dim 32. Tests do not write to it."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The pulled SmolLM2 file; tests that ask for it carry the marker `model`."""
    return pulled("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The pulled Gemma 3 270M file; tests that ask for it carry the marker `model`."""
    return pulled("gemma3-270m")


class Done(NamedTuple):
    """What a command left with, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command line in this process."""

    def run(*argv: object) -> Done:
        try:
            code = cli.main([str(a) for a in argv])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


def pulled(name: str) -> Path:
    path = model_path(name, settings.cache_dir())
    if not path.is_file():
        pytest.skip(f"{path} is missing; run: minfer pull {name}")
    return path


@pytest.fixture(scope="session")
def smollm2_transformers(smollm2: Path) -> Any:
    """The tokenizer that transformers builds from the same file; takes seconds."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@pytest.fixture(params=["small pieces", "one piece"])
def sized(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of session files come in pieces of two f32 rows, or all in one."""
    from minfer.kv.session import pieces, reading
    from minfer.sessions import rows as session_rows

    for module in (pieces, reading, session_rows):
        monkeypatch.setattr(module, "PIECE_BYTES", 512 if "small" in request.param else 4 << 20)
