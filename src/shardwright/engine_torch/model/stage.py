"""A stage as modules: this rank's shards of its weights, and what it computes of a microbatch.

A model without a pipeline is one stage, which has all layers and both ends. B rows, L tokens, M embed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from shardwright.core.plan.fsdp_groups import FsdpGroup, WeightOfLayer, groups_of, update_groups, weights_of
from shardwright.core.plan.memory import kept_runs
from shardwright.core.plan.plan import Plan
from shardwright.core.policies.runs import keep_a_mask
from shardwright.core.program.walk import steps_of
from shardwright.core.stages.gathering import EACH_PASS, Gathering
from shardwright.engine_torch.experts.experts import MoeCounts
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.layer_io import NO_SITE, InUse, Links, LowPrecision, Params, Site
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.io.private import no_view, sharded_parameters
from shardwright.engine_torch.io.recomputation import recomputed
from shardwright.engine_torch.lowering.coded import CodedGroup
from shardwright.engine_torch.lowering.gathering import Gathered, build
from shardwright.engine_torch.lowering.parameters import empty_parameter, local_of
from shardwright.engine_torch.lowering.updates import Updated
from shardwright.engine_torch.model.forward import Ends, LayerOfStage, layer
from shardwright.engine_torch.model.interpreter import Calls
from shardwright.engine_torch.model.prepared import Preparation
from shardwright.engine_torch.precision.delayed import Kept
from shardwright.models.layers.decoder import walk_of

Batch = Mapping[str, torch.Tensor]


class Result(NamedTuple):
    """What a stage computes of a microbatch: the residual stream for the next stage, or, of the last one, the loss summed over a rank's
    valid tokens and the logits of its tokens, if all are computed at one time; and by stack the experts' counts of each layer."""

    x_BLM: torch.Tensor | None
    loss: torch.Tensor | None
    logits_BLV: torch.Tensor | None
    counts: Mapping[str, list[MoeCounts]]

    @property
    def output(self) -> torch.Tensor:
        """What the backward pass begins with."""
        output = self.x_BLM if self.loss is None else self.loss
        assert output is not None
        return output


class Called(NamedTuple):
    """A layer of a stack, and what is made of the batch for it and all others."""

    stack: str
    module: Gathered
    prepared: Sequence[Any]


Part = Literal["embedding", "logits"] | Called
"""A part of a stage: an end, or a layer."""


class Segment(NamedTuple):
    """A part of a stage whose backward pass can be made alone. ``run(x_BLM)``: what it computes; of the embedding ``x_BLM`` is None.
    ``weights``: those in use, while they are gathered. ``is_layer``: not an end."""

    run: Callable[[torch.Tensor | None], Result]
    weights: Callable[[], list[nn.Parameter]]
    is_layer: bool


