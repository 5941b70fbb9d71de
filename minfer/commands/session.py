"""`minfer session inspect | verify | diff`: looking at session files; nothing is written."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from minfer.commands import session_diff, session_text
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
        report["checked"] = checked = _checked(file)
        if args.prove is not None:
            refuse_unprovable(file)
        if not args.json:
            print(f"{file.where}: sound")
            print("\n".join(f"  {name:9} {what}" for name, what in checked.items()))
        holds = True
        if args.model_hash is not None:
            holds &= _compare_weights(args, file, report)
        if args.prove is not None:
            holds &= _prove(args, file, report)
    if args.json:
        print(json.dumps(report))
    return 0 if holds else NO


def _checked(file: SessionFile) -> dict[str, str]:
    """What was looked at, in words."""
    header, counts = file.header, file.header.counts
    told = ", ".join(_counted(n, name) for name, n in counts.items() if name != "counters")
    rows = f"K and V of {header.n_rows} cells of {header.cell_bytes} bytes in {header.n_layer}"
    part = file.host_part
    kept = "as an engine writes it, "
    kept += "its facts of numbers those of the fingerprint" if part.facts else "no facts of numbers"
    return {
        "header": f"version {VERSION}, {header.fmt} on {header.backend_name}, n_ctx {header.n_ctx}",
        "size": f"{file.size} bytes, as the header says",
        "checksum": f"xxh3-128 {file.checksum.hex()} of all before it",
        "tables": f"{told}: no contradiction",
        "rows": f"{rows} layers; bytes that hold no element are zero",
        "host": f"{header.host_bytes} bytes" + (f", {kept}" if part.version is not None else ""),
    }


def _counted(n: int, names: str) -> str:
    return f"{n} {names.removesuffix('s') if n == 1 else names}"


def _compare_weights(args: argparse.Namespace, file: SessionFile, report: dict[str, Any]) -> bool:
    found = compare_weights(file, resolve_model(args.model_hash), progress=shows_bar(args))
    report["weights"] = {**asdict(found), "equal": found.equal}
    if not args.json:
        other = f"others: the session tells {found.told} and {args.model_hash} has {found.found}"
        if not found.same_fingerprint:
            other += ", and the fingerprints of metadata and samples differ"
        print(f"  weights   {'equal, ' + found.told if found.equal else other}")
    return found.equal


def _prove(args: argparse.Namespace, file: SessionFile, report: dict[str, Any]) -> bool:
    """A line a sequence; whether all that can be proved hold."""
    args.model, args.device = args.prove, file.header.backend_name
    engine = load_engine(args, file.header.fmt, file.header.n_ctx)
    resumed = engine.resume(file.path)
    proofs: list[Proof] = []
    if not args.json and not resumed.bitwise:
        print(f"  numbers   others than those of the save: {resumed.differs}")
    for proof in prove(engine, file.path):
        proofs.append(proof)
        if not args.json:
            print(f"  seq {proof.seq:<5} {_told(proof)}", flush=True)
    without = sorted(file.tables.entries.keys() - provable(file.tables))
    report["proofs"] = [_as_json(proof) for proof in proofs]
    report |= {"bitwise": resumed.bitwise, "differs": resumed.differs, "not_provable": without}
    if without and not args.json:
        print(f"  not provable, as no logits were kept: {', '.join(f'seq {s}' for s in without)}")
    return all(proof.holds for proof in proofs)


def _told(proof: Proof) -> str:
    what = f"token {proof.last.token} by {proof.last.kind} at position {proof.position}"
    if proof.holds:
        return f"proved: {what} gives the saved row and logits {proof.logits:016x}"
    row = "the saved row" if proof.same_row else "another row"
    logits = f"logits {proof.logits:016x}, saved were {proof.last.logits:016x}"
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
