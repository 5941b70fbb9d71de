"""`minfer session extract | transcode`: new files from session files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from minfer.commands.columns import printable
from minfer.commands.loading import shows_bar
from minfer.commands.writing import refuse_target
from minfer.errors import Refusal
from minfer.kv.session.header import Header
from minfer.memory import human
from minfer.sessions.deviation import Deviation, planes_json
from minfer.sessions.extracting import write_arrays, write_session
from minfer.sessions.opening import verified
from minfer.sessions.transcoding import Transcoded, transcode
from minfer.sessions.wording import counted, percent

ARRAYS, SESSION = ".npz", ".kv"


def extract_sequence(args: argparse.Namespace) -> None:
    """Write one sequence as arrays or as a session, whatever the name of the output ends in."""
    kind = Path(args.output).suffix
    _refuse_options(args, kind)
    refuse_target(args.output, args.file, force=args.force)
    report: dict[str, Any] = {"file": args.file, "seq": args.seq, "output": args.output}
    with verified(args.file, progress=shows_bar(args)) as file:
        if kind == ARRAYS:
            layers = parse_layers(args.layers, file.header.n_layer)
            report["arrays"] = write_arrays(
                file, args.seq, args.output, layers, args.which or "kv", progress=shows_bar(args)
            )
        else:
            keep = args.keep_share
            made = write_session(
                file, args.seq, args.output, keep_share=keep, progress=shows_bar(args)
            )
            report["n_ctx"], report["runs"] = made.n_ctx, made.n_runs
        report["rows"] = file.tables.entries[args.seq].written
        state = file.header.host_bytes > 0 and kind == SESSION and len(file.tables.entries) > 1
    if args.json:
        print(json.dumps(report))
        return
    output, rows = printable(args.output), counted(report["rows"], "row")
    what = counted(len(report["arrays"]), "array") if kind == ARRAYS else "a session of its own"
    size = human(Path(args.output).stat().st_size)
    print(f"{output}: sequence {args.seq}, {rows}, {what}, {size}")
    if state:
        note = "note: the host's state stayed behind; it may be that of another sequence"
        print(note, file=sys.stderr)


def _refuse_options(args: argparse.Namespace, kind: str) -> None:
    """Refuse another ending, and options that change nothing for this one."""
    if kind not in (ARRAYS, SESSION):
        message = f"-o {args.output} ends in neither {ARRAYS} (arrays) nor {SESSION} (a session)"
        raise Refusal("0.3", message, {"output": args.output})
    idle = {"--layers": args.layers, "--which": args.which}
    if kind == ARRAYS:
        idle = {"--keep-share": args.keep_share or None}
    for option, value in idle.items():
        if value is not None:
            raise Refusal("0.3", f"{option} changes nothing for {kind} files; leave it out")


def parse_layers(text: str | None, n_layer: int) -> list[int]:
    """`0,3-5` as [0, 3, 4, 5]; None for all. Refuses what is no such list, and other layers."""
    if text is None:
        return list(range(n_layer))
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = [first, last if dash else first]
        numbers = [int(end) if end.isdecimal() and len(end) < 10 else n_layer for end in ends]
        if not numbers[0] <= numbers[1] < n_layer:
            raise Refusal(
                "0.3",
                f"--layers {text!r}: {part!r} names no layers of 0 to {n_layer - 1}; write 0,3-5",
                {"layers": text, "n_layer": n_layer},
            )
        layers.update(range(numbers[0], numbers[1] + 1))
    return sorted(layers)


def transcode_file(args: argparse.Namespace) -> None:
    """Write the new file, and say what that did to the rows."""
    refuse_target(args.output, args.file, force=args.force)
    with verified(args.file, progress=shows_bar(args)) as file:
        made = transcode(
            file,
            args.output,
            cache_type=args.cache_type,
            device=args.device,
            n_ctx=args.n_ctx,
            progress=shows_bar(args),
        )
    print(json.dumps(_as_json(made, args)) if args.json else _as_text(made, args))


def _total(made: Transcoded) -> Deviation:
    total = Deviation(made.old.n_head_kv)
    for deviation in made.planes.values():
        total.join(deviation)
    return total


def _as_json(made: Transcoded, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "file": args.file,
        "output": args.output,
        "old": _header_json(made.old),
        "new": _header_json(made.new),
        "runs_moved": made.moved,
        "bitwise": made.bitwise,
        "error": _total(made).as_dict(),
        "planes": planes_json(made.planes),
    }


def _header_json(header: Header) -> dict[str, Any]:
    told = {"cache_type": header.fmt.value, "backend": header.backend_name}
    return {**told, "n_ctx": header.n_ctx, "bytes": header.offsets["end"]}


def _as_text(made: Transcoded, args: argparse.Namespace) -> str:
    lines = [f"{printable(args.output)}: {_header_text(made.new)}, from {_header_text(made.old)}"]
    if made.moved:
        lines.append(f"  runs packed, {made.moved} moved")
    if made.new.fmt is made.old.fmt:
        lines.append("  cells are those of the old file, byte for byte")
    elif not made.new.n_rows:
        lines.append("  no rows are written")
    else:
        total = _total(made)
        (layer, which), worst = max(made.planes.items(), key=lambda item: item[1].relative)
        lines.append(f"  error: {_figures(total)}")
        lines.append(f"  worst: {which.upper()} of layer {layer}, {_figures(worst)}")
        if total.lost:
            lines.append(
                f"  {counted(total.lost, 'element')} overflowed: finite in the old file only"
            )
    how = "as exactly as the old file" if made.bitwise else "but not bitwise: numbers are others"
    return "\n".join([*lines, f"  it resumes, {how}"])


def _header_text(header: Header) -> str:
    size = human(header.offsets["end"])
    return f"{header.fmt} on {header.backend_name}, n_ctx {header.n_ctx}, {size}"


def _figures(of: Deviation) -> str:
    share = percent(of.relative)
    return f"largest {of.max_abs:.3g}, rms {of.rms:.3g} ({share} of the rows' own)"
