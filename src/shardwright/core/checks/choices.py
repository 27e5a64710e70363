"""SW105: what `auto` chose, with the costs of all options."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.auto import HOPS
from shardwright.core.layout.wording import bytes_text
from shardwright.core.plan.plan import Plan


def choices(plan: Plan) -> Iterator[Draft]:
    """One draft for each choice of the plan."""
    layout = plan.request.layout
    for choice in (one for one in plan.choices if one.what != HOPS):
        costs = dict(sorted(choice.wire_bytes.items(), key=lambda item: item[1]))
        most, least = max(costs.values()), costs[choice.chosen]
        kind, name = choice.what.split(".")
        yield Draft(
            finding=Finding(
                code="SW105",
                severity="info",
                where=f"{choice.what} of layout '{layout.name}'",
                position=layout.positions.get(kind),
                found=f"'auto' chose '{choice.chosen}'; bytes sent by each device for one layer, forward and backward:\n"
                + "\n".join(f"{option:<10}  {bytes_text(sent, like=most)}" for option, sent in costs.items()),
                needed=f"nothing; 'move: {{{name}: {choice.chosen}}}' makes the choice explicit",
                cost=f"the most expensive option sends {most / least:.3g} times as much" if least else "",
            )
        )
