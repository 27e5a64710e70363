"""A model of the table as modules: this rank's shards of its weights, and the summed loss of a batch.

B rows, L tokens, M embed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.core.plan.fsdp_groups import FsdpGroup, WeightOfLayer, groups_of, update_groups, weights_of
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.attention.attention import mask_of
from shardwright.engine_torch.attention.scores import AttentionMask
from shardwright.engine_torch.experts.moe import MoeCounts, valid_tokens
from shardwright.engine_torch.io.layer_io import NO_SITE, InUse, Links, LowPrecision, Params, Site
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.io.private import sharded_parameters
from shardwright.engine_torch.layers.embedding import embed, logits
from shardwright.engine_torch.layers.loss import summed_cross_entropy
from shardwright.engine_torch.layers.norm import rms_norm
from shardwright.engine_torch.layers.rotary import Angles
from shardwright.engine_torch.lowering.coded import CodedGroup
from shardwright.engine_torch.lowering.gathering import Gathered, build
from shardwright.engine_torch.lowering.parameters import empty_parameter
from shardwright.engine_torch.lowering.updates import Updated
from shardwright.engine_torch.model.forward import layer
from shardwright.engine_torch.precision.delayed import Kept
from shardwright.models.parts.architecture import Architecture, Stack

Batch = Mapping[str, torch.Tensor]

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Products of tokens and weights, which ``dots`` saves for the backward pass."""


class Result(NamedTuple):
    """The loss summed over a rank's valid tokens, the logits of its tokens, and by stack the experts' counts of each layer."""

    loss: torch.Tensor
    logits_BLV: torch.Tensor
    counts: Mapping[str, list[MoeCounts]]


