"""The estimated time of one step, by what it is spent on, with the numbers of the hardware that it depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number of the hardware that an estimate uses, with its source. ``others``: (value, source) pairs of other sources."""

    name: str
    value: float
    source: str
    others: tuple[tuple[float, str], ...] = ()

    def to_json(self) -> dict[str, object]:
        others = [{"value": value, "source": source} for value, source in self.others]
        return {"name": self.name, "value": self.value, "source": self.source, "others": others}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Estimated time of one step: computation, communication, and ``exposed_seconds``, the communication not overlapped.

    ``host_seconds``: copies of activations to the host and back, None where the chip's link has no figure; ``host_exposed_seconds``: of
    those, what is not hidden behind compute. ``idle_seconds``: a pipeline stage waits for the others. ``low_seconds`` and ``high_seconds``: the range that measured steps were
    in nine times of ten; None where they were not priced. All are of an even routing, but ``seconds_if_one_device_gets_all``: of all tokens
    that its experts may receive; None where that is an even share.
    """

    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    host_seconds: float | None = 0.0
    host_exposed_seconds: float = 0.0
    idle_seconds: float = 0.0
    low_seconds: float | None = None
    high_seconds: float | None = None
    seconds_if_one_device_gets_all: float | None = None
    flops_per_device: float | None = None
    constants: tuple[Constant, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "compute_seconds": self.compute_seconds,
            "communication_seconds": self.communication_seconds,
            "exposed_seconds": self.exposed_seconds,
            **(
                {}
                if self.host_seconds == 0.0
                else {"host_seconds": self.host_seconds, "host_exposed_seconds": self.host_exposed_seconds}
            ),
            "idle_seconds": self.idle_seconds,
            "low_seconds": self.low_seconds,
            "high_seconds": self.high_seconds,
            **({"seconds_if_one_device_gets_all": longest} if (longest := self.seconds_if_one_device_gets_all) else {}),
            "flops_per_device": self.flops_per_device,
            "constants": [constant.to_json() for constant in self.constants],
        }
