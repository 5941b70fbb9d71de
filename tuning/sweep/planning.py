"""What a sweep will try: its questions, and their variants."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from minfer import registry, tuned
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops import OPS, Variant
from tuning.sweep.cases import cases_of, questions
from tuning.sweep.configuration import Question
from tuning.sweep.problem import Case

Asked = dict[Question, list[Case]]


def asked(args: argparse.Namespace, device: Device, listed: Sequence[str] | None = None) -> Asked:
    """The questions of the arguments, with their cases; refuses what has none.

    listed: cases that are chosen from; None for those that sweeps time.
    """
    kind, found = tuned.device_kind(device), Asked()
    refusal: Refusal | None = None
    for fmt in _formats(args, device):
        try:
            stored = KvFormat(fmt) if fmt else None
            cases = cases_of(args.op, args.device, args.case, stored, listed)
        except Refusal as no_case:  # another format may have some
            refusal = no_case
            continue
        found |= questions(args.op, args.device, kind, fmt, cases)
    if not found and refusal is not None:
        raise refusal
    return found


def _formats(args: argparse.Namespace, device: Device) -> list[str]:
    """The one that was asked for, or each that some variant reads; "" where the op has none."""
    if not OPS[args.op].formats:
        return [""]
    return [args.fmt] if args.fmt else [f.value for f in KvFormat if _read(args.op, device, f)]


def _read(op: str, device: Device, fmt: KvFormat) -> bool:
    return any(fmt in variant.formats for variant in registry.variants(op, device))


def variants_for(
    question: Question, cases: Sequence[Case], names: Sequence[str] | None
) -> dict[str, Variant]:
    """Those that take all cases, by name. names: only these, which must take them."""
    device = Device.parse(question.device)
    there = {v.name: v for v in registry.variants(question.op, device)}
    for name in names or ():
        if name not in there:
            what = f"{question.op} has no variant {name!r} on {device}; there are "
            raise Refusal("6.6", what + ", ".join(there), {"variant": name})
    refused: dict[str, str] = {}
    for name, variant in there.items():
        if (why := _why_not(variant, question, cases, device)) is not None:
            refused[name] = why
    chosen = names or [name for name in there if name not in refused]
    for name in chosen:
        if name in refused:
            what = f"{question.op}_{name} cannot answer {question.key}: it {refused[name]}"
            raise Refusal("6.6", what, {"variant": name})
    if not chosen:
        why = "; ".join(f"{name} {reason}" for name, reason in refused.items())
        raise Refusal("6.6", f"no variant can answer {question.key}: {why}", {"op": question.op})
    return {name: there[name] for name in chosen}


def _why_not(
    variant: Variant, question: Question, cases: Sequence[Case], device: Device
) -> str | None:
    """Why a variant does not take some case, None if it takes them all."""
    fmt = KvFormat(question.fmt) if question.fmt else None
    if fmt is not None and fmt not in variant.formats:
        return f"does not read {fmt}"
    capability = device.package().compute_capability()
    reasons = (variant.limits.why_not(case.shape, capability, fmt) for case in cases)
    return next((why for why in reasons if why is not None), None)


def default_of(question: Question, cases: Sequence[Case]) -> Variant:
    """What the library takes for the cases by itself, promoted rows left out."""
    found = {
        choice.variant.name: choice.variant
        for case in cases
        for choice in [
            registry.select(
                question.op,
                device=question.device,
                fmt=question.stored,
                shape=case.shape,
                promoted=False,
            )
        ]
    }
    if len(found) > 1:
        what = f"cases of {question.key} have different defaults ({', '.join(found)}); "
        raise Refusal("6.4", what + "sweep them apart, by --case", {"defaults": list(found)})
    (variant,) = found.values()
    return variant