class Model:
    """The weights of a plan on one rank, and the forward pass with them.

    ``root``: the module of the embedding and the logits, which contains those of the layers. ``groups``: the FSDP parameter
    groups; ``updated``: those whose update is sharded in another way. ``weights_on``: the device on which weights are allocated, if not the rank's.
    ``frozen``: by name, what no gradient trains (routing biases, NE), replicated on every rank; ``delayed``: by name, what a run keeps
    for delayed amaxes; the caller fills both. ``moment``: the site of the step and the microbatch, which the caller sets.
    """

    def __init__(self, plan: Plan, links: Links, ranks: Ranks, weights_on: torch.device | None = None) -> None:
        self.plan, self.links, self.ranks = plan, links, ranks
        self.weights = weights_of(plan)
        self.groups: list[FsdpGroup] = []
        self.frozen: dict[str, torch.Tensor] = {}
        self.delayed: dict[str, Kept] = {}
        self.moment = NO_SITE
        self._architecture: Architecture = plan.request.table.architecture
        parameters = {one.key: empty_parameter(one, ranks) for one in self.weights}
        reshard_after_forward = plan.request.remat != "none"
        self.updated: list[Updated] = []
        self._coded: dict[tuple[str | None, int | None], list[CodedGroup]] = {}
        self._layers: dict[str, list[Gathered]] = {}
        for stack in self._architecture.stacks:
            self._layers[stack.name] = [
                self._built(
                    self._of_layer(stack, number),
                    parameters,
                    partial(self._layer, stack, number),
                    reshard_after_forward=reshard_after_forward,
                )
                for number in range(stack.num)
            ]
        layers = nn.ModuleList(module for modules in self._layers.values() for module in modules)
        ends = [one for one in self.weights if one.layer is None]
        self.root = self._built(ends, parameters, self._forward, reshard_after_forward=False, called=layers)
        self.root.to_empty(device=weights_on or ranks.device)

    def __call__(self, batch: Batch) -> Result:
        """``batch``: the rank's local shard of the input's fields, BL."""
        return self.root(batch)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every weight as this rank stores it, by its key. Do not cache the result: the first step replaces the tensors."""
        return {key: one for module in self._modules() for key, one in module.own().items()}

    def sharded(self) -> Iterator[FSDPModule]:
        """The modules that ``fully_shard`` manages."""
        return (module for module in self._modules() if isinstance(module, FSDPModule))

    def at_rest(self) -> dict[str, torch.Tensor]:
        """The same between a forward and a backward pass: those that get the gradients."""
        found: dict[str, torch.Tensor] = {}
        for module in self._modules():
            own = sharded_parameters(module) if isinstance(module, FSDPModule) else module.own().values()
            found |= zip(module.own(), own, strict=True)
        return found

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

    def _of_layer(self, stack: Stack, number: int) -> list[WeightOfLayer]:
        return [one for one in self.weights if one.stack == stack.name and one.layer == number]

    def _with_codes(self, stack: str | None, layer: int | None, params: Params) -> InUse:
        """The parameters of a layer, or of the ends, with those gathered of which codes are."""
        found: dict[str, Any] = dict(params)
        for group in self._coded.get((stack, layer), ()):
            found |= group.gathered(params)
        return found

    def _forward(self, own: Params, batch: Batch) -> Result:
        architecture, links, params = self._architecture, self.links, self._with_codes(None, None, own)
        rotation, mask = mask_of(batch["positions"], batch["segments"], architecture, links)
        x_BLM = embed(batch["tokens"], params, links)
        with_experts = any(stack.experts for stack in architecture.stacks)
        valid_BL = valid_tokens(batch["segments"], links) if with_experts else None
        counts: dict[str, list[MoeCounts]] = {}
        for name, modules in self._layers.items():
            for module in modules:
                x_BLM, of_layer = module(x_BLM, valid_BL, rotation, mask)
                if of_layer is not None:
                    counts.setdefault(name, []).append(of_layer)
        final_norm = links.use("residual.final_norm", params["residual.final_norm"])
        site = self._site(params, links.low, None)
        at_site = replace(
            links, low={name: replace(links.low[name], site=site) for name in params if name in links.low}
        )
        logits_BLV = logits(rms_norm(x_BLM, final_norm, architecture.norm_eps), params, at_site)
        targets_BL = links.move("input.targets", "logits.targets", batch["targets"])
        valid_BL = links.move("input.valid", "logits.valid", batch["valid"])
        loss = summed_cross_entropy(logits_BLV, targets_BL, valid_BL, links.vocab["logits"])
        return Result(loss, logits_BLV, counts)

    def _layer(
        self,
        stack: Stack,
        number: int,
        params: Params,
        x_BLM: torch.Tensor,
        valid_BL: torch.Tensor | None,
        rotation: Angles,
        mask: AttentionMask,
    ) -> tuple[torch.Tensor, MoeCounts | None]:
        name_of = {one.key: one.weight for one in self._of_layer(stack, number)}
        own = {key: params[key] for key in name_of}
        names = self.plan.request.table.names_in(stack.name)
        frozen = {name: of_all[number] for name, of_all in self.frozen.items() if name in names}
        low = {name: one for name, one in self.links.low.items() if number < one.num_layers}
        links = replace(self.links, low=low)

        site = self._site(names, low, number)

        def run(x_BLM: torch.Tensor) -> tuple[torch.Tensor, MoeCounts | None]:
            held = self._with_codes(stack.name, number, own)
            weights = {name_of[key]: one for key, one in held.items()}
            return layer(
                x_BLM,
                valid_BL,
                {**weights, **frozen},
                names,
                stack,
                self._architecture,
                rotation,
                mask,
                links,
                site,
            )

        match self.plan.request.remat:
            case "none":
                return run(x_BLM)
            case "dots":
                kept = partial(create_selective_checkpoint_contexts, _saves_products)
                return checkpoint(run, x_BLM, use_reentrant=False, preserve_rng_state=False, context_fn=kept)
            case _:
                return checkpoint(run, x_BLM, use_reentrant=False, preserve_rng_state=False)

    def _site(self, weights: Iterable[str], low: Mapping[str, LowPrecision], layer: int | None) -> Site:
        """The site of the products with some weights: in a layer of a stack by its number, or outside of layers."""
        names = {name for weight in weights if weight in low for name in low[weight].delayed.values()}
        kept = {name: self.delayed[name] for name in sorted(names)}
        first = 0 if layer is None else self.plan.request.table.weight(next(iter(weights))).first_layer
        return replace(
            self.moment,
            layer=-1 if layer is None else first + layer,
            factors={name: one.factor if layer is None else one.factor[layer] for name, one in kept.items()},
            amaxes={name: one.amax if layer is None else one.amax[layer] for name, one in kept.items()},
        )


def _saves_products(_: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    del arguments, options
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
