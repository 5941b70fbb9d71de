"""A configuration that passed the gate on every case of its question, ready to be timed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minfer import registry
from minfer.device import Device
from minfer.format import KvFormat
from minfer.registry import Choice
from tuning.sweep.bound import Bound
from tuning.sweep.gate import WrongAnswer, check, judge, same_bits
from tuning.sweep.problem import VERSIONS, Case
from tuning.sweep.timers import Timer, timer_of


@dataclass(frozen=True)
class Setting:
    """Where and how calls are made. rotate: bytes that cold inputs rotate over, at least."""

    device: Device
    fmt: KvFormat
    threads: int
    rotate: int


class Inputs:
    """The inputs of cases on the device, made once for every configuration."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._timed: dict[str, Bound] = {}
        self._gates: dict[Hashable, list[Bound]] = {}

    def timed(self, case: Case) -> Bound:
        """The call of a case, with copies of what it reads from memory."""
        if case.name not in self._timed:
            problem = case.problem(self.setting.fmt)
            copies = self._copies(case) if problem.read else 1
            self._timed[case.name] = Bound(problem, self.setting.device, copies)
        return self._timed[case.name]

    def _copies(self, case: Case) -> int:
        size = case.work(self.setting.fmt).bytes
        return max(1, -int(-self.setting.rotate // size)) if case.cold and size else 1

    def gates(self, cases: Sequence[Case]) -> list[Bound]:
        """The small calls of all cases; cases with equal gates share theirs."""
        found: list[Bound] = []
        for key, case in {case.gate_key: case for case in cases}.items():
            if key not in self._gates:
                problems = case.gate(self.setting.fmt)
                self._gates[key] = [Bound(problem, self.setting.device) for problem in problems]
            found += self._gates[key]
        return found


def choose(setting: Setting, case: Case, variant: str, config: Mapping[str, Any]) -> Choice:
    """The configuration as the registry makes it for a case; refused where it does not fit."""
    how = {**config, "threads": setting.threads}
    return registry.select(
        case.op,
        device=setting.device,
        fmt=setting.fmt,
        shape=case.shape,
        variant=variant,
        config=how,
    )


class Ready:
    """One configuration on some cases."""

    def __init__(
        self, inputs: Inputs, cases: Sequence[Case], variant: str, config: Mapping[str, Any]
    ) -> None:
        """Compile and check; raises `WrongAnswer`, or whatever a launch raises."""
        setting = inputs.setting
        self.inputs, self.cases, self.config = inputs, cases, config
        self.device = setting.device
        choices = {c.name: choose(setting, c, variant, config) for c in cases}
        first = choices[cases[0].name]
        self.numerics = first.variant.numerics(setting.fmt)
        for bound in inputs.gates(cases):
            check(bound, first, self.numerics, self.device)
        self.bounds = {case.name: inputs.timed(case) for case in cases}
        self.choices = choices
        self.timers: dict[str, Timer] = {}
        self.rounds = dict.fromkeys(self.bounds, 0)
        for name, bound in self.bounds.items():
            check(bound, choices[name], self.numerics, self.device)
            self.timers[name] = self._timer(name)

    def check_free(self) -> None:
        """Raise `WrongAnswer` where free values change bits, or what a launch without them raises.

        Numeric values are taken for every number of queries, the free ones beside them only near
        where these were timed (contract 6.4): so defaults must run, and with the same bits.
        """
        setting, first = self.inputs.setting, self.choices[self.cases[0].name]
        space = first.variant.space
        numeric = {name: value for name, value in self.config.items() if space[name].numeric}
        plain = {c.name: choose(setting, c, first.variant.name, numeric) for c in self.cases}
        if not first.variant.invariant or plain == self.choices:
            return
        try:
            for bound in self.inputs.gates(self.cases):
                same_bits(bound, first, plain[self.cases[0].name])
            for name, bound in self.bounds.items():
                same_bits(bound, self.choices[name], plain[name])
        except WrongAnswer:
            raise
        except Exception as error:
            error.add_note("with free tunables at their defaults, which other calls get")
            raise

    def _timer(self, name: str) -> Timer:
        bound, choice = self.bounds[name], self.choices[name]
        arguments = [bound.arguments(choice, of=i) for i in range(len(bound.sets))]
        return timer_of(self.device, [partial(bound.launch, choice, a) for a in arguments])

    def sample(self, name: str, n: int) -> float:
        """Seconds of a call of a case; its inputs change before, its answer is checked after."""
        bound = self.bounds[name]
        self.rounds[name] += 1
        version = VERSIONS[self.rounds[name] % len(VERSIONS)]
        bound.turn(version)
        seconds = self.timers[name].sample(n)
        if bound.problem.changed:  # what is left after many calls is not what one call makes
            again = bound.arguments(self.choices[name], fresh=True)
            out = bound.launch(self.choices[name], again)
        else:
            out = self.timers[name].answer()
        judge(bound, version, self.numerics, bound.answer(out))
        return seconds

    @property
    def trouble(self) -> str:
        """Why timers do not time as they should; "" if they do."""
        return "; ".join(sorted({t.trouble for t in self.timers.values() if t.trouble}))
