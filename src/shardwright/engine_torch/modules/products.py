"""What all modules with linear layers have: products as their recipe has them, and what the recipe keeps from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.formula import Quantized
from shardwright.core.recipes.recipe import Dim, Operand
from shardwright.engine_torch.io.layer_io import ALONE, NO_SITE, LowPrecision
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.io.private import COMPILES_WHOLE, no_view
from shardwright.engine_torch.layers.product import weight_product
from shardwright.engine_torch.modules.codes.coded_weight import CodedWeight, coded
from shardwright.engine_torch.modules.codes.copies import require_copies
from shardwright.engine_torch.modules.codes.initialization import PrimaryWeights, require_primary, weight_options
from shardwright.engine_torch.modules.codes.state import RestingState, require_float32
from shardwright.engine_torch.modules.parallel import ParallelModule
from shardwright.engine_torch.modules.parts.arguments import require_floats
from shardwright.engine_torch.modules.parts.autocasting import recipe_inside, require_recipe
from shardwright.engine_torch.modules.parts.delayed import DelayedAmaxes
from shardwright.engine_torch.modules.parts.initial import Parameter
from shardwright.engine_torch.modules.parts.precision import (
    low_precision,
    require_units,
    sharded_dims,
    unit_of,
    with_kernels,
)
from shardwright.engine_torch.modules.parts.random_bits import (
    THIS,
    RandomBits,
    Source,
    is_random,
    source_of,
    with_elements,
)
from shardwright.engine_torch.modules.parts.tensor_parallel import Mode, entered, in_autocast, left, peers_in
from shardwright.engine_torch.precision.delayed import measured_factor
from shardwright.engine_torch.precision.operands import quantized, turned


class ProductModule(ParallelModule):
    """A module with linear layers.

    ``delayed``: histories and factors, of a recipe with delayed amaxes. ``random``: of a recipe with random bits, their seed and the number
    of backward passes. None: the recipe has no such thing.
    """

    delayed: DelayedAmaxes | None
    random: RandomBits | None
    resting: RestingState
    _source: tuple[tuple[Sequence[int], dist.ProcessGroup], Source] | None = None

    def __init__(
        self,
        parameters: Sequence[Parameter],
        *,
        recipe: object = None,
        primary_weights: PrimaryWeights | None = None,
        preserve_high_precision_init_val: bool = False,
        **options: Any,
    ) -> None:
        inside = weight_options()
        self.primary_weights = primary_weights or inside.primary_weights
        self.preserves_initial = preserve_high_precision_init_val or inside.preserve_high_precision_init_val
        recipe = inside.recipe if recipe is None else recipe
        super().__init__(parameters, recipe=recipe_inside(recipe, type(self).__name__), **options)

    def linear_dims(self) -> Mapping[str, tuple[Mode | None, Mapping[Dim, str]]]:
        """By the name of each weight that is quantized: its mode, and the arguments that give its dims."""
        raise NotImplementedError

    def product(self, x: torch.Tensor, names: tuple[str, str | None], mode: Mode | None) -> torch.Tensor:
        """A linear layer: tokens ``[..., inputs]`` times a weight, with the exchanges of its mode, plus its bias."""
        return self.product_of_entered(self.entered(x, names[0], mode), names, mode)

    def entered(self, x: torch.Tensor, name: str, mode: Mode | None) -> torch.Tensor:
        """The input of a linear layer, as the local weight ``name`` needs it."""
        peers = self.peers
        self.require_width(x, name, mode, peers)
        return entered(in_autocast(x), mode, sequence_parallel=self.sequence_parallel, peers=peers)

    def product_of_entered(self, x: torch.Tensor, names: tuple[str, str | None], mode: Mode | None) -> torch.Tensor:
        """As ``product``, of an input after ``entered``, which several weights may share."""
        peers, (weight_name, bias_name) = self.peers, names
        y = self.multiplied(x, weight_name, mode)
        if mode == "row":
            self.require_shards(y, peers)
        y = left(y, mode, sequence_parallel=self.sequence_parallel, peers=peers)
        return y if bias_name is None else y + self.weight_in_use(bias_name, x.dtype)

    def multiplied(self, x: torch.Tensor, name: str, mode: Mode | None, *, sorted_tokens: bool = False) -> torch.Tensor:
        """Local tokens times the local weight ``name``, as the recipe has it. ``sorted_tokens``: those of one of several layers, of
        which each rank has as many as there are."""
        require_recipe(self.recipe, self.label)
        if self.primary_weights is not None and torch.compiler.is_compiling() and not COMPILES_WHOLE:
            # As all that has a recipe before that version.
            untraced: Callable[..., torch.Tensor] = torch.compiler.disable(_multiplied)  # pyright: ignore[reportAssignmentType]
            return untraced(self, x, name, mode, sorted_tokens=sorted_tokens)
        weight = self.weight_in_use(name, x.dtype)
        if self.delayed is not None and self._has_amaxes and not isinstance(weight, CodedWeight):
            self.delayed.notice_missing_end(name, weight)
        low = self._low(name, mode)
        if low is not None and self.random is not None and torch.is_grad_enabled():
            outputs, inputs = weight.shape
            low = with_elements(
                low,
                None if sorted_tokens else x.shape[:-1],
                {"outputs": outputs, "inputs": inputs},
                mode,
                self._tokens_of(),
                self.peers,
                tp_tokens=self.sequence_parallel and mode is None,
            )
        held = self.resting.held(name) if isinstance(weight, CodedWeight) else None
        operand = weight if held is None else coded(weight, held)
        y = weight_product(x, operand, low=with_kernels(low, x))
        return y if self.recipe is None else no_view(y)

    def weight_in_use(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """As of any module; the codes of a weight that rests as these, of main weights as they are now."""
        if self.primary_weights is not None and name in self.resting.names and self.resting.held(name) is not None:
            # Codes have no dtype of the computation.
            dtype = getattr(self, name).dtype
        return super().weight_in_use(name, dtype)

    def quantize_changed_weights(self) -> None:
        """Before ``fully_shard`` gathers codes: those of main weights that were changed by something else than an optimizer's step."""
        self.resting.quantize_changed()

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """As of any module; then have the weights rest as codes, where ``primary_weights`` says so."""
        if self.primary_weights is None or defer_init:
            super().reset_parameters(defer_init)
            return
        self.resting.return_to_values()
        super().reset_parameters()
        self.resting.rest(preserve=self.preserves_initial)

    def delayed_peers(self) -> Mapping[tuple[str, Operand], Peers]:
        """For each operand with a delayed amax, the ranks that hold parts of it."""
        if self.delayed is None:
            return {}
        found: dict[tuple[str, Operand], Peers] = {}
        for name, (mode, _) in self.linear_dims().items():
            low = self._low(name, mode)
            assert low is not None
            found |= {(name, place[1]): low.amax_peers.get(place, ALONE) for place in low.delayed}
        return found

    @property
    def num_sources(self) -> int:
        """How many groups of ranks have tokens of their own: those of tp have the same, or parts of them."""
        if not dist.is_initialized():
            return 1
        return max(1, dist.get_world_size(self.amax_group) // self.peers.size)

    def notice_load(self, is_loaded: Callable[[torch.Tensor], bool]) -> None:
        """Tensors were loaded in place: those of which ``is_loaded`` is true."""
        if self.delayed is None:
            return
        if is_loaded(self.delayed.sources):
            self.delayed.notice_state()
        elif any(is_loaded(getattr(self, name)) for name in self.linear_dims()):
            self.delayed.notice_other_weights()

    def quantized(self, name: str) -> Quantized | None:
        """Codes and scales of a weight in the product of the forward pass, as this rank multiplies them; None: it is not quantized.

        The weight must be in use: called in a forward pre-hook where ``fully_shard`` gathers it. Every rank of tp calls this.
        """
        low = self._low(name, self.linear_dims()[name][0])
        place = ("output", "weight")
        if low is None or place not in low.quantizers:
            return None
        weight = self.weight_in_use(name, getattr(self, name).dtype)
        if isinstance(weight, CodedWeight):
            return weight.held.copies[0].quantized(weight.held.arrays[0])
        (weight,) = turned([weight], low.quantizers[place], low.site)
        factor = low.site.factors[low.delayed[place]] if place in low.delayed else None
        if factor is not None and low.site.measured:
            factor = measured_factor(weight, low.quantizers[place], factor)
        return quantized(weight, low.quantizers[place], low.amax_peers.get(place, ALONE), factor=factor)

    def require_width(self, x: torch.Tensor, name: str, mode: Mode | None, peers: Peers) -> None:
        require_floats(x, self.label)
        need = self.specs[name].shape[-1] // (peers.size if mode == "row" else 1)
        if x.dim() < 2 or x.shape[-1] != need:
            of = f", the {need} of a rank of tp {peers.size}" if mode == "row" and peers.size > 1 else ""
            raise InputError(f"{self.label}: its input is {tuple(x.shape)}; it must be [..., {need}]{of}.")

    @property
    def _has_amaxes(self) -> bool:
        """Whether a pass now has amaxes: only training has."""
        return self.training and torch.is_grad_enabled()

    def _low(self, name: str, mode: Mode | None) -> LowPrecision | None:
        if self.recipe is None:
            return None
        group = None if self.amax_group is None else peers_in(self.amax_group)
        site = NO_SITE
        if self.delayed is not None:
            site = self.delayed.site(name, self.num_sources, recording=self._has_amaxes)
        if self.random is not None:
            site = self.random.at(site)
        return low_precision(
            self.recipe, mode, self.peers, group, sequence_parallel=self.sequence_parallel, name=name, site=site
        )

    def _tokens_of(self) -> Source:
        """Found in the first pass: a tied weight may bring the ranks of tp after all else."""
        if self.amax_group is None:
            return THIS
        group = self.peers.group
        tp = dist.get_process_group_ranks(group) if group is not None else [dist.get_rank()]
        asked_of = (tp, self.amax_group)
        if self._source is None or self._source[0] != asked_of:
            # A compiler cannot trace what ranks say to each other.
            asked: Callable[..., Source] = torch.compiler.disable(source_of)  # pyright: ignore[reportAssignmentType]
            self._source = asked_of, asked(*asked_of)
        return self._source[1]

    def _require_divided(self, num: int) -> None:
        super()._require_divided(num)
        if self.recipe is None:
            return
        for name, (mode, names) in self.linear_dims().items():
            outputs, inputs = self.specs[name].shape
            require_units(self.recipe, mode, {"inputs": inputs, "outputs": outputs}, names, num, self.label)

    def unit_of(self, name: str) -> int:
        mode = self.linear_dims()[name][0] if name in self.linear_dims() else None
        return 1 if self.recipe is None else max((unit_of(self.recipe, dim) for dim in sharded_dims(mode)), default=1)

    def _make_state(self) -> None:
        self.delayed = self.random = None
        if self.recipe is not None and self.recipe.history is not None:
            self.delayed = DelayedAmaxes(self.recipe, self.linear_dims(), self.label, self.device)
        if self.recipe is not None and is_random(self.recipe):
            self.random = RandomBits(self.seed, self.device)
        require_primary(self.primary_weights, self.label)
        if self.recipe is None:
            self.primary_weights = None
        elif self.recipe.rest_quantized:
            self.primary_weights = "codes"
        if self.recipe is not None and self.primary_weights is not None:
            require_copies(self.recipe, self.label)
            require_float32(self, self.linear_dims())
        self.resting = RestingState(self, self.linear_dims(), self.recipe, self.label)

    def _reset_seed(self) -> None:
        if self.random is not None and not self.random.has_passes:
            self.random.first_seed = self.seed
            self.random.reset()

    def _reset_state(self, device: torch.device) -> None:
        for one in filter(None, (self.delayed, self.random)):
            if any(buffer.is_meta for buffer in one.buffers()):
                one.to_empty(device=device)
            one.reset()

    def _save_to_state_dict(self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool) -> None:
        """As PyTorch's; of a weight that rests as codes its main weight. Its codes are in ``resting``."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, main in self.resting.main_weights().items():
            destination[f"{prefix}{name}"] = main
            if main is None:
                del destination[f"{prefix}{name}"]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As PyTorch's; what of a weight is taken where it or a state has codes is in ``codes/state.py``."""
        of_codes = {load.weight for load in self.resting.loads(prefix, state_dict)}
        coded = {f"{prefix}{name}" for name, *_ in self.resting.weights()}
        others = {key: value for key, value in state_dict.items() if key not in coded}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys[:] = [key for key in missing_keys if key not in coded | of_codes]
        weights = any(f"{prefix}{name}" in state_dict for name in self.linear_dims())
        state = any(name.startswith(f"{prefix}delayed.") for name in state_dict)
        if self.delayed is not None and weights and not state:
            self.delayed.notice_other_weights()
        error_msgs += self.resting.load(state_dict, prefix, missing_keys)


def _multiplied(
    module: ProductModule, x: torch.Tensor, name: str, mode: Mode | None, *, sorted_tokens: bool
) -> torch.Tensor:
    return module.multiplied(x, name, mode, sorted_tokens=sorted_tokens)
