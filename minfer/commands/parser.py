"""The arguments of every command. Nothing here imports an engine or a kernel."""

from __future__ import annotations

import argparse

from minfer import __version__
from minfer.commands.adding import Parser, add
from minfer.commands.options import DEVICES, add_engine_options, add_model, add_sampling
from minfer.commands.session_parser import add_session
from minfer.ops import KINDS


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = Parser(
        prog="minfer",
        description="Attention kernels over a cell-addressed KV cache, and models on top of them.",
    )
    parser.add_argument("--version", action="version", version=f"minfer {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _add_run(commands)
    _add_chat(commands)
    _add_ppl(commands)
    _add_pull(commands)
    _add_explain(commands)
    _add_variants(commands)
    add_session(commands)
    _add_devices(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    p = add(
        commands,
        "run",
        "run.run",
        "continue a prompt with a model",
        '  minfer run smollm2 -p "The capital of France is" -n 16\n'
        '  minfer run model.gguf -p "Tell me a story" --chat --temp 0.8 --top-p 0.95 --seed 7\n'
        '  minfer run smollm2 -p "The capital of France is" --stop . --logit-bias " Paris=-inf"\n'
        "  minfer run smollm2 -f prompt.txt --n-ctx 8192 --json",
    )
    add_model(p)
    prompt = p.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    told = "a file with the prompt in UTF-8, - for stdin"
    prompt.add_argument("-f", "--file", metavar="FILE", help=told)
    p.add_argument("-n", "--max-tokens", type=int, default=64, metavar="N", help="default 64")
    add_engine_options(p, n_ctx="cells of the cache; default 4096, fewer if trained for fewer")
    p.add_argument("--chat", action="store_true", help="wrap the prompt in the chat template")
    p.add_argument("--system", metavar="TEXT", help="system message; implies --chat")
    p.add_argument("--receipt", action="store_true", help="say which kernels ran, and why")
    add_sampling(p)


def _add_chat(commands: argparse._SubParsersAction[Parser]) -> None:
    p = add(
        commands,
        "chat",
        "chat.chat",
        "talk with a model, in a session that goes on where it stopped",
        "  minfer chat smollm2\n"
        '  minfer chat smollm2 --session trip.json --system "Be brief." --cache-type q8_0\n'
        "  minfer chat smollm2 --json < questions.txt",
        json="print events for machines, one JSON object a line",
    )
    add_model(p)
    kept = "keep the history in FILE and the cache in FILE.kv, and go on from them"
    p.add_argument("--session", metavar="FILE", help=kept)
    p.add_argument("--system", metavar="TEXT", help="system message of a new chat")
    p.add_argument("-n", "--max-tokens", type=int, metavar="N", help="of an answer; default no end")
    add_engine_options(p, n_ctx="cells of the cache; default 4096, fewer if trained for fewer")
    add_sampling(p)


def _add_ppl(commands: argparse._SubParsersAction[Parser]) -> None:
    p = add(
        commands,
        "ppl",
        "ppl.ppl",
        "measure the perplexity of a text, and what a narrower cache does to it",
        "  minfer ppl smollm2 novel.txt --cache-type q8_0\n"
        "  minfer ppl smollm2 novel.txt --compare f32,f16,q8_0\n"
        "  minfer ppl model.gguf novel.txt --n-ctx 1024 --stride 512 --json",
    )
    add_model(p)
    p.add_argument("file", metavar="FILE", help="a text in UTF-8, - for stdin")
    add_engine_options(p, n_ctx="tokens of a window; default 512, fewer if trained for fewer")
    stride = "from window to window, all new tokens scored; default: no overlap, the second half"
    p.add_argument("--stride", type=int, metavar="N", help=stride)
    p.add_argument("--max-tokens", type=int, metavar="N", help="only the first N tokens")
    p.add_argument("--compare", metavar="T,T", help="cache types; the first is the reference")
    p.add_argument("--decode", action="store_true", help="feed tokens through decode's kernels")


def _add_pull(commands: argparse._SubParsersAction[Parser]) -> None:
    p = add(
        commands,
        "pull",
        "models.pull",
        "download a model by name and verify it",
        "  minfer pull            (lists the names)\n"
        "  minfer pull smollm2\n"
        "  minfer pull hf:OWNER/REPO:FILE.gguf@REVISION    (@REVISION can be left out)",
    )
    p.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="a name of the list, or hf:OWNER/REPO:FILE.gguf for a file on the Hugging Face Hub",
    )


def _add_explain(commands: argparse._SubParsersAction[Parser]) -> None:
    p = add(
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
    p = add(
        commands,
        "variants",
        "inspect.variants",
        "list ops and their variants",
        "  minfer variants\n  minfer variants attn_map --json",
    )
    p.add_argument("op", metavar="OP", nargs="?", help="only this op")
    p.add_argument("--device", default="cpu", choices=DEVICES, help="default cpu")


def _add_devices(commands: argparse._SubParsersAction[Parser]) -> None:
    add(
        commands,
        "devices",
        "inspect.devices",
        "show devices, libraries and settings: the first thing in a bug report",
        "  minfer devices\n  minfer devices --json",
    )
