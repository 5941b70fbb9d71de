"""What a sweep prints: what it would try, and what it decided."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuning.sweep.configuration import Question
from tuning.sweep.decision import Interval
from tuning.sweep.exploring import Plan
from tuning.sweep.problem import Case
from tuning.sweep.rows import Decided


def listed(
    asked: Mapping[Question, Sequence[Case]], plans: Mapping[Question, Plan], as_json: bool
) -> str:
    """Questions with their cases, variants and sizes."""
    rows = [
        {
            "question": question.key,
            "cases": [case.name for case in cases],
            "variants": [v.name for v in plans[question].space.variants],
            "configurations": plans[question].space.size,
            "default": plans[question].default.key,
        }
        for question, cases in asked.items()
    ]
    if as_json:
        return json.dumps(rows, indent=1)
    return "\n".join(
        f"{row['question']}: {row['configurations']} configurations of "
        f"{_names(plans[question])}; default {row['default']}\n"
        + "\n".join(f"  {case.name}" for case in cases)
        for row, (question, cases) in zip(rows, asked.items(), strict=True)
    )


def _names(plan: Plan) -> str:
    return ", ".join(v.name for v in plan.space.variants)


def summary(row: Decided, database: Path, added: Sequence[str] = ()) -> str:
    """A decision in a few lines. added: files of a user's variants, for the next command."""
    found = row.decision
    lines = [
        f"{row.question.key}: {found.numeric}, {times(found.speedup)}",
        *(f"  n_q {n_q}: {configuration.key}" for n_q, configuration in row.chosen.items()),
        *(f"  {case}: {times(of_case)}" for case, of_case in found.speedups.items()),
        f"  tie set: {', '.join(found.ties)}",
    ]
    lines += [
        f"  tie set of n_q {n_q}: {'; '.join(keys)}"
        for n_q, keys in found.free_ties.items()
        if len(keys) > 1
    ]
    lines.append(
        f"  the default against itself: {found.noise:.2%}; another run would choose otherwise "
        f"with probability {found.rerun_differs:.2f}; false winners: about {found.rate:.0%}"
    )
    if found.default_ties:
        lines.append("  the default is in the tie set: there is nothing to promote")
    elif found.loses is not None:
        lines.append(f"  the default is faster in {found.loses}: this is not promoted")
    else:
        files = "".join(f" --add {shlex.quote(file)}" for file in added)
        lines.append(f"  next: python -m tuning promote --database {database}{files}")
    return "\n".join(lines)


def times(ratio: Interval) -> str:
    """A speedup in words, with its interval."""
    return f"{ratio.mid:.3f} times the default's speed ({ratio.low:.3f} to {ratio.high:.3f})"
