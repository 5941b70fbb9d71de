"""Arguments that commands share: the model and how it is loaded, sampling and stop strings."""

from __future__ import annotations

import argparse
import dataclasses
import math

from minfer.device import DeviceKind
from minfer.errors import Refusal
from minfer.models.sampling import Sampling
from minfer.models.text_stream import checked_stops
from minfer.models.tokenizer import Tokenizer
from minfer.ops import F32

DEVICES = tuple(sorted(kind.label for kind in DeviceKind))
NEED_A_TEMPERATURE = ("top_k", "top_p", "min_p")
BIAS_FORM = "TOKEN=BIAS"
LONGEST_ID = 10  # digits


def add_model(p: argparse.ArgumentParser) -> None:
    """The model that a command loads; `loading.load_engine` reads it."""
    p.add_argument("model", metavar="MODEL", help="a .gguf file, or a name that was pulled")


def add_engine_options(p: argparse.ArgumentParser, n_ctx: str) -> None:
    """How the model is loaded; `loading.load_engine` reads it. n_ctx: help of `--n-ctx`."""
    p.add_argument("--cache-type", metavar="T", help="f32, f16 or q8_0; default by device")
    add_numbers(p)
    p.add_argument("--n-ctx", type=int, metavar="N", help=n_ctx)
    add_device(p)


def add_device(p: argparse.ArgumentParser) -> None:
    """Where a model computes."""
    where = f"{', '.join(DEVICES)}, or layers on each in order: cpu:10,cuda:20; default cpu"
    p.add_argument("--device", default="cpu", metavar="D", help=where)


def add_numbers(p: argparse.ArgumentParser) -> None:
    """How a model computes, cache and device aside."""
    kept = "f32, f16 or q8_0; default: Q8_0 matrices as they are, others as f32"
    p.add_argument("--weights", metavar="T", help=kept)
    narrow = "f32, f16 or bf16: what operands of products are rounded to, on cuda; default f32"
    p.add_argument("--activations", metavar="T", default=F32, help=narrow)
    p.add_argument("--threads", type=int, metavar="N", help="default all cores")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The argument group "sampling"; `sampling_of` reads it back."""
    group = parser.add_argument_group(
        "sampling",
        "Greedy unless --temp is above 0; every option is off until given.\n"
        "A common choice: --temp 0.8 --top-k 40 --top-p 0.95 --min-p 0.05",
    )

    def number(flag: str, metavar: str, text: str, *, of: type = float) -> None:
        group.add_argument(flag, type=of, metavar=metavar, help=text)

    group.add_argument(
        *("--temp", "--temperature"),
        dest="temperature",
        type=float,
        metavar="T",
        help="0 is greedy; default 0",
    )
    number("--top-k", "K", "only the K most probable tokens", of=int)
    number("--top-p", "P", "only the fewest tokens that hold probability P")
    number("--min-p", "P", "only tokens with P times the highest probability")
    number("--repeat-penalty", "X", "divide logits of recent tokens, e.g. 1.1")
    number("--presence-penalty", "X", "subtract from logits of recent tokens")
    number("--frequency-penalty", "X", "subtract for each time a token was there")
    number("--repeat-last-n", "N", "how many tokens are recent; default 64", of=int)
    number("--seed", "N", "the same seed gives the same text; default a drawn one", of=int)
    group.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar=BIAS_FORM,
        help="add BIAS to a token's logit, -inf bans it; an id or its text; may be repeated",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The options of `add_sampling` but for biases, checked; `biases_of` needs the model."""
    checked_stops(args.stop)
    for token in args.logit_bias:
        _split(token)
    names = {field.name for field in dataclasses.fields(Sampling)} - {"logit_bias"}
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in NEED_A_TEMPERATURE:
        if name in given and "temperature" not in given:
            flag = f"--{name.replace('_', '-')}"
            raise Refusal(
                "0.3",
                f"{flag} changes nothing without a temperature; give --temp too, e.g. --temp 0.8",
                {"option": flag},
            )
    return Sampling(**given)


def biases_of(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """--logit-bias as pairs with a token's id, for `Sampling`, which refuses an id given twice.

    Refuses a text that is not exactly one token.
    """
    biases: list[tuple[int, float]] = []
    for given in args.logit_bias:
        token, bias = _split(given)
        ids = [_id(token)] if token.isdecimal() else tokenizer.encode(token, special=True)
        if len(ids) != 1:
            raise Refusal(
                "0.3",
                f"--logit-bias {given!r}: {token!r} is {len(ids)} tokens {ids}; name one by its id",
                {"token": token, "ids": ids},
            )
        biases.append((ids[0], bias))
    return tuple(biases)


def _id(digits: str) -> int:
    """A token's id; one of thousands of digits, which Python does not convert, is none anyway."""
    return int(digits) if len(digits) <= LONGEST_ID else 10**LONGEST_ID


def _split(given: str) -> tuple[str, float]:
    token, _, text = given.rpartition("=")
    try:
        bias = float(text)
    except ValueError:
        bias = math.nan
    if token and not math.isnan(bias):
        return token, bias
    raise Refusal(
        "0.3",
        f"--logit-bias {given!r} is not {BIAS_FORM}, such as 42=-inf or ' Paris=3'",
        {"given": given},
    )
