"""The arguments of `minfer session` and its tools."""

from __future__ import annotations

import argparse

from minfer.commands.adding import Parser, add
from minfer.commands.options import DEVICES, add_device, add_model, add_numbers
from minfer.format import KvFormat

FORMATS = [fmt.value for fmt in KvFormat]
Tools = argparse._SubParsersAction  # of `Parser`


def add_session(commands: Tools[Parser]) -> None:
    """The command `session`; each tool is a command of its own."""
    p = commands.add_parser(
        "session",
        help="look at session files, check, compare and convert them",
        description="Look at session files, check, compare and convert them.",
        epilog="exit codes: 0 done, 1 files differ or a proof failed, 2 refused, 3 damaged file",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tools = p.add_subparsers(metavar="TOOL", required=True, parser_class=Parser)
    _add_inspect(tools)
    _add_verify(tools)
    _add_diff(tools)
    _add_extract(tools)
    _add_transcode(tools)
    _add_advise(tools)


def _add_file(p: Parser, name: str = "file", metavar: str = "FILE") -> None:
    p.add_argument(name, metavar=metavar, help="a session file")


def _add_inspect(tools: Tools[Parser]) -> None:
    p = add(
        tools,
        "inspect",
        "session.inspect",
        "show what a session file holds, and a map of its cells",
        "  minfer session inspect chat.json.kv\n"
        "  minfer session inspect chat.json.kv --host\n"
        "  minfer session inspect chat.json.kv --json",
    )
    _add_file(p)
    p.add_argument("--host", action="store_true", help="print the host's state, too")


def _add_verify(tools: Tools[Parser]) -> None:
    p = add(
        tools,
        "verify",
        "session.verify",
        "check every byte of a session file, and on demand that a model would make it again",
        "  minfer session verify chat.json.kv\n"
        "  minfer session verify chat.json.kv --prove smollm2\n"
        "  minfer session verify chat.json.kv --model-hash smollm2",
    )
    _add_file(p)
    proves = "feed the last token of every sequence again; its logits must be those of the save"
    p.add_argument("--prove", metavar="MODEL", help=proves)
    p.add_argument("--model-hash", metavar="MODEL", help="compare a hash of all its weights")
    add_numbers(p)


def _add_diff(tools: Tools[Parser]) -> None:
    p = add(
        tools,
        "diff",
        "session.diff",
        "compare two session files",
        "  minfer session diff before.kv after.kv\n  minfer session diff f32.kv q8_0.kv --json",
    )
    _add_file(p, "a", "A")
    _add_file(p, "b", "B")


def _add_force(p: Parser) -> None:
    p.add_argument("--force", action="store_true", help="replace a file that exists")


def _add_extract(tools: Tools[Parser]) -> None:
    p = add(
        tools,
        "extract",
        "session_files.extract_sequence",
        "take one sequence out of a session file",
        "  minfer session extract chat.json.kv --seq 0 -o rows.npz\n"
        "  minfer session extract chat.json.kv --seq 0 --layers 0,3-5 --which k -o keys.npz\n"
        "  minfer session extract slots.kv --seq 2 -o one.kv",
    )
    _add_file(p)
    p.add_argument("--seq", type=int, required=True, metavar="N", help="the sequence")
    made = "rows as .npz, decoded to float32, or a session of that sequence alone as .kv"
    p.add_argument("-o", "--output", required=True, metavar="OUT", help=made)
    p.add_argument("--layers", metavar="LIST", help="of an .npz, e.g. 0,3-5; default all")
    p.add_argument("--which", choices=("k", "v", "kv"), help="of an .npz; default kv")
    keep = "of a .kv: its shared prefix stays a run of its own, without an owner"
    p.add_argument("--keep-share", action="store_true", help=keep)
    _add_force(p)


def _add_transcode(tools: Tools[Parser]) -> None:
    p = add(
        tools,
        "transcode",
        "session_files.transcode_file",
        "write a session file for another cache type, device or n_ctx, and say what that changed",
        "  minfer session transcode chat.json.kv small.kv --cache-type q8_0\n"
        "  minfer session transcode chat.json.kv gpu.kv --device cuda\n"
        "  minfer session transcode chat.json.kv long.kv --n-ctx 8192",
    )
    _add_file(p)
    p.add_argument("output", metavar="OUT", help="the new file")
    p.add_argument("--cache-type", choices=FORMATS, help="default that of FILE")
    p.add_argument("--device", choices=DEVICES, help="that will load it; default that of FILE")
    p.add_argument("--n-ctx", type=int, metavar="N", help="cells; default those of FILE")
    _add_force(p)


def _add_advise(tools: Tools[Parser]) -> None:
    p = add(
        tools,
        "advise",
        "session_advise.advise_session",
        "replay a session with every cache type, and say which one suits its text",
        "  minfer session advise smollm2 chat.json.kv\n"
        "  minfer session advise smollm2 chat.json.kv --plot heads.png\n"
        "  minfer session advise smollm2 store.kv --text novel.txt --max-tokens 2000",
    )
    add_model(p)
    _add_file(p)
    source = p.add_mutually_exclusive_group()
    told = "tokens of this text in UTF-8 instead of the session's, - for stdin"
    source.add_argument("--text", metavar="TEXT", help=told)
    source.add_argument("--tokens", metavar="LIST", help="these token ids, e.g. 1,42,7")
    p.add_argument("--max-tokens", type=int, metavar="N", help="only the first N tokens")
    p.add_argument("--decode", action="store_true", help="feed tokens through decode's kernels")
    add_device(p)
    add_numbers(p)
    p.add_argument("--plot", metavar="OUT", help="draw the errors of all heads, as .png")
    p.add_argument("--force", action="store_true", help="replace a picture that exists")
