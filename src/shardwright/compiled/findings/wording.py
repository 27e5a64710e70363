"""Texts of places, bytes and times in findings about compiled programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.compiled.agreement.matching import total
from shardwright.compiled.reading.program import CompiledCollective
from shardwright.core.layout.wording import bytes_text, count, every, others
from shardwright.core.plan.plan import Plan
from shardwright.cost.wording import seconds_text


def place(component: str | None, kind: str, axes: Sequence[str]) -> str:
    """A component with a kind of collective: ``'moe': all-gather over expert``."""
    return place_of([component], kind, axes)


def place_of(components: Iterable[str | None], kind: str, axes: Sequence[str]) -> str:
    """The same for several components, each named once.

    >>> place_of(["mlp", "moe", "mlp"], "all-gather", ["fsdp"]), place_of([None], "all-gather", ["fsdp"])
    ("'mlp' and 'moe': all-gather over fsdp", 'without a name: all-gather over fsdp')
    """
    named = every("without a name" if one is None else f"'{one}'" for one in dict.fromkeys(components))
    return f"{named}: {kind} over {every(axes)}" if axes else f"{named}: {kind}"


def several_times(num_bytes: int, executions: int, like: int | None = None) -> str:
    """
    >>> several_times(3 << 20, 6), several_times(0, 0)
    ('3.00 MiB a step in 6 executions', 'nothing')
    """
    return f"{bytes_text(num_bytes, like=like)} a step in {count(executions, 'execution')}" if num_bytes else "nothing"


def of_tensors(found: Iterable[CompiledCollective], noun: str = "tensor") -> str:
    """The tensors and source lines of some collectives, one text line each; empty if nothing is known."""
    found = sorted(found, key=lambda one: -total([one]))
    tensors = list(dict.fromkeys(name for one in found for name in one.tensors))
    sources = list(dict.fromkeys(one.source for one in found if one.source))
    lines = [others(tensors, noun)] if tensors else []
    lines += [f"at {others(sources, 'line')}"] if sources else []
    return "".join(f"\n{line}" for line in lines)


def cost_of(plan: Plan, num_bytes: float, axes: Sequence[str], what: str = "more") -> str:
    """Bytes per step on a device, and their seconds if the plan has a rate for their axes."""
    seconds = seconds_of(plan, num_bytes, axes)
    timed = f", about {seconds_text(seconds)}" if seconds else ""
    return f"{bytes_text(num_bytes)} a device and step {what}{timed}"


def cost_of_all(plan: Plan, found: Iterable[CompiledCollective], what: str) -> str:
    """The same for several collectives, each at the rate of its axes; without seconds if one has none."""
    found = list(found)
    seconds = [seconds_of(plan, total([one]), one.axes) for one in found]
    known = [time for time in seconds if time is not None]
    timed = f", about {seconds_text(sum(known))}" if known and len(known) == len(seconds) else ""
    return f"{bytes_text(total(found))} a device and step {what}{timed}"


def seconds_of(plan: Plan, num_bytes: float, axes: Sequence[str]) -> float | None:
    """Seconds of bytes over axes, at the rate of the plan's collectives over the same axes; None if it has none."""
    same_axes = [one for one in plan.collectives if set(one.axes) == set(axes) and one.seconds]
    moved = total(same_axes)
    return num_bytes * sum(one.seconds or 0.0 for one in same_axes) / moved if moved else None
