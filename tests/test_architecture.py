"""The house rules: who imports whom, what an import costs, and one signature per op."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minfer import reference, registry
from minfer.ops import OPS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minfer"

# From the ground up: a module imports its own layer and those before it.
LAYERS = (
    ("errors", "settings", "format", "planes", "window", "memory", "uninterrupted", "atomic"),
    ("ops", "rope", "timing", "reference", "cases"),
    ("kernels_numba", "kernels_triton", "kernels_mlx"),
    ("device", "offload", "receipt", "tuned", "registry", "numerics"),
    ("kv",),
    ("functional", "graph", "testing"),
    ("models",),
    ("pull",),
    (
        *("loading", "prompts", "generation", "engine_session", "inference", "engine", "chat"),
        *("perplexity", "sessions"),
    ),
    ("commands",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
KERNELS = LAYERS[2]
# and what they are written in
PACKAGES = {"kernels_numba": "numba", "kernels_triton": "triton", "kernels_mlx": "mlx.core"}
FOR_KERNELS = {"errors", "settings", "format", "planes", "window", "memory", "ops"}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def home(path: Path) -> str:
    """The layer name of a file: its top module or package below minfer."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Names below `minfer` that a file imports, anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("minfer.")}
        elif isinstance(node, ast.ImportFrom) and node.module == "minfer":
            found |= {a.name for a in node.names if a.name in LEVEL}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minfer."):
            found.add(str(node.module).split(".")[1])
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = home(path)
    assert here in LEVEL, f"{here} has no layer; give it one in LAYERS"
    for name in imported(path) - {here}:
        assert LEVEL[name] <= LEVEL[here], f"{path.name} reaches up to {name}"
        if here in KERNELS:
            assert name in FOR_KERNELS, f"a kernel package may not see {name}"


def test_nothing_is_imported_relatively() -> None:
    for path in modules():
        assert not re.search(r"^\s*from \.", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_oracle_takes_the_arguments_of_the_op(op) -> None:
    oracle = getattr(reference, op.name)
    assert tuple(inspect.signature(oracle).parameters) == op.parameters


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
@pytest.mark.parametrize(("package", "language"), PACKAGES.items())
def test_every_package_has_every_op_with_its_signature(op, package: str, language: str) -> None:
    pytest.importorskip(language)
    if package not in op.backends:
        pytest.skip(f"{op.name} is not asked of {package}")
    found = registry.collect(f"minfer.{package}").get(op.name, ())
    assert found, f"{package} lacks {op.name}"
    for variant in found:
        parameters = inspect.signature(variant.launch).parameters
        assert tuple(parameters) == op.parameters
        for name in (*op.keywords, "config"):
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    ("package", "language", "wanted"),
    [
        ("kernels_numba", "numba", ["rows", "split", "flash", "scratch"]),
        ("kernels_triton", "triton", ["rows", "split", "ring", "flash"]),
        ("kernels_mlx", "mlx.core", ["rows", "split", "flash"]),
    ],
)
def test_attention_variants_come_in_pairs(package: str, language: str, wanted: list[str]) -> None:
    pytest.importorskip(language)
    window, runs = (registry.collect(f"minfer.{package}")[op] for op in ("attn_window", "attn_map"))
    assert [v.name for v in window] == [v.name for v in runs] == wanted
    for one, other in zip(window, runs, strict=True):
        assert one.limits == other.limits and one.space == other.space
        for fmt in one.formats:
            assert one.numerics(fmt) == other.numerics(fmt)


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "llvmlite", "triton", "torch", "mlx"}:
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Block())
import minfer
minfer.KvFormat, minfer.Batch, minfer.Span, minfer.Refusal, minfer.variant, minfer.Device
assert "Engine" in dir(minfer)
print("clean")
"""


def test_import_needs_no_kernel_language() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "clean", done.stderr


def test_every_public_name_resolves() -> None:
    import minfer

    for name in minfer.__all__:
        assert getattr(minfer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'kv_cache'"):
        _ = minfer.kv_cache


def test_files_and_functions_stay_small() -> None:
    for path in [p for top in ("minfer", "tests", "tuning") for p in (ROOT / top).rglob("*.py")]:
        text, folder = path.read_text(), path.parts[-2]
        roomy = "kernels" in folder or "tests" in path.relative_to(ROOT).parts
        limit = 400 if roomy else 250
        assert len(text.splitlines()) <= limit, f"{path} is over {limit} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                # of its body: a kernel's arguments take a line each
                length = (node.end_lineno or 0) - node.body[0].lineno + 1
                assert length <= 60, f"{path.name}:{node.name} has {length} lines"


def test_environment_is_read_in_one_module() -> None:
    for path in modules():
        reads = re.findall(r"os\.(?:environ|getenv)", path.read_text())
        assert not reads or home(path) == "settings", f"{path} reads the environment"