class Stage:
    """The weights of a stage's plan on one rank, and the forward pass with them.

    ``root``: the module of the ends that the stage has, which contains those of the layers. ``groups``: the FSDP parameter
    groups; ``updated``: those whose update is sharded in another way. ``weights_on``: the device on which weights are allocated, if not the
    rank's. ``gathering``: when weights are gathered.
    ``frozen``: by name, what no gradient trains (routing biases, NE), replicated on every rank; ``delayed``: by name, what a run keeps
    for delayed amaxes; the caller fills both. ``moment``: the site of the step and the microbatch, which the caller sets.
    """

    def __init__(
        self,
        plan: Plan,
        links: Links,
        ranks: Ranks,
        weights_on: torch.device | None = None,
        gathering: Gathering = EACH_PASS,
    ) -> None:
        self.plan, self.links, self.ranks, self.gathering = plan, links, ranks, gathering
        self.weights = weights_of(plan)
        self.groups: list[FsdpGroup] = []
        self.updated: list[Updated] = []
        self.frozen: dict[str, torch.Tensor] = {}
        self.delayed: dict[str, Kept] = {}
        self.moment = NO_SITE
        table = plan.request.table
        self._runs = kept_runs(plan.request, plan.mesh, plan.tensors)
        walk, by_name = walk_of(table.architecture), plan.by_name
        self.has_embedding, self.has_logits = (
            steps_of(end[0])[0].output.name in by_name for end in (walk.before, walk.after)
        )
        self._residual = by_name[walk.input.row]
        self._ends = Ends(walk, links)
        parameters = {one.key: empty_parameter(one, ranks) for one in self.weights}
        self._coded: dict[tuple[str | None, int | None], list[CodedGroup]] = {}
        self._layers: dict[str, list[Gathered]] = {}
        for stack in walk.program.stacks:
            numbers = next((weight.layers for weight in table.weights if weight.stack == stack.name), range(0))
            calls = Calls(walk, walk.layers[stack.name], [stack.input], [stack.output], links)
            self._layers[stack.name] = [
                self._built(
                    self._of_layer(stack.name, place.number),
                    parameters,
                    partial(self._layer, place),
                    reshard_after_forward=place.policy.gathers_again and not gathering.once,
                )
                for place in (self._layer_of(stack.name, number, index, calls) for index, number in enumerate(numbers))
            ]
        kept_as = torch_dtype(plan.request.dtype) if keep_a_mask(self._runs) else None
        self._prepared = Preparation(walk, [name for name, layers in self._layers.items() if layers], links, kept_as)
        modules = [module for of_stack in self._layers.values() for module in of_stack]
        ends = [one for one in self.weights if one.layer is None]
        self.root = self._built(
            ends, parameters, self._forward, reshard_after_forward=False, called=nn.ModuleList(modules)
        )
        self.to_empty(weights_on or ranks.device)

    def to_empty(self, device: torch.device) -> None:
        """Allocate the weights, without values."""
        self.root.to_empty(device=device)
        for module in self._modules():
            module.hold_no_values(self.resting.keys())

    @property
    def resting(self) -> dict[str, CodedGroup]:
        """The groups of the weights that rest as codes, by the weights' keys."""
        groups = (group for of_layer in self._coded.values() for group in of_layer if group.rests)
        return {one.key: group for group in groups for one in group.group.weights}

    @torch.no_grad()
    def rest_as_codes(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Make the codes that rest, of weights in a wider dtype by key. Where ranks update parts of weights, these are whole for as long as
        the codes of one group are made, and what does not rest as codes is gathered with them."""
        dtype, waiting = torch_dtype(self.plan.request.weights_dtype), self.resting
        weights = {key: local_of(weight).detach() for key, weight in self.parameters().items()}
        for one in self.updated_to_codes():
            coded = [key for key in one.keys if key in waiting]
            # What rests as codes has no memory of its own.
            made = {key: torch.empty(weights[key].shape, dtype=dtype, device=weights[key].device) for key in coded}
            whole = {**weights, **made}
            parts = one.own_parts(whole)
            for key in coded:
                parts[key].copy_(masters[key])
            one.gather(whole)
            for key in coded:
                waiting.pop(key).rest_as_codes(key, whole[key])
        for key, group in waiting.items():
            group.rest_as_codes(key, masters[key].to(dtype))

    def updated_to_codes(self) -> list[Updated]:
        """The groups of which some weights rest as codes."""
        resting = self.resting
        return [one for one in self.updated if any(key in resting for key in one.keys)]

    def empty_residual(self) -> torch.Tensor:
        """A residual stream of this rank without values, BLM."""
        row, mesh = self._residual, self.plan.mesh
        shape = [size // mesh.size(dim.axes) for size, dim in zip(row.shape, row.in_use.dims, strict=True)]
        return torch.empty(shape, dtype=torch_dtype(row.dtype), device=self.ranks.device)

    def __call__(self, batch: Batch, x_BLM: torch.Tensor | None = None) -> Result:
        """``batch``: the rank's local shard of the input's fields, BL; ``x_BLM``: of the residual stream, without the embedding."""
        return self.root(batch, x_BLM)

    def part(self, batch: Batch, x_BLM: torch.Tensor | None, part: Literal["embedding", "logits"]) -> Result:
        """One end alone."""
        return self.root(batch, x_BLM, part)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every weight as this rank stores it, by its key. Do not cache the result: the first step replaces the tensors."""
        return {key: one for module in self._modules() for key, one in module.own().items()}

    def at_rest(self) -> dict[str, torch.Tensor]:
        """The same between a forward and a backward pass: those that get the gradients."""
        found: dict[str, torch.Tensor] = {}
        for module in self._modules():
            own = module.own()
            sharded = sharded_parameters(module) if own and isinstance(module, FSDPModule) else own.values()
            found |= zip(own, sharded, strict=True)
        return found

    def sharded(self) -> Iterator[FSDPModule]:
        """The modules that ``fully_shard`` manages, the outermost first."""
        return (module for module in self.root.modules() if isinstance(module, FSDPModule))

    def ends(self) -> Iterator[FSDPModule]:
        """Those of the ends' weights."""
        inside: nn.Module | None = self.root
        while isinstance(inside, Gathered):
            if isinstance(inside, FSDPModule):
                yield inside
            inside = inside.inside

    def segments(self, batch: Batch) -> list[Segment]:
        """What the stage calls, one result following from the other."""
        parts: list[tuple[Part, Gathered]] = [
            *([("embedding", self.root)] if self.has_embedding else []),
            *((called, called.module) for called in self._called(batch)),
            *([("logits", self.root)] if self.has_logits else []),
        ]
        # All are called through the root, which ``fully_shard`` needs.
        return [
            Segment(
                lambda x_BLM, part=part: self.root(batch, x_BLM, part),
                partial(_own_weights, module),
                isinstance(part, Called),
            )
            for part, module in parts
        ]

    def all_of_it(self, batch: Batch) -> Segment:
        """The stage as one segment."""
        modules = [*self._modules()]
        return Segment(
            lambda x_BLM: self.root(batch, x_BLM),
            lambda: [weight for module in modules for weight in module.parameters(recurse=False)],
            is_layer=False,
        )

    def _modules(self) -> Iterator[Gathered]:
        return (module for module in self.root.modules() if isinstance(module, Gathered))

    def _built(
        self,
        weights: list[WeightOfLayer],
        parameters: Mapping[str, nn.Parameter],
        compute: Callable[..., Any],
        *,
        reshard_after_forward: bool,
        called: nn.Module | None = None,
    ) -> Gathered:
        groups = groups_of(weights)
        self.groups += groups
        self.updated += [Updated(one, self.ranks) for one in update_groups(weights)]
        of_codes = [CodedGroup(one, self.plan, self.links.low, self.ranks) for one in groups if one.of_codes]
        if of_codes:
            self._coded[weights[0].stack, weights[0].layer] = of_codes
        return build(
            groups, parameters, compute, self.ranks, reshard_after_forward=reshard_after_forward, called=called
        )

    def _of_layer(self, stack: str, number: int) -> list[WeightOfLayer]:
        return [one for one in self.weights if one.stack == stack and one.layer == number]

    def _with_codes(self, stack: str | None, layer: int | None, params: Params, site: Site) -> InUse:
        """The parameters of a layer, or of the ends, with those gathered of which codes are. ``site``: of the products with them."""
        found: dict[str, Any] = dict(params)
        for group in self._coded.get((stack, layer), ()):
            found |= group.gathered(params, site)
        return found

    def _forward(self, own: Params, batch: Batch, x_BLM: torch.Tensor | None, part: Part | None = None) -> Result:
        """The stage, or a part of it."""
        params = self._with_codes(None, None, own, self._site(own, self.links.low, None))
        counts: dict[str, list[MoeCounts]] = {}
        if self.has_embedding and part in (None, "embedding"):
            x_BLM = self._ends.embedded(batch, params)
        assert x_BLM is not None
        for name, module, prepared in self._called(batch) if part is None else _layers_of(part):
            x_BLM, of_layer = module(x_BLM, prepared)
            if of_layer is not None:
                counts.setdefault(name, []).append(of_layer)
        assert x_BLM is not None
        if not self.has_logits or part not in (None, "logits"):
            # `fully_shard` warns of a view, which the embedding alone may be.
            return Result(no_view(x_BLM) if x_BLM._is_view() else x_BLM, None, None, counts)
        logits_BLV, loss = self._ends.scored(batch, x_BLM, params, self._site(params, self.links.low, None))
        return Result(None, loss, logits_BLV, counts)

    def _called(self, batch: Batch) -> Iterator[Called]:
        """Each layer, with what it needs of a microbatch besides the residual stream."""
        prepared = self._prepared(batch)
        for name, modules in self._layers.items():
            yield from (Called(name, module, prepared) for module in modules)

    def _layer(
        self, at: LayerOfStage, params: Params, x_BLM: torch.Tensor, prepared: Sequence[Any]
    ) -> tuple[torch.Tensor, MoeCounts | None]:
        own = {key: params[key] for key in at.name_of}
        frozen = {name: of_all[at.index] for name, of_all in self.frozen.items() if name in at.names}
        site = self._site(at.names, at.low, at.index)

        def run(x_BLM: torch.Tensor) -> tuple[torch.Tensor, MoeCounts | None]:
            held = self._with_codes(at.stack, at.number, own, site)
            weights = {at.name_of[key]: one for key, one in held.items()}
            return layer(x_BLM, {**weights, **frozen}, at, prepared, self.links, site)

        if self.gathering.split or at.policy.keeps_all_it_makes:
            return run(x_BLM)
        if at.policy.keeps_nothing:
            return checkpoint(run, x_BLM, use_reentrant=False, preserve_rng_state=False)
        return recomputed(run, at.policy, x_BLM)

    def _layer_of(self, stack: str, number: int, index: int, calls: Calls) -> LayerOfStage:
        names = self.plan.request.table.names_in(stack)
        return LayerOfStage(
            stack=stack,
            number=number,
            index=index,
            calls=calls,
            names=names,
            name_of={one.key: one.weight for one in self._of_layer(stack, number)},
            low={name: low for name, low in self.links.low.items() if name in names and index < low.num_layers},
            policy=next(run for run in self._runs if run.stack == stack and index in run.layers),
        )

    def _site(self, weights: Iterable[str], low: Mapping[str, LowPrecision], index: int | None) -> Site:
        """The site of the products with some weights: in a layer by its number among the stage's of its stack, or outside of layers."""
        names = {name for weight in weights if weight in low for name in low[weight].delayed.values()}
        kept = {name: self.delayed[name] for name in sorted(names)}
        first = 0 if index is None else self.plan.request.table.weight(next(iter(weights))).first_layer
        return replace(
            self.moment,
            layer=-1 if index is None else first + index,
            factors={name: one.factor if index is None else one.factor[index] for name, one in kept.items()},
            amaxes={name: one.amax if index is None else one.amax[index] for name, one in kept.items()},
        )


def _layers_of(part: Part) -> tuple[Called, ...]:
    return (part,) if isinstance(part, Called) else ()


def _own_weights(module: Gathered) -> list[nn.Parameter]:
    """The weights of a layer, or of the ends, without those of the layers inside."""
    found: list[nn.Parameter] = []
    inside: nn.Module | None = module
    while isinstance(inside, Gathered):
        found += inside.parameters(recurse=False)
        inside = inside.inside
    return found
