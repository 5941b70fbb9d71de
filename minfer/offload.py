"""Which device each layer lies on (contract 9.6): one for all, or stretches of layers.

A plan of one device is a plan of one stretch; nothing below treats it apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple

from minfer import format as kv_format
from minfer import memory
from minfer.device import Device, DeviceKind
from minfer.errors import Refusal
from minfer.format import KvFormat

PART = re.compile(r"([^:]*):([1-9][0-9]{0,8})")  # of a plan in words


@dataclass(frozen=True)
class Stretch:
    """Layers that follow each other on one device: their weights and cells lie there."""

    device: Device
    layers: range

    @cached_property
    def kernels(self) -> ModuleType:
        """The kernel package of the device."""
        return self.device.package()


@dataclass(frozen=True)
class DevicePlan:
    """The devices of a model's or a store's layers, as asked for: `cpu`, or `cpu:10,cuda:20`.

    parts: devices in the order of layers, and how many layers each takes; None for all.
    """

    parts: tuple[tuple[Device, int | None], ...]

    @classmethod
    def parse(cls, text: str | Device | DevicePlan) -> DevicePlan:
        """A device, or DEVICE:LAYERS with commas between and blanks beside them; else refused."""
        if isinstance(text, DevicePlan):
            return text
        if not isinstance(text, str) or not {":", ","} & set(text):
            return cls(((Device.parse(text), None),))
        return cls(tuple(_part(part.strip(), text) for part in text.split(",")))

    def stretches(self, n_layer: int) -> tuple[Stretch, ...]:
        """The layers of each part; refused unless they are `n_layer` together."""
        counts = [n_layer if count is None else count for _, count in self.parts]
        if sum(counts) != n_layer:
            raise Refusal(
                "9.6",
                f"device {self} places {sum(counts)} layers, and there are {n_layer}; give numbers "
                f"that add up to {n_layer}",
                {"device": str(self), "placed": sum(counts), "n_layer": n_layer},
            )
        return tuple(
            Stretch(device, range(end - count, end))
            for (device, _), count, end in zip(self.parts, counts, accumulate(counts), strict=True)
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device of the plan, once."""
        return tuple(dict.fromkeys(device for device, _ in self.parts))

    def resolve(
        self, requested: str | KvFormat | None, *, n_layer: int, n_head_kv: int, head_dim: int
    ) -> KvFormat:
        """The one format of all layers, see `format.resolve`.

        Auto goes by the first device that is no CPU; q8_0 has to be read by all of them.
        """
        found: str | KvFormat | None = requested
        for device in sorted(self.devices, key=lambda device: device.kind is DeviceKind.CPU):
            found = kv_format.resolve(
                found,
                device_kind=device.name,
                n_layer=n_layer,
                n_head_kv=n_head_kv,
                head_dim=head_dim,
                reads_packed_kv=device.package().READS_PACKED_KV,
            )
        return KvFormat.parse(found or "")

    def __str__(self) -> str:
        return ",".join(
            str(device) if count is None else f"{device}:{count}" for device, count in self.parts
        )


def _part(part: str, text: str) -> tuple[Device, int]:
    """`cuda:20`, a part of the plan `text`."""
    found = PART.fullmatch(part)
    if found is None:
        raise Refusal(
            "9.6",
            f"device {text!r}: {part!r} is no DEVICE:LAYERS; give one device for all layers, or "
            "how many layers each one takes in order, such as cpu:10,cuda:20",
            {"device": text, "part": part},
        )
    try:
        return Device.parse(found[1]), int(found[2])
    except Refusal as refusal:
        raise Refusal(refusal.rule, f"{refusal.message}, in {text!r}", refusal.facts) from None


class Need(NamedTuple):
    """Bytes of memory on a device, and what they are for."""

    device: Device
    what: str
    n_bytes: int


@contextmanager
def required(needs: Iterable[Need]) -> Iterator[None]:
    """`memory.required`, device by device; those that take the host's memory take it together."""
    asked = list(needs)
    several = len({need.device for need in asked}) > 1
    pools: dict[bool, tuple[Device, dict[str, int]]] = {}
    for device, what, n_bytes in asked:
        _, pool = pools.setdefault(device.has_own_memory, (device, {}))
        name = f"{what} on {device}" if several else what
        pool[name] = pool.get(name, 0) + n_bytes
    with ExitStack() as stack:
        for device, pool in pools.values():
            stack.enter_context(memory.required(pool, device.free_bytes))
        yield
