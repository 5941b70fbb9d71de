"""The command line: `minfer run | pull | explain | variants | devices`.

Exit codes (contract 0.2): 0 done, 2 refused, 3 damaged file, 70 internal error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from minfer import __version__, settings
from minfer.device import DeviceKind
from minfer.errors import Refusal
from minfer.ops import KINDS

INTERNAL_ERROR = 70
INTERRUPTED = 130
LINE = 1000  # characters of a complaint
EXTRA_OF = {
    "numba": "cpu",
    "llvmlite": "cpu",
    **dict.fromkeys(("gguf", "jinja2", "psutil", "tokenizers", "tqdm"), "models"),
}
DEVICES = tuple(sorted(kind.label for kind in DeviceKind))


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(Refusal.exit_code, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _open_streams()
    args = build_parser().parse_args(argv)
    try:
        settings.check_flags()
        module, function = args.command.split(".")
        getattr(importlib.import_module(f"minfer.commands.{module}"), function)(args)
        sys.stdout.flush()
    except Refusal as refusal:
        return _complain(str(refusal), refusal.exit_code)
    except BrokenPipeError:
        # The reader of our output went away; keep the interpreter's last flush quiet.
        _discard_output()
        return 0
    except ModuleNotFoundError as missing:
        extra = EXTRA_OF.get(missing.name or "")
        if extra is None:
            return _internal_error()
        what = f"{missing.name} is not installed; pip install 'minfer[{extra}]'"
        return _complain(what, Refusal.exit_code)
    except OSError as error:
        _discard_output()
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}", Refusal.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED, "\n")
    except SystemError as error:
        # How an interrupt inside a compiled kernel's entry comes out.
        if isinstance(error.__cause__, KeyboardInterrupt):
            return _complain("interrupted", INTERRUPTED, "\n")
        return _internal_error()
    except Exception:
        return _internal_error()
    return 0


def _open_streams() -> None:
    """Print what a terminal cannot spell as an escape, and nothing to a closed stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(what: str, code: int, before: str = "") -> int:
    """One line on stderr, whatever the message holds."""
    line = " ".join(what.split())
    shown = line if len(line) <= LINE else f"{line[: LINE // 2]} ... {line[-LINE // 2 :]}"
    print(f"{before}minfer: {shown}", file=sys.stderr)
    return code


def _internal_error() -> int:
    traceback.print_exc()
    return _complain("internal error; please report it with `minfer devices`", INTERNAL_ERROR)


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = Parser(
        prog="minfer",
        description="Attention kernels over a cell-addressed KV cache, and models on top of them.",
    )
    parser.add_argument("--version", action="version", version=f"minfer {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _add_run(commands)
    _add_pull(commands)
    _add_explain(commands)
    _add_variants(commands)
    _add_devices(commands)
    return parser


def _add(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    command: str,
    summary: str,
    example: str,
) -> Parser:
    """A command; `command` is its function below `minfer.commands`, imported when it runs."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command)
    parser.add_argument("--json", action="store_true", help="print one JSON object for machines")
    return parser


def _add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    p = _add(
        commands,
        "run",
        "run.run",
        "continue a prompt with a model, greedily",
        '  minfer run smollm2 -p "The capital of France is" -n 16\n'
        '  minfer run model.gguf -p "Tell me a story" --chat --cache-type q8_0\n'
        "  minfer run smollm2 -f prompt.txt --n-ctx 8192 --json",
    )
    p.add_argument("model", metavar="MODEL", help="a .gguf file or a pulled name such as smollm2")
    prompt = p.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("-f", "--file", metavar="FILE", help="a file with the prompt, - for stdin")
    p.add_argument("-n", "--max-tokens", type=int, default=64, metavar="N", help="default 64")
    p.add_argument("--cache-type", metavar="T", help="f32, f16 or q8_0; default by device")
    kept = "f32, f16 or q8_0; default: Q8_0 matrices as they are, others as f32"
    p.add_argument("--weights", metavar="T", help=kept)
    p.add_argument("--n-ctx", type=int, metavar="N", help="cells of the cache; default 4096")
    p.add_argument("--device", default="cpu", choices=DEVICES, help="default cpu")
    p.add_argument("--threads", type=int, metavar="N", help="default all cores")
    p.add_argument("--chat", action="store_true", help="wrap the prompt in the chat template")
    p.add_argument("--system", metavar="TEXT", help="system message; implies --chat")
    p.add_argument("--receipt", action="store_true", help="say which kernels ran, and why")


def _add_pull(commands: argparse._SubParsersAction[Parser]) -> None:
    p = _add(
        commands,
        "pull",
        "models.pull",
        "download a model by name and verify it",
        "  minfer pull smollm2\n  minfer pull            (lists the names)",
    )
    p.add_argument("name", metavar="NAME", nargs="?", help="leave out to list the names")


def _add_explain(commands: argparse._SubParsersAction[Parser]) -> None:
    p = _add(
        commands,
        "explain",
        "inspect.explain",
        "say which variant of an op would run, and why not another",
        "  minfer explain attn_window --fmt q8_0 --n-q 1 --kind decode --head-dim 128",
    )
    p.add_argument("op", metavar="OP", help="an op, e.g. attn_window; `minfer variants` lists them")
    p.add_argument("--device", default="cpu", choices=DEVICES, help="default cpu")
    p.add_argument("--fmt", default="f32", metavar="T", help="f32, f16 or q8_0; default f32")
    p.add_argument("--kind", choices=KINDS, help="default decode for --n-q 1")
    p.add_argument("--n-q", type=int, default=1, metavar="N", help="queries, default 1")
    p.add_argument("--head-dim", type=int, default=64, metavar="N", help="default 64")
    p.add_argument("--n-head", type=int, default=8, metavar="N", help="default 8")
    p.add_argument("--n-head-kv", type=int, default=8, metavar="N", help="default 8")
    p.add_argument("--variant", metavar="V", help="ask for this variant by name")


def _add_variants(commands: argparse._SubParsersAction[Parser]) -> None:
    p = _add(
        commands,
        "variants",
        "inspect.variants",
        "list ops and their variants",
        "  minfer variants\n  minfer variants attn_map --json",
    )
    p.add_argument("op", metavar="OP", nargs="?", help="only this op")
    p.add_argument("--device", default="cpu", choices=DEVICES, help="default cpu")


def _add_devices(commands: argparse._SubParsersAction[Parser]) -> None:
    _add(
        commands,
        "devices",
        "inspect.devices",
        "show devices, libraries and settings: the first thing in a bug report",
        "  minfer devices\n  minfer devices --json",
    )
