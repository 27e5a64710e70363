"""What a module of a user's own program does before and after its forward pass, as hooks of PyTorch.

| a module with weights | takes | gives |
|---|---|---|
| all replicated (a norm, an attention that is not sharded) | plain tensors, which all ranks have | plain tensors |
| sharded along its outputs (``mlp embed``) | plain tensors | a DTensor, sharded along its last dim |
| sharded along its outputs, outside of the layers (``vocab embed``) | plain tensors | plain tensors, gathered |
| sharded along its inputs (``embed mlp``) | the DTensor of the above, or a rank's own shard of it | plain tensors, summed over the ranks |

A module that is given replicated DTensors gives DTensors, as they are, without sums over ranks.

Weights are what FSDP or a user has put into the module by then; in the forward pass they are replaced by the same values on the mesh of
these axes alone, and their gradients return to them complete.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.io.private import mapped_tensors, no_view
from shardwright.engine_torch.own_program.operands.mixing import (
    MixedOperands,
    is_replicated,
    replicated,
    tensors_in,
    without_sums,
)


class _Active(threading.local):
    """Whether this thread is in a forward pass that mixes operands."""

    mixed = False


_active = _Active()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A forward pass that goes on. ``mixed``: what it has entered, unless a module around it has. ``wrapped``: its inputs were replicated
    DTensors. ``weights``: those that were replaced."""

    mixed: MixedOperands | None
    wrapped: bool
    weights: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Converter:
    """The hooks of a module. ``mesh``: of the axes. ``owners``: the modules whose weights its forward pass reads, by their names in it.

    ``sharded``: whether any of these weights is. ``gathers``: whether its outputs leave it unsharded. ``whole``: whether the module is
    the user's entire one, and so gives what it was given.
    """

    mesh: DeviceMesh
    owners: tuple[str, ...]
    sharded: bool
    gathers: bool
    whole: bool
    passes: list[_Pass] = field(default_factory=list)

    def __deepcopy__(self, _memo: object) -> Converter:
        """For a copy of the module, on the same ranks."""
        return Converter(
            mesh=self.mesh, owners=self.owners, sharded=self.sharded, gathers=self.gathers, whole=self.whole
        )

    def install(self, module: nn.Module) -> None:
        """Its hooks run after FSDP has gathered the weights."""
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        # Before FSDP puts its shards back.
        module.register_forward_hook(self.after, prepend=True, always_call=True)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        inputs: Any = (args, kwargs)
        wrapped = [tensor for tensor in tensors_in(inputs) if isinstance(tensor, DTensor)]
        current = _Pass(mixed=None if _active.mixed else MixedOperands(), wrapped=any(map(is_replicated, wrapped)))
        self.passes.append(current)
        if current.mixed is not None:
            current.mixed.__enter__()
            _active.mixed = True
        if self.owners:
            local = not self.sharded and all(map(is_replicated, wrapped))
            self._replace_weights(module, current, local=local)
            inputs = mapped_tensors(
                (lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor)
                if local
                else (lambda tensor: self._input(module, tensor)),
                inputs,
            )
        return inputs

    def after(self, _module: nn.Module, _args: object, output: Any) -> Any:
        if not self.passes:
            # A hook before ours has raised.
            return output
        current = self.passes.pop()
        if current.mixed is not None:
            current.mixed.__exit__(None, None, None)
            _active.mixed = False
        for owner, name, weight in current.weights:
            owner._parameters[name] = weight
        return mapped_tensors(lambda tensor: self._output(tensor, current), output)

    def _replace_weights(self, module: nn.Module, current: _Pass, *, local: bool) -> None:
        for path in self.owners:
            owner = module.get_submodule(path)
            for name, weight in list(owner._parameters.items()):
                if isinstance(weight, DTensor):
                    current.weights.append((owner, name, weight))
                    owner._parameters[name] = self._weight(f"{path}.{name}" if path else name, weight, local=local)

    def _weight(self, name: str, weight: DTensor, *, local: bool) -> Any:
        names = weight.device_mesh.mesh_dim_names or ()
        by_axis = dict(zip(names, weight.placements, strict=True))
        axes = self.mesh.mesh_dim_names or ()
        for axis, placement in by_axis.items():
            if axis not in axes and not isinstance(placement, Replicate):
                raise InputError(
                    f"'{name}' is sharded over {axis} in a forward pass: FSDP gathers it when the module is called that it was "
                    f"given as a unit. Call that one, or choose others with `units`."
                )
        shard = weight.to_local()
        if local:
            return shard
        placements = [by_axis.get(axis, Replicate()) for axis in axes]
        return DTensor.from_local(
            shard, self.mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )

    def _input(self, module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor) and tensor.ndim:
            shards = [
                Shard(tensor.ndim - 1) if placement == Shard(1) else Replicate()
                for placement in module.weight.placements
            ]
            if tensor.shape[-1] != module.in_features and tensor.shape[-1] == module.weight.to_local().shape[1]:
                return DTensor.from_local(tensor, self.mesh, shards, run_check=False)
        return replicated(tensor, self.mesh)

    def _output(self, tensor: torch.Tensor, current: _Pass) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            wraps = current.wrapped and (self.whole or self.owners)
            return replicated(tensor, self.mesh) if wraps and tensor.is_floating_point() else tensor
        if not self.owners and not self.whole:
            return tensor
        tensor = without_sums(tensor)
        if current.wrapped:
            # Partial gradients are summed here: some outputs, as an embedding's, cannot take them.
            return DTensor.from_local(
                tensor.to_local(),
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        if self.gathers or self.whole:
            tensor = tensor.redistribute(placements=[Replicate()] * self.mesh.ndim)
        return no_view(tensor.to_local()) if is_replicated(tensor) else tensor
