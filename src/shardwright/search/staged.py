"""Bounds of candidates in stages, by the costs of their units (``pipelines.py``): each level of ``solving.py`` divides the one above.

``EQUAL`` of a bound is to spare: what a layer hides of communication beside the logits differs from what it hides alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from shardwright.core.resolution.request import Request
from shardwright.core.schedules.schedules import SCHEDULES
from shardwright.cost.hardware.machine import Machine
from shardwright.search.nodes import EQUAL, Node
from shardwright.search.pipelines import Pipelined
from shardwright.search.space.arrangements import Arrangement
from shardwright.search.space.settings import Free, Setting, microbatches_in_stages, plain_schedules, schedules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Divides nodes of pipelines. ``requested``: the request of a node. ``one_node``: the machine as if all its devices were of one node."""

    request: Request
    machine: Machine
    one_node: Machine
    free: Free
    limit_bytes: int
    requested: Callable[[Node], Request]

    def held(self, node: Node) -> Iterator[Node]:
        """With weights that are gathered once a step or for each pass, each with the fewest microbatches with which anything fits: with those
        nothing is faster than what recomputes nothing."""
        policies = self.free.policies_for(node.ranks, self.request.properties)
        for once in (True, False) if node.setting.once else (False,):
            setting = replace(node.setting, once=once, loss_chunks=self.free.loss_chunks[0])
            number: int | None = None
            # The last needs the least between passes, but during one it may need as much as that before.
            for policy in reversed(policies[-2:]):
                fewest = self._fewest(node, replace(setting, remat=policy.text), number)
                number = number if fewest is None else fewest.request.microbatches
            if number is not None:
                least = replace(setting, remat=policies[0].text, microbatches=number)
                yield from self._bounded(replace(node, level="held", setting=least), self.one_node)

    def links(self, node: Node, below_s: float = inf) -> Iterator[Node]:
        """With each policy that fits, and the fewest microbatches with which it does. One whose step takes at least ``below_s`` has a bound by the
        microbatches of the node above alone, whether it fits or not, and that of a policy which recomputes less."""
        least: dict[str, float] = {}
        for policy in self.free.policies_for(node.ranks, self.request.properties):
            tried = replace(node, level="links", setting=replace(node.setting, remat=policy.text))
            least[policy.text] = max([node.seconds, *(least[text] for text in policy.less if text in least)])
            if least[policy.text] >= below_s:
                yield replace(tried, seconds=least[policy.text])
                continue
            first = self._alone(tried, tried.setting, self.one_node)
            bounded = next(self._bounded(tried, self.one_node, first), None)
            least[policy.text] = tried.seconds if bounded is None else bounded.seconds
            if bounded is not None and bounded.seconds >= below_s:
                yield bounded
                continue
            fewest = self._fewest(tried, tried.setting, rows=first)
            if fewest is not None:
                setting = replace(tried.setting, microbatches=fewest.request.microbatches)
                yield from self._bounded(replace(tried, setting=setting), self.one_node, fewest)

    def stages(self, node: Node, arrangements: Sequence[Arrangement]) -> Iterator[Node]:
        """With its axes in each of some orders."""
        for arrangement in arrangements:
            yield from self._bounded(replace(node, level="stages", arrangement=arrangement), self.machine)

    def microbatches(self, node: Node) -> Iterator[Node]:
        """With each number of microbatches that fits."""
        for number in self._numbers(node):
            setting = replace(node.setting, microbatches=number)
            fitting = self._alone(node, setting, self.machine)
            if fitting is not None and fitting.bytes_per_device(with_logits=False) <= self.limit_bytes:
                yield from self._bounded(replace(node, level="microbatches", setting=setting), self.machine, fitting)

    def schedules(self, node: Node) -> Iterator[Node]:
        """With each schedule, and chunks of layers and of the loss, whose own stages may fit."""
        costs: dict[tuple[str | None, int], Pipelined | None] = {}
        for setting in schedules_of(node.arrangement, node.setting, self.request, self.free):
            alike = setting.schedule if self.request.properties.gathers_by_schedule else None, setting.loss_chunks
            request = self.requested(replace(node, setting=setting))
            if alike not in costs:
                costs[alike] = Pipelined.of(request, self.machine)
            costed = costs[alike]
            pipelined = (
                None if costed is None else Pipelined.with_costs(replace(request, unit_costs=costed.request.unit_costs))
            )
            if pipelined is not None and (held := pipelined.bytes_per_device(with_logits=True)) <= self.limit_bytes:
                seconds = max(node.seconds, (1 - EQUAL) * pipelined.seconds)
                yield replace(node, level="schedule", setting=setting, seconds=seconds, bytes_per_device=held)

    def _bounded(self, node: Node, machine: Machine, alone: Pipelined | None = None) -> Iterator[Node]:
        """A node with its bound, which is at least that of the node above; none where it has no time. ``alone``: its pipeline by the engine's own
        schedule, where it is there already."""
        names = plain_schedules(self.request.properties)
        if alone is None or len(names) > 1:
            tried = (self._alone(node, replace(node.setting, schedule=name), machine, name) for name in names)
            able = [pipelined for pipelined in tried if pipelined is not None]
        else:
            able = [alone]
        # Each rank has one stage for certain where there are no layers for two, and waits for those before it if its backward pass is whole.
        single = not any(SCHEDULES[name].splits for name in names) and 2 * node.ranks > self.request.table.num_layers
        if able:
            least = min(pipelined.one_stage_each if single else pipelined.share for pipelined in able)
            yield replace(node, seconds=max(node.seconds, (1 - EQUAL) * least))

    def _numbers(self, node: Node) -> Sequence[int]:
        """The numbers of microbatches, from that of a node on, with which some schedule runs."""
        settings = microbatches_in_stages(node.arrangement, node.setting, self.request, self.free)
        return [
            setting.microbatches
            for setting in settings
            if any(True for _ in schedules_of(node.arrangement, setting, self.request, self.free))
        ]

    def _fewest(
        self, node: Node, setting: Setting, below: int | None = None, rows: Pipelined | None = None
    ) -> Pipelined | None:
        """With the fewest microbatches that fit: more of them never need more memory. None where the most do not fit. ``below``: of fewer only.
        ``rows``: with the first number, where it is there already."""
        if rows is not None and rows.bytes_per_device(with_logits=False) <= self.limit_bytes:
            return rows
        for number in self._numbers(replace(node, setting=setting)):
            if below is not None and number >= below:
                break
            if rows is not None and number == rows.request.microbatches:
                continue
            if rows is not None and rows.least_bytes_with(number) > self.limit_bytes:
                continue
            pipelined = self._alone(node, replace(setting, microbatches=number), self.one_node)
            if pipelined is not None and pipelined.bytes_per_device(with_logits=False) <= self.limit_bytes:
                return pipelined
            rows = pipelined
        return None

    def _alone(self, node: Node, setting: Setting, machine: Machine, schedule: str | None = None) -> Pipelined | None:
        """By the engine's own schedule, which needs the least memory, where none is named."""
        return Pipelined.of(self.requested(replace(node, setting=replace(setting, schedule=schedule))), machine)
