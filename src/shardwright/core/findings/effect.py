"""What a fix does to the step by the plan's own clock and memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a plan asks of a machine. ``seconds`` of a step: None where a collective has no time, or where there is none to give.
    ``idle_seconds``: those in which a rank of a pipeline waits, in the mean of its ranks."""

    seconds: float | None
    bytes_per_device: int
    tokens: int
    devices: int
    idle_seconds: float = 0.0

    @property
    def device_seconds(self) -> float | None:
        """Seconds of one device for one token: steps of different numbers of tokens and devices are compared by it."""
        return None if self.seconds is None else self.seconds * self.devices / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A step before and after a fix. ``text``: as a finding shows it."""

    before: Price
    after: Price
    text: str

    def is_faster_by(self, share: float) -> bool:
        before, after = self.before.device_seconds, self.after.device_seconds
        return before is not None and after is not None and after < before * (1 - share)

    @property
    def is_faster(self) -> bool:
        return self.is_faster_by(ROUNDING)

    @property
    def is_slower(self) -> bool:
        """Also where only what stands has a time."""
        before, after = self.before.device_seconds, self.after.device_seconds
        return before is not None and (after is None or after > before * (1 + ROUNDING))

    @property
    def is_smaller(self) -> bool:
        return self.after.bytes_per_device < self.before.bytes_per_device

    @property
    def is_larger(self) -> bool:
        return self.after.bytes_per_device > self.before.bytes_per_device

    def is_better(self, *, for_memory: bool) -> bool:
        """Whether the plan calls it better, or at least the same. ``for_memory``: what the finding reports is paid in memory, so the fix has
        to be smaller, and may be slower: it says by how much."""
        if for_memory:
            return self.is_smaller
        return self.is_faster or not (self.is_slower or self.is_larger)

    def to_json(self) -> dict[str, object]:
        return {
            "text": self.text,
            "seconds": [self.before.seconds, self.after.seconds],
            "bytes_per_device": [self.before.bytes_per_device, self.after.bytes_per_device],
            "tokens": [self.before.tokens, self.after.tokens],
            "devices": [self.before.devices, self.after.devices],
        }


ROUNDING = 1e-9
"""Sums of the same seconds in another order differ by no more."""
