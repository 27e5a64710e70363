"""What all modules with parameters have: their placement on a tp mesh, and their initial values.

The order of calls: construct, ``set_device_mesh``, ``fully_shard``, ``reset_parameters(defer_init=False)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.shown import recipe_text
from shardwright.engine_torch.io.layer_io import ALONE
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.modules.parts.arguments import (
    multiples_near,
    refuse,
    require_positive,
    require_sizes,
    require_wide,
)
from shardwright.engine_torch.modules.parts.initial import Parameter, fill, local_box, new_seed
from shardwright.engine_torch.modules.parts.precision import recipe_of
from shardwright.engine_torch.modules.parts.tensor_parallel import (
    first_seed,
    flattened,
    in_use,
    lies_on,
    mesh_of,
    mesh_text,
    peers_of,
    ranks_of,
    require_equal,
    require_member,
    require_one_dim,
    require_within,
)

PLACED_AS = "_shardwright_placed_as"
"""The attribute of a parameter that was replaced: where two modules share it, both get the same DTensor."""
FILLED_BY = "_shardwright_filled_by"
"""The attribute of a parameter with the seed of its values: a second module that shares it leaves them."""


class ParallelModule(nn.Module):
    """A module with parameters that a tp mesh shards or replicates.

    ``tp_size``: without ``tp_group`` and ``tp_mesh``, the parameters have no values until ``set_device_mesh``, so that no one
    can take the shard of one rank for the entire parameter.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        *,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        amax_group: dist.ProcessGroup | None = None,
        recipe: object = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        known = [*signature(type(self).__init__).parameters, *signature(ParallelModule.__init__).parameters]
        refuse(type(self).__name__, others, known)
        super().__init__()
        self.label = f"{type(self).__name__}" + (f" '{name}'" if name else "")
        self.recipe = recipe_of(recipe)
        self.sequence_parallel = sequence_parallel
        self.tp_size = require_positive(self.label, "tp_size", tp_size)
        self.specs: Mapping[str, Parameter] = {one.name: one for one in parameters}
        self.seed = new_seed()
        self.tp_group, self.tp_mesh, self.weight_mesh, self.amax_group = tp_group, None, None, amax_group
        require_member(amax_group, self.label)
        dtype = require_wide(params_dtype or torch.get_default_dtype(), self.label)
        self.device = torch.get_default_device() if device is None else torch.device(device)
        if tp_group is not None and tp_mesh is None:
            tp_mesh = mesh_of(tp_group, self.tp_size, self.device, self.label)
        of_all = self.tp_size == 1
        for one in parameters:
            require_sizes(one, self.label)
        self._require_divided(self.tp_size)
        for one in parameters:
            shape = one.shape if of_all else local_box(one, self.tp_size, 0).shape
            tensor = torch.empty(shape, dtype=dtype, device=self.device if of_all else "meta")
            self.register_parameter(one.name, nn.Parameter(tensor))
        self._make_state()
        if of_all and self.device.type != "meta":
            self._fill()
        if tp_mesh is not None or weight_mesh is not None:
            self.set_device_mesh(tp_mesh, weight_mesh)

    @property
    def peers(self) -> Peers:
        """The ranks of tp. Raises InputError where they are not known yet."""
        mesh = self.tp_mesh or self._mesh_of_tied()
        if mesh is not None:
            return peers_of(mesh)
        if self.tp_size > 1:
            raise InputError(
                f"{self.label} has tp_size={self.tp_size}, and its ranks are not known. Call set_device_mesh(mesh['tp']) "
                f"before fully_shard."
            )
        return ALONE

    def set_device_mesh(
        self,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        *,
        amax_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Place the parameters on the tp mesh, before ``fully_shard``. Every rank of tp calls this.

        ``weight_mesh``: the ranks that shard weights, FSDP and TP as one dim, without replicas. Weights are quantized after
        they are gathered, so an amax of a weight is reduced over tp only; the mesh is checked, and not used otherwise.
        ``amax_group``: the ranks over which the amax of tokens is reduced, where tokens of several share a scale; with all of tp.

        Raises InputError, on every rank of tp, for a tp mesh of several dims, for dims or blocks that tp does not divide, for
        parameters that ``fully_shard`` has sharded already, and where ranks have other recipes. Ranks with other seeds take the values of the
        first one's.
        """
        if weight_mesh is not None:
            self.weight_mesh = flattened(weight_mesh, f"{self.label}: weight_mesh")
        if amax_group is not None:
            require_member(amax_group, self.label)
            self.amax_group = amax_group
        if tp_mesh is not None:
            self._place(require_one_dim(tp_mesh, f"{self.label}: tp_mesh"))
        if self.tp_mesh is not None:
            tp = ranks_of(self.tp_mesh)
            require_within(tp, self.weight_mesh and ranks_of(self.weight_mesh), f"{self.label}: weight_mesh")
            group = self.amax_group
            require_within(tp, group and dist.get_process_group_ranks(group), f"{self.label}: amax_group")

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """As ``set_device_mesh`` with a mesh of this group, for programs without ``fully_shard``."""
        if tp_group is not None:
            self.set_device_mesh(mesh_of(tp_group, self.tp_size, self.device, self.label))

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Give all parameters their initial values, each rank those of its boxes; parameters on ``meta`` get memory first.

        ``defer_init``: do nothing. Every rank that holds a part of the parameters calls this: all have the values of the first one's seed.
        Raises InputError, on each, where they have other recipes.
        """
        if defer_init or not self._parameters:
            return
        first = next(one for one in self._parameters.values() if one is not None)
        wrong = next((name for name, one in self.specs.items() if tuple(getattr(self, name).shape) != one.shape), None)
        if wrong is not None:
            raise InputError(
                f"{self.label}: '{wrong}' is {tuple(getattr(self, wrong).shape)}, the shard of one rank of tp_size={self.tp_size}, "
                f"and its entire shape is {self.specs[wrong].shape}. Call set_device_mesh(mesh['tp']) before fully_shard."
            )
        if isinstance(first, DTensor):
            self._require_equal(first.device_mesh)
            self._take_seed(first_seed(first.device_mesh, self.seed, self.label))
        if any(one is not None and one.is_meta for one in self._parameters.values()):
            self._take_memory(self._memory(first))
        self._fill()
        self._reset_state(self._memory(first))

    def extra_repr(self) -> str:
        sizes = ", ".join(f"{one.name}={tuple(one.shape)}" for one in self.specs.values())
        return f"{sizes}, recipe={self.recipe.name if self.recipe else None}"

    def weight_in_use(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The local tensor of a parameter, whose gradient arrives as ``in_use`` says.

        The one rule: tp replicates it, and with ``sequence_parallel`` each rank has used it with its own tokens only.
        """
        peers = self.peers
        parameter = getattr(self, name)
        if parameter.is_meta:
            raise InputError(
                f"{self.label}: '{name}' is on meta, without values. Call reset_parameters(defer_init=False)."
            )
        if hasattr(parameter, PLACED_AS):
            raise InputError(
                f"{self.label}: '{name}' is shared with a module whose set_device_mesh has replaced it. Call set_device_mesh of this one too, "
                f"before an optimizer is made."
            )
        mesh = self.tp_mesh or self._mesh_of_tied()
        if isinstance(parameter, DTensor) and parameter.device_mesh != mesh:
            raise InputError(
                f"{self.label}: '{name}' is a DTensor on {mesh_text(parameter.device_mesh)}, sharded at rest. Call the module through "
                f"the one that was given to fully_shard, which gathers it."
            )
        partial = self.specs[name].tp_dim is None and self.sequence_parallel
        return in_use(parameter, dtype, peers, partial=partial)

    def _mesh_of_tied(self) -> DeviceMesh | None:
        """The tp mesh of parameters that are tied to those of a module on it."""
        for name, one in self.specs.items():
            tied = getattr(self, name)
            if not isinstance(tied, DTensor) or tuple(tied.shape) != one.shape:
                continue
            # Of another size it may be the mesh of fully_shard.
            if tied.device_mesh.size() != self.tp_size:
                continue
            if tied.device_mesh.ndim == 1 and tied.placements == (self._placement(one),):
                return tied.device_mesh
        return None

    def _place(self, mesh: DeviceMesh) -> None:
        size = mesh.size()
        if self.tp_size not in (1, size):
            raise InputError(
                f"{self.label} has tp_size={self.tp_size}, and tp_mesh has {size} ranks. Give the mesh of {self.tp_size} ranks, "
                f"or tp_size={size}."
            )
        if self.tp_mesh is not None and ranks_of(self.tp_mesh) != ranks_of(mesh):
            raise InputError(f"{self.label} is on the ranks {ranks_of(self.tp_mesh)} of another tp_mesh already.")
        self._require_divided(size)
        placed = {name: self._placement(one) for name, one in self.specs.items()}
        current: dict[str, torch.Tensor] = {}
        for name in self.specs:
            parameter = getattr(self, name)
            parameter = getattr(parameter, PLACED_AS, parameter)
            if isinstance(parameter, DTensor) and not lies_on(parameter, mesh, placed[name]):
                raise InputError(
                    f"{self.label}: '{name}' is a DTensor on {mesh_text(parameter.device_mesh)} already. Call set_device_mesh "
                    f"before fully_shard, which reads the placement on tp."
                )
            current[name] = parameter
        self._require_equal(mesh)
        self._take_seed(first_seed(mesh, self.seed, self.label, self._changed_since_filled))
        without_values = any(one.is_meta for one in current.values()) and self.device.type != "meta"
        for name, parameter in current.items():
            if not isinstance(parameter, DTensor):
                parameter = self._placed(parameter, self.specs[name], placed[name], mesh)
            self.register_parameter(
                name, nn.Parameter(parameter) if not isinstance(parameter, nn.Parameter) else parameter
            )
        self.tp_mesh, self.tp_size = mesh, size
        if without_values:
            self.reset_parameters()

    def _placed(self, parameter: torch.Tensor, one: Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
        local = parameter.detach()
        if tuple(local.shape) == one.shape:
            local = local[local_box(one, mesh.size(), mesh.get_local_rank()).slices].clone()
        stride = tuple(prod(one.shape[dim + 1 :]) for dim in range(len(one.shape)))
        tensor = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=torch.Size(one.shape), stride=stride
        )
        made = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        setattr(parameter, PLACED_AS, made)
        if hasattr(parameter, FILLED_BY):
            setattr(made, FILLED_BY, getattr(parameter, FILLED_BY))
        return made

    def _placement(self, one: Parameter) -> Placement:
        return Replicate() if one.tp_dim is None else Shard(one.tp_dim)

    def owns(self, name: str) -> bool:
        """Whether this module gives a parameter its values: it does not, where another one that shares it has done so before."""
        return getattr(getattr(self, name), FILLED_BY, self.seed) == self.seed

    def _fill(self) -> None:
        for name, one in self.specs.items():
            parameter = getattr(self, name)
            if self.owns(name):
                fill(parameter, one, self.seed)
                setattr(parameter, FILLED_BY, self.seed)

    def _take_seed(self, seed: int) -> None:
        """The seed of another rank, and its values for parameters that have those of this one's."""
        if seed == self.seed:
            return
        filled = [name for name in self.specs if getattr(getattr(self, name), FILLED_BY, None) == self.seed]
        self.seed = seed
        for name in filled:
            parameter = getattr(self, name)
            setattr(parameter, FILLED_BY, seed)
            fill(parameter, self.specs[name], seed)
        self._reset_seed()

    def _reset_seed(self) -> None:
        """Take a seed of another rank for what a module keeps beside its parameters."""

    def _changed_since_filled(self) -> str | None:
        """A parameter whose values have changed since they were made of this rank's seed."""
        for name, spec in self.specs.items():
            parameter = getattr(self, name)
            if parameter.is_meta or isinstance(parameter, DTensor) or getattr(parameter, FILLED_BY, None) != self.seed:
                continue
            values = torch.empty_like(parameter)
            fill(values, spec, self.seed)
            if not torch.equal(values, parameter):
                return name
        return None

    def _take_memory(self, device: torch.device) -> None:
        """As ``to_empty``, but that all who hold a parameter have it afterwards: other modules that share it, and optimizers."""
        for name in self.specs:
            parameter = getattr(self, name)
            if parameter.is_meta:
                memory = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
                vars(memory).update(vars(parameter))
                torch.utils.swap_tensors(parameter, memory)

    def _memory(self, first: torch.Tensor) -> torch.device:
        if self.device.type != "meta":
            return self.device
        kind = first.device_mesh.device_type if isinstance(first, DTensor) else "cpu"
        return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def _require_divided(self, num: int) -> None:
        """Raises InputError for a dim that ``num`` tp ranks do not divide."""
        for one in self.specs.values():
            if one.tp_dim is not None and one.shape[one.tp_dim] % num:
                size = one.shape[one.tp_dim]
                raise InputError(
                    f"{self.label}: tp {num} shards dim {one.tp_dim} of '{one.name}' {one.shape}, and does not divide {size}. Take "
                    f"{multiples_near(size, num * self.unit_of(one.name))}, or other tp ranks.{self.advice_on_sizes(size)}"
                )

    def unit_of(self, name: str) -> int:
        """The elements of the dim of a parameter that tp shards, of which each rank has a multiple."""
        del name
        return 1

    def advice_on_sizes(self, size: int) -> str:
        """What else helps where tp does not divide a size; empty, or a sentence after a space."""
        del size
        return ""

    def _make_state(self) -> None:
        """Make what a module keeps beside its parameters."""

    def _reset_state(self, device: torch.device) -> None:
        """Give that its initial values, in the memory of ``device`` if it has none."""

    def require_shards(self, x: torch.Tensor, peers: Peers) -> None:
        """Raises InputError where sequence parallelism cannot shard dim 0 of an activation."""
        if self.sequence_parallel and len(x) % peers.size:
            raise InputError(
                f"{self.label}: dim 0 of its input is {len(x)}, and tp {peers.size} does not divide it, as sequence_parallel "
                f"needs. Pad it to a multiple of {peers.size}."
            )

    def _require_equal(self, mesh: DeviceMesh) -> None:
        """All ranks of a mesh have the same recipe and shapes."""
        mine = {
            "recipe": recipe_text(self.recipe) if self.recipe else "none",
            "sequence_parallel": str(self.sequence_parallel),
            "shapes": ", ".join(f"{one.name} {one.shape}" for one in self.specs.values()),
        }
        require_equal(mesh, mine, self.label)
