"""`minfer session inspect | verify | diff`: looking at session files; nothing is written."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from minfer.commands import session_diff, session_text
from minfer.commands.columns import printable
from minfer.commands.loading import load_engine, shows_bar
from minfer.errors import Refusal
from minfer.kv.session.header import VERSION
from minfer.kv.session.reading import SessionFile
from minfer.ops import F32
from minfer.pull import resolve_model
from minfer.sessions.comparing import compare
from minfer.sessions.description import describe
from minfer.sessions.opening import verified
from minfer.sessions.proving import Proof, compare_weights, provable, prove, refuse_unprovable
from minfer.sessions.wording import counted

NO = 1  # exit code: the answer is no


def inspect(args: argparse.Namespace) -> None:
    """Print what a file holds."""
    with verified(args.file, progress=shows_bar(args)) as file:
        facts, tables = describe(file), file.tables
        state = _state(file)
    if args.json:
        print(json.dumps({**facts, "state": state} if args.host else facts))
        return
    parts = [session_text.summary(facts), session_text.tables(facts), session_text.arena(tables)]
    print("\n\n".join(parts))
    if args.host:
        print("\n" + session_text.state(state))


def _state(file: SessionFile) -> Any:
    """The host's state; bytes that no engine wrote as text."""
    if file.host_part.version is None:
        return file.host.decode("utf-8", "backslashreplace")
    return file.host_part.state(file.where)


def verify(args: argparse.Namespace) -> int:
    """Check a file, then what a model has to do with it; `NO` if that does not hold."""
    if args.prove is None and (args.weights, args.threads, args.activations) != (None, None, F32):
        message = "--weights, --activations and --threads change nothing without --prove MODEL"
        raise Refusal("0.3", message)
    with verified(args.file, progress=shows_bar(args)) as file:
        report: dict[str, Any] = {"file": file.where, "bytes": file.size, "sound": True}
        report["checked"] = _checked(file)
        if args.prove is not None:
            refuse_unprovable(file)
        if args.model_hash is not None:
            model = resolve_model(args.model_hash)
            found = compare_weights(file, model, progress=shows_bar(args))
            report["weights"] = {**asdict(found), "equal": found.equal}
        if args.prove is not None:
            report |= _proved(args, file)
    print(json.dumps(report) if args.json else _as_text(report, args.model_hash))
    holds = report.get("weights", {}).get("equal", True)
    return 0 if holds and all(proof["holds"] for proof in report.get("proofs", [])) else NO


def _checked(file: SessionFile) -> dict[str, str]:
    """What was looked at, in words."""
    header, counts = file.header, file.header.counts
    told = ", ".join(
        counted(n, name.removesuffix("s")) for name, n in counts.items() if name != "counters"
    )
    rows = f"K and V of {counted(header.n_rows, 'cell')} of {header.cell_bytes} bytes in "
    rows += counted(header.n_layer, "layer")
    part = file.host_part
    kept = "as an engine writes it, "
    kept += "its facts of numbers those of the fingerprint" if part.facts else "no facts of numbers"
    return {
        "header": f"version {VERSION}, {header.fmt} on {header.backend_name}, n_ctx {header.n_ctx}",
        "size": f"{file.size} bytes, as the header says",
        "checksum": f"xxh3-128 {file.checksum.hex()} of all before it",
        "tables": f"{told}: no contradiction",
        "rows": f"{rows}; bytes that hold no element are zero",
        "host": f"{header.host_bytes} bytes" + (f", {kept}" if part.version is not None else ""),
    }


def _proved(args: argparse.Namespace, file: SessionFile) -> dict[str, Any]:
    """What comes of the last rows, by the model that was named on the device of the file."""
    named = {"model": args.prove, "device": file.header.backend_name}
    loading = argparse.Namespace(**{**vars(args), **named})
    engine = load_engine(loading, file.header.fmt, file.header.n_ctx)
    resumed, proofs = prove(engine, file)
    return {
        "proofs": [_as_json(proof) for proof in proofs],
        "bitwise": resumed.bitwise,
        "differs": resumed.differs,
        "not_provable": sorted(file.tables.entries.keys() - provable(file.tables)),
    }


def _as_text(report: dict[str, Any], model: str | None) -> str:
    """A line for everything that was looked at, and a sequence each."""
    lines = [f"{printable(report['file'])}: sound"]
    lines += [f"  {name:9} {what}" for name, what in report["checked"].items()]
    if "weights" in report:
        lines.append(f"  weights   {printable(_weights(report['weights'], model))}")
    if not report.get("bitwise", True):
        lines.append(f"  numbers   others than those of the save: {report['differs']}")
    lines += [f"  seq {proof['seq']:<5} {_told(proof)}" for proof in report.get("proofs", [])]
    if without := report.get("not_provable"):
        named = ", ".join(f"seq {seq}" for seq in without)
        lines.append(f"  not provable, as no logits were kept: {named}")
    return "\n".join(lines)


def _weights(found: dict[str, Any], model: str | None) -> str:
    if found["equal"]:
        return f"equal, {found['told']}"
    others = f"others: the session tells {found['told']} and {model} has {found['found']}"
    if not found["same_fingerprint"]:
        others += ", and the fingerprints of metadata and samples differ"
    return others


def _told(proof: dict[str, Any]) -> str:
    what = f"token {proof['token']} by {proof['kind']} at position {proof['position']}"
    if proof["holds"]:
        return f"proved: {what} gives the saved row and logits {proof['logits']}"
    row = "the saved row" if proof["same_row"] else "another row"
    logits = f"logits {proof['logits']}, saved were {proof['saved_logits']}"
    return f"NOT proved: {what} gives {row} and {logits}"


def _as_json(proof: Proof) -> dict[str, Any]:
    return {
        "seq": proof.seq,
        "position": proof.position,
        "token": proof.last.token,
        "kind": proof.last.kind,
        "saved_logits": f"{proof.last.logits:016x}",
        "logits": f"{proof.logits:016x}",
        "same_row": proof.same_row,
        "holds": proof.holds,
    }


def diff(args: argparse.Namespace) -> int:
    """Compare two files; `NO` where they differ."""
    with (
        verified(args.a, progress=shows_bar(args)) as a,
        verified(args.b, progress=shows_bar(args)) as b,
    ):
        found = compare(a, b, progress=shows_bar(args))
    if args.json:
        print(json.dumps(session_diff.as_json(found, args.a, args.b)))
    else:
        print(session_diff.as_text(found, args.a, args.b))
    return 0 if found.equal else NO
