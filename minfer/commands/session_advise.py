"""`minfer session advise`: which cache type suits the text of a session."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minfer.commands.columns import aligned, printable
from minfer.commands.loading import load_engine, note_long_context, shows_bar
from minfer.commands.reading import read_text
from minfer.commands.writing import refuse_target
from minfer.engine import Engine
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.kv.checks import whole_number
from minfer.kv.session.header import ANY
from minfer.kv.session.loading import refuse_other_model
from minfer.kv.session.pieces import WHICH
from minfer.kv.session.reading import SessionFile
from minfer.memory import human
from minfer.ops import DECODE, PREFILL
from minfer.sessions import picture
from minfer.sessions.advice import (
    KL_MAX,
    KL_MEAN,
    TOKENS,
    TOP1,
    Advice,
    Candidate,
    advise,
    by_layer,
    session_tokens,
    worst_heads,
)
from minfer.sessions.opening import verified
from minfer.sessions.wording import percent

WORST = 5  # heads that are shown
FEW = 256  # tokens


def advise_session(args: argparse.Namespace) -> None:
    """Replay and print; every check that needs no model comes first."""
    if args.max_tokens is not None:
        whole_number(args.max_tokens, "--max-tokens", "10", low=2)
    if args.plot is not None:
        picture.refuse_without_matplotlib(args.plot)
        refuse_target(args.plot, args.file, force=args.force)
    text = None if args.text is None else read_text(args.text)
    with verified(args.file, progress=shows_bar(args)) as file:
        given = None if args.tokens is None else _ids(args.tokens)
        if text is None and given is None:
            given = _told(file)
        engine = load_engine(args, KvFormat.F32, 1)
        if file.header.model != ANY:  # a store without one may be of any text
            refuse_other_model(file, engine.store.identity())
    tokens = (engine.encode(text or "") if given is None else given)[: args.max_tokens]
    engine = engine.with_cache(KvFormat.F32, max(1, len(tokens)))
    kind = DECODE if args.decode else PREFILL
    found = advise(engine, tokens, kind, progress=shows_bar(args))
    if args.plot is not None:
        picture.draw(found, args.plot)
    if args.json:
        asked = {"model": str(engine.path), "file": args.file, "kind": kind}
        print(json.dumps({**asked, **_as_json(found)}))
        return
    print(_text(found, engine, kind))
    note_long_context(engine)


def _told(file: SessionFile) -> list[int]:
    """The session's own tokens; refused where it has none."""
    tokens = session_tokens(file)
    if not tokens:
        what = "has no tokens"
        if tokens is None:
            what = f"does not tell its tokens ({TOKENS} in the host's state)"
        message = f"{file.where} {what}; give --text or --tokens"
        raise Refusal("8.6", message, {"path": file.where})
    return tokens


def _ids(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 12 for part in parts):
        raise Refusal("0.3", f"--tokens {text[:40]!r} is no list of ids such as 1,42,7")
    return [int(part) for part in parts]


def _as_json(found: Advice) -> dict[str, Any]:
    """Everything, errors of rows as [layer][head] for K and for V."""
    return {
        "tokens": found.n_tokens,
        "cache_bytes_f32": found.cache_bytes,
        "limits": {"kl_mean": KL_MEAN, "kl_max": KL_MAX, "top1_agreement": TOP1},
        "recommended": found.recommended.value,
        "candidates": [_candidate_json(one) for one in found.candidates],
    }


def _candidate_json(one: Candidate) -> dict[str, Any]:
    return {
        "cache_type": one.fmt.value,
        "cache_bytes": one.cache_bytes,
        "against": list(one.against),
        "versus": None if one.versus is None else vars(one.versus),
        "relative_rms": {which: by_layer(one, which) for which in WHICH},
    }


def _text(found: Advice, engine: Engine, kind: str) -> str:
    parts = [
        f"{found.n_tokens} tokens replayed by {kind} with {printable(engine.path.name)}",
        _formats(found),
        _layers(found),
        *(_worst(one) for one in found.candidates if one.planes),
        _advice(found),
    ]
    return "\n\n".join(parts)


def _formats(found: Advice) -> str:
    rows = [["cache", "size", "logits apart", "KL mean", "KL max", "top-1"]]
    rows.append(["f32", human(found.cache_bytes), *[""] * 4])
    for one in found.candidates:
        v = one.versus
        figures = ["cannot be used", "", "", ""]
        if v is not None:
            figures = [f"{v.drift_max:.3g}", f"{v.kl_mean:.2e}", f"{v.kl_max:.2e}"]
            figures.append(percent(v.top1_agreement, 4))
        rows.append([one.fmt.value, human(one.cache_bytes), *figures])
    return aligned(rows)


def _layers(found: Advice) -> str:
    """Relative errors of rows, a line a layer."""
    shown = [one for one in found.candidates if one.planes]
    rows = [["layer", *(f"{one.fmt} {which.upper()}" for one in shown for which in WHICH)]]
    for layer in sorted({layer for one in shown for layer, _ in one.planes}):
        errors = (one.planes[layer, which].relative for one in shown for which in WHICH)
        rows.append([str(layer), *(percent(error) for error in errors)])
    return f"rms error of rows, relative to their own\n{aligned(rows)}"


def _worst(one: Candidate) -> str:
    heads = [
        f"{which.upper()} of layer {layer}, head {head}: {percent(error)}"
        for layer, which, head, error in worst_heads(one, WORST)
    ]
    return "\n  ".join([f"worst heads with {one.fmt}", *heads])


def _advice(found: Advice) -> str:
    best = found.recommended
    lines = [f"advice: {best}"]
    for one in found.candidates:
        if one.fmt is best and one.versus is not None:
            v = one.versus
            lines[0] += (
                f", {found.cache_bytes / one.cache_bytes:.2f} times smaller than f32: mean KL "
                f"{v.kl_mean:.2g} (limit {KL_MEAN}), largest {v.kl_max:.2g} (limit {KL_MAX}), same "
                f"likeliest token in {percent(v.top1_agreement, 4)} (limit {percent(TOP1, 2)})"
            )
        elif one.against:
            lines.append(f"not {one.fmt}: {'; '.join(one.against)}")
    if found.n_tokens < FEW:
        lines.append(f"{found.n_tokens} tokens say little; a longer text says more")
    return "\n".join(lines)
