"""Bounds and solutions of one candidate of a search: what a worker computes.

A node stands for all candidates that share what its text says. Its ``seconds`` are a bound: no candidate below it has a faster step.

| node | its seconds are those of | below it are |
|---|---|---|
| kept | the step, or of stages a rank's share of all layers, as if all devices were of one node and nothing had to be recomputed | the same with what fits |
| held | the same, with the fewest microbatches with which anything fits; of stages whose weights are gathered once a step, or for each pass | the policies that fit |
| links | the same with a policy, and the microbatches that it needs | the orders of axes |
| stages | its stages on their links, of which every rank computes its mean share and none waits | the numbers of microbatches |
| microbatches | the same, with their number | the schedules and chunks of layers and of the loss |
| schedule | its own stages, where a rank waits for those before it once | its choice |
| choice | its own step, which fits | nothing |

A node has a policy of recomputation that fits, and without stages the fewest microbatches and chunks of the loss with which it does: more of them
never make a step faster by the plan's clock. A test prices every candidate of small models to hold that. Levels of stages are in ``staged.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from shardwright.core.checks import drafts
from shardwright.core.findings.codes import TOO_LARGE
from shardwright.core.findings.effect import Price
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.thresholds import MEMORY_WARNING_SHARE
from shardwright.core.mesh.divisors import divisors
from shardwright.core.planning import resolve
from shardwright.core.resolution.request import Request
from shardwright.cost.advice import priced_request
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.stages import with_unit_costs
from shardwright.search.nodes import EQUAL, NO_LIMIT, Node
from shardwright.search.space.arrangements import Arrangement
from shardwright.search.space.forms import form_named, layout_of, orders_of
from shardwright.search.space.settings import Free, Setting, microbatches_of, settings_of
from shardwright.search.staged import Staged

MOST_DIVIDED = 12
"""Nodes that a dive divides at most before it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """The model, step and machine of a search, and what is free in it. ``memory_share``: of a device's memory that answers may need; estimates
    are no finer than the rest."""

    request: Request
    machine: Machine
    free: Free
    memory_share: float = MEMORY_WARNING_SHARE.value

    def first(self, arrangement: Arrangement) -> tuple[Node, ...]:
        """The nodes that stand for all candidates of an arrangement: of level ``unfit`` where its smallest does not fit; none where it has no plan."""
        nodes, held = list[Node](), 0
        for setting in settings_of(arrangement, self.request, self.free):
            node = Node(arrangement=arrangement, setting=setting, level="kept", seconds=0.0)
            if not nodes:
                smallest = self._smallest(node)
                if smallest is None or smallest.level == "unfit":
                    return () if smallest is None else (smallest,)
                held = smallest.bytes_per_device
            seconds = self._least_seconds(node)
            if seconds is not None:
                nodes.append(replace(node, seconds=seconds, bytes_per_device=held))
        return tuple(nodes)

    def dive(self, node: Node, below_s: float = inf) -> tuple[tuple[Node, tuple[Node, ...]], ...]:
        """Nodes, from this one down, each with those below it: the first of each is divided until there is a choice, none may have fewer seconds
        than ``below_s``, or ``MOST_DIVIDED`` are."""
        divided: list[tuple[Node, tuple[Node, ...]]] = []
        left = [node]
        while left and len(divided) < MOST_DIVIDED and left[-1].level != "choice" and left[-1].seconds < below_s:
            divided.append((left[-1], self.below(left.pop(), below_s)))
            left += sorted(divided[-1][1], key=lambda item: item.key, reverse=True)
        return tuple(divided)

    def below(self, node: Node, below_s: float = inf) -> tuple[Node, ...]:
        """The nodes of which one has all candidates of this one that fit; none where none fits. ``below_s``: bounds above it need not be tight."""
        match node.level, node.ranks > 1:
            case "kept", True:
                return tuple(self._staged.held(node))
            case "kept", False:
                return tuple(self._held(node))
            case "held", True:
                return tuple(self._staged.links(node, below_s))
            case "held", False:
                tried = [
                    replace(node, level="links", setting=setting, bytes_per_device=held)
                    for held, setting in self._fitting_settings(node)
                ]
                return tuple(self._bounded(tried))
            case "links", True:
                # Where all are of one domain or torus, orders are no part of the space.
                orders = self._orders(node.arrangement)
                return tuple(self._staged.stages(node, orders[:1] if self._one_node is self.machine else orders))
            case "links", False:
                return tuple(self._in_orders(node))
            case "stages", _:
                return tuple(self._staged.microbatches(node))
            case "microbatches", _:
                return tuple(self._staged.schedules(node))
            case _:
                choice = self._choice(replace(node, level="choice"))
                return () if choice is None else (choice,)

    def in_another_order(self, node: Node) -> Node:
        """A choice with its axes in the order that makes it the fastest. Where all devices are of one domain or torus, orders are no part of the
        space: those of the answers are tried."""
        if self._one_node is not self.machine:
            return node
        fastest = node
        for arrangement in self._orders(node.arrangement)[1:]:
            ordered = self._choice(replace(node, arrangement=arrangement))
            if ordered is None or ordered.seconds >= fastest.seconds * (1 - EQUAL):
                continue
            fastest = fastest if self.errors(ordered) else ordered
        return fastest

    def errors(self, node: Node) -> tuple[str, ...]:
        """The codes of the errors that the plan of a choice has, sorted; none where it can be run."""
        try:
            plan = resolve(with_unit_costs(self.requested(node), self.machine))
        except FindingsError as error:
            return tuple(sorted({finding.code for finding in error.findings}))
        codes = {draft.finding.code for draft in drafts(plan) if draft.finding.severity == "error"}
        return tuple(sorted(codes - {TOO_LARGE}))

    def requested(self, node: Node) -> Request:
        """The request of a node."""
        return node.setting.of(node.arrangement, self.request, self.free.precisions[node.setting.precision])

    @property
    def limit_bytes(self) -> int:
        return NO_LIMIT if self.request.chip is None else int(self.memory_share * self.request.chip.usable_bytes)

    @property
    def _staged(self) -> Staged:
        return Staged(
            request=self.request,
            machine=self.machine,
            one_node=self._one_node,
            free=self.free,
            limit_bytes=self.limit_bytes,
            requested=self.requested,
        )

    def _smallest(self, node: Node) -> Node | None:
        """A candidate of an arrangement that fits; if none does that which needs the least memory, ``unfit``; None if there is no plan."""
        smallest: Node | None = None
        numbers = microbatches_of(node.arrangement, self.request, self.free)
        # One has no sums of gradients, which two or more have.
        for policy, number in product(self.free.policies[-2:], dict.fromkeys((numbers[-1], numbers[0]))):
            setting = replace(
                node.setting,
                remat=policy.text,
                microbatches=number,
                loss_chunks=self.free.loss_chunks[-1],
                once=False,
                schedule=None,
            )
            held = self._held_bytes(node, setting)
            if held is not None and (smallest is None or held < smallest.bytes_per_device):
                smallest = replace(node, setting=setting, bytes_per_device=held)
            if smallest is not None and smallest.bytes_per_device <= self.limit_bytes:
                return smallest
        return None if smallest is None else replace(smallest, level="unfit", seconds=inf)

    def _held(self, node: Node) -> Iterator[Node]:
        """With the fewest microbatches with which anything fits: with those nothing is faster than what recomputes nothing."""
        numbers = microbatches_of(node.arrangement, self.request, self.free)
        able = [
            fewest
            for policy in self.free.policies[-2:]
            if (fewest := self._fewest(node, self._with_least_loss(node, policy.text), numbers)) is not None
        ]
        if able:
            held, setting = min(able, key=lambda fewest: fewest[1].microbatches)
            kept = replace(node.setting, microbatches=setting.microbatches)
            yield from self._bounded([replace(node, level="held", setting=kept, bytes_per_device=held)])

    def _with_least_loss(self, node: Node, policy: str) -> Setting:
        return replace(node.setting, remat=policy, loss_chunks=self.free.loss_chunks[-1])

    def _bounded(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """Nodes without stages with their bounds; without those that have no time."""
        for node in nodes:
            seconds = self._least_seconds(node)
            if seconds is not None:
                yield replace(node, seconds=max(node.seconds, seconds))

    def _fitting_settings(self, node: Node) -> Iterator[tuple[int, Setting]]:
        """Of each policy and number of chunks of the loss the setting with the fewest microbatches that fits, and the bytes of a device."""
        every = microbatches_of(node.arrangement, self.request, self.free)
        numbers = every[every.index(node.setting.microbatches) :]
        fits_in_fewest: set[str] = set()
        for policy in self.free.policies:
            if not fits_in_fewest.isdisjoint(policy.less):
                continue
            able = numbers
            for chunks in self.free.loss_chunks:
                fewest = self._fewest(node, replace(node.setting, remat=policy.text, loss_chunks=chunks), able)
                if fewest is None:
                    continue
                held, setting = fewest
                yield held, setting
                # With more chunks only fewer microbatches can be faster.
                able = tuple(number for number in able if number < setting.microbatches)
                if not able:
                    fits_in_fewest.add(policy.text)
                    break

    def _fewest(self, node: Node, setting: Setting, numbers: Sequence[int]) -> tuple[int, Setting] | None:
        """The setting with the fewest microbatches with which it fits, and the bytes of a device: more never need more memory, but for
        sums of gradients that one has not. None if it fits with neither the first nor the most."""

        def held_with(number: int) -> int:
            held = self._held_bytes(node, replace(setting, microbatches=number))
            return NO_LIMIT + 1 if held is None else held

        last = len(numbers) - 1
        held = held_with(numbers[0])
        if held <= self.limit_bytes:
            return held, replace(setting, microbatches=numbers[0])
        held = held_with(numbers[last])
        if held > self.limit_bytes:
            return None
        first = 0
        while first < last:
            middle = (first + last) // 2
            smaller = held_with(numbers[middle])
            if smaller <= self.limit_bytes:
                last, held = middle, smaller
            else:
                first = middle + 1
        return held, replace(setting, microbatches=numbers[last])

    def _held_bytes(self, node: Node, setting: Setting) -> int | None:
        try:
            request = self.requested(replace(node, setting=setting))
            return resolve(request, collectives=False).memory.total_bytes_per_device
        except (FindingsError, InputError):
            return None

    def _least_seconds(self, node: Node) -> float | None:
        """As if all devices were of one node. Without its stage axis a mesh has all layers: their time is no more than that of all ranks together, since
        what is hidden behind a stage's products is hidden behind them too; less ``EQUAL`` of it, since stages share out updates otherwise."""
        arrangement, setting, machine = node.arrangement, node.setting, self._one_node
        if node.ranks == 1:
            price = self._price(node, machine)
            return None if price is None else price.seconds
        machine = _part(machine, node.ranks)
        if machine is None:
            return 0.0
        sizes = {axis: size for axis, size in arrangement.sizes.items() if axis != "stage"} or {"fsdp": 1}
        arrangement = replace(arrangement, layout=layout_of(form_named(arrangement.form), tuple(sizes)), sizes=sizes)
        # Weights of stages may be gathered once a step: without stages that is in one microbatch, where they stay gathered.
        setting = replace(setting, schedule=None, once=True, microbatches=1, loss_chunks=self.free.loss_chunks[0])
        price = self._price(replace(node, arrangement=arrangement, setting=setting), machine)
        return None if price is None or price.seconds is None else (1 - EQUAL) * price.seconds / node.ranks

    def _in_orders(self, node: Node) -> Iterator[Node]:
        """A choice without stages with its axes in each order that is tried."""
        if self._one_node is self.machine:
            yield replace(node, level="choice")
            return
        for arrangement in self._orders(node.arrangement):
            if (choice := self._choice(replace(node, level="choice", arrangement=arrangement))) is not None:
                yield choice

    def _orders(self, arrangement: Arrangement) -> list[Arrangement]:
        form = form_named(arrangement.form)
        orders = orders_of(form, arrangement.sizes, self.machine)
        return [replace(arrangement, layout=layout_of(form, tuple(sizes)), sizes=sizes) for sizes in orders]

    def _choice(self, node: Node) -> Node | None:
        """A choice with its own seconds and bytes; None if it has no time or does not fit."""
        try:
            price = priced_request(self.requested(node), self.machine)
        except (FindingsError, InputError):
            return None
        if price.seconds is None or price.bytes_per_device > self.limit_bytes:
            return None
        return replace(node, seconds=price.seconds, bytes_per_device=price.bytes_per_device)

    def _price(self, node: Node, machine: Machine) -> Price | None:
        """The price on chips of a memory without limit, in which stages are shared out by time alone."""
        try:
            request = self.requested(node)
            chip = request.chip
            limitless = None if chip is None else replace(chip, usable_bytes=NO_LIMIT)
            return priced_request(replace(request, chip=limitless), machine)
        except (FindingsError, InputError):
            return None

    @property
    def _one_node(self) -> Machine:
        """The machine as if all GPUs were of one node: its links are the fastest for any order of axes. A torus as it is."""
        numbers = self.machine.numbers
        if numbers is None or numbers.network == "torus" or self.machine.shape[0] == 1:
            return self.machine
        return replace(self.machine, shape=(1, self.machine.num_devices))


def _part(machine: Machine, parts: int) -> Machine | None:
    """One of so many equal parts of a machine; None where its shape does not divide."""
    shape = list(machine.shape)
    while parts > 1:
        factor = divisors(parts)[1]
        able = [place for place, size in enumerate(shape) if size % factor == 0]
        if machine.slices % factor == 0:
            machine = replace(machine, slices=machine.slices // factor)
        elif able:
            shape[max(able, key=lambda place: shape[place])] //= factor
        else:
            return None
        parts //= factor
    return replace(machine, shape=tuple(shape))
