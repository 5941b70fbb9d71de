"""The command line: `minfer run | chat | ppl | pull | session | explain | variants | devices`.

Exit codes (contract 0.2): 0 done, 1 done and the answer is no, 2 refused, 3 damaged file,
70 internal error, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from minfer import settings
from minfer.errors import Refusal

INTERNAL_ERROR = 70
INTERRUPTED = 130
SIGNALS = 128  # and its number: what a signal ended
LINE = 1000  # characters of a complaint
OPTIONAL = {  # what the extras `cpu` and `models` install
    *("numba", "llvmlite"),
    *("gguf", "huggingface_hub", "jinja2", "prompt_toolkit", "psutil", "tokenizers", "tqdm"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _open_streams()
    try:
        from minfer.commands.parser import build_parser  # numpy comes with it, which takes a while

        args = build_parser().parse_args(argv)
        settings.check_flags()
        module, function = args.command.split(".")
        code = getattr(importlib.import_module(f"minfer.commands.{module}"), function)(args)
        if code and code > SIGNALS:
            _let_go()
        sys.stdout.flush()
        return code or 0
    except Refusal as refusal:
        return _complain(str(refusal), refusal.exit_code)
    except BrokenPipeError:
        # The reader of our output went away; keep the interpreter's last flush quiet.
        _discard(sys.stdout)
        return 0
    except ModuleNotFoundError as missing:
        if missing.name not in OPTIONAL:
            return _internal_error()
        what = f"{missing.name} is not installed; pip install 'minfer[cpu,models]'"
        return _complain(what, Refusal.exit_code)
    except OSError as error:
        _discard(sys.stdout)
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


def _open_streams() -> None:
    """Print what a terminal cannot spell as an escape, and nothing to a closed stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _let_go() -> None:
    """Of a program that a signal ended: what its terminal, gone perhaps, takes no more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """Let what the stream still holds go nowhere; its last flush would change the exit code."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complain(what: str, code: int, before: str = "") -> int:
    """One line on stderr, whatever the message holds."""
    from minfer.commands.columns import printable

    line = printable(" ".join(what.split()))
    shown = line if len(line) <= LINE else f"{line[: LINE // 2]} ... {line[-LINE // 2 :]}"
    try:
        print(f"{before}minfer: {shown}", file=sys.stderr)
    except OSError:  # full as well
        _discard(sys.stderr)
    return code


def _internal_error() -> int:
    traceback.print_exc()
    return _complain("internal error; please report it with `minfer devices`", INTERNAL_ERROR)
