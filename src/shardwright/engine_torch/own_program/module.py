"""Layouts for a user's own module: an ``nn.Module``, sharded in place over the ranks of a mesh.

| axes | what happens to the weight |
|---|---|
| they shard it in use (``tensor``, ``expert``) | a DTensor, sharded over them; each rank keeps its shard of the value it has |
| they shard other weights in use, and all their ranks have the same tokens | replicated over them, on the same DTensor |
| they only store it | ``fully_shard`` shards dim 0, and gathers it unit by unit |
| it is replicated over them, with different tokens on each rank | its gradient is summed over them |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.conv import _ConvNd

from shardwright.core.boxes.boxes import shard_box
from shardwright.core.boxes.placements import as_fully_shard_names, misnamed_dims
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.plan.fsdp_groups import WeightOfLayer, weights_of
from shardwright.core.plan.gate import require_trained
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.io.private import joined
from shardwright.engine_torch.io.private import sum_gradients as sum_over_ranks
from shardwright.engine_torch.lowering.named_axes import name_axes
from shardwright.engine_torch.lowering.parameters import placements_of
from shardwright.engine_torch.own_program.operands.entries import convert_activations
from shardwright.engine_torch.own_program.operands.fused import require_equal_heads
from shardwright.engine_torch.own_program.steps.gradients import Reductions
from shardwright.engine_torch.own_program.steps.planned import PlannedWeight, kind_of
from shardwright.engine_torch.own_program.steps.replicas import ReplicaComparison
from shardwright.engine_torch.own_program.units import Axes, FsdpAxes, IsUnit, Unit, entries_of_lists, units_of
from shardwright.engine_torch.own_program.values import require_same_values
from shardwright.engine_torch.training.processes import device_of


def shapes_of(module: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and dtype of each parameter of a module, by its name; a shared parameter once, by its first name.

    >>> shapes_of(nn.Sequential(nn.Linear(8, 2, bias=False)))
    {'0.weight': ((2, 8), 'float32')}
    """
    return {name: (tuple(one.shape), _dtype(one)) for name, one in module.named_parameters()}


def parallelize(
    module: nn.Module,
    plan: Plan,
    *,
    units: IsUnit | None = None,
    sum_gradients: bool = False,
    device: torch.device | None = None,
) -> DeviceMesh:
    """Shard a module over the ranks of the process group, in place, and return the mesh of the plan. Every rank calls this.

    ``plan``: made from a table of the module's shapes, with ``engine="torch"``. Weights and buffers keep the values that they
    have, which must be the same on all ranks; on ``meta`` they stay without values. Buffers are replicated, and nothing keeps
    them equal afterwards.

    ``units``: whether a module, given its name and itself, is a unit, whose weights ``fully_shard`` gathers in one collective;
    None: the entries of the outermost ``nn.ModuleList``s. The root module is the unit of all other weights. Every rank must call
    the same units in the same order. They are gathered again for the backward pass unless the request's ``remat`` is ``none``.

    ``sum_gradients``: a gradient is the sum over the ranks that have tokens of their own, for a loss that each rank divides
    by the global count. Otherwise it is their average, as in ``fully_shard``: for a loss that is the mean over a
    rank's own tokens, with the same number on each rank. All ranks make each backward pass, and freeze the same weights.

    Weights may be loaded, moved, frozen and, where ``fully_shard`` does not gather them, replaced and tied afterwards: each forward pass looks
    at what is there, and raises InputError for what would not be reduced.

    Weights are gathered and multiplied in the request's ``dtype``; gradients are summed in the dtype of the weights.

    Over axes that shard weights in use, and whose ranks have the same tokens, modules convert their inputs and outputs
    (``operands/conversions.py``): plain tensors go in and come out. Over other axes the module moves its activations itself.

    The mesh has the axes ``dp``, ``batch``, ``loss`` and ``dp_shard_cp`` besides its own (``core/named_axes.py``). Warns where the plan has
    an axis of such a name with other ranks.

    Raises FindingsError for a plan with errors, and InputError for a plan of another engine, module or number of ranks, for
    weights that cannot be gathered in one unit, for values that are not the same on all ranks (then on every rank), for a
    convolution whose weight is sharded in use, and for an ``nn.MultiheadAttention`` whose heads the axes do not divide. The module is
    then unchanged.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> from shardwright import Request, load_layout, make_plan, table_of
    >>> module = nn.Sequential(nn.Linear(8, 2, bias=False))
    >>> table = table_of(shapes_of(module), {"*.weight": "mlp: mlp embed"})
    >>> plan = make_plan(Request(layout=load_layout("fsdp"), table=table, devices=1, batch=1, length=1, engine="torch"))
    >>> parallelize(module, plan).mesh_dim_names
    ('data', 'fsdp')
    >>> dist.destroy_process_group()
    """
    _require_plan(plan)
    weights = {one.key: one for one in weights_of(plan)}
    parameters = _checked(module, plan)
    _require_ranks(plan)
    _require_unsharded_kernels(module, weights, plan)
    require_equal_heads(module, weights, plan.mesh)
    axes_of = {key: _fsdp_axes(one, plan) for key, one in weights.items()}
    gathered = {parameters[key]: axes for key, axes in axes_of.items() if axes.gathered}
    found = units_of(module, gathered, units or entries_of_lists(module))

    device = device or device_of(dist.get_rank())
    require_same_values(module, device)
    wanted = [(axis,) for axis in plan.mesh.names]
    wanted += [group for axes in axes_of.values() for group in (axes.gathered, axes.replicas)]
    ranks = Ranks(plan.mesh, wanted, device)
    divisor = 1 if sum_gradients else plan.mesh.size(plan.loss_axes)
    dtensor_axes = _dtensor_axes(weights.values(), plan)
    placed = {one: _placed(one, weights[key], dtensor_axes[key], ranks) for key, one in parameters.items()}
    _replace(module, placed, device)
    dims = {placed[one]: weights[key].storage_dim for key, one in parameters.items()}
    for unit in found:
        own = {placed[one] for one in unit.weights}
        _shard(unit, {one: dim for one, dim in dims.items() if one in own}, plan, ranks, divisor)
    planned = {
        key: PlannedWeight(
            name=key,
            shape=one.shape,
            gathered=bool(axes_of[key].gathered),
            in_use=kind_of(placed[parameters[key]]),
            replicas=axes_of[key].replicas,
        )
        for key, one in weights.items()
    }
    peers = {weight.replicas: ranks.peers(weight.replicas) for weight in planned.values() if not weight.gathered}
    sharded_by = {key: plan.mesh.larger_than_one(one.at_rest.axes) for key, one in weights.items()}
    replicated = {key: axes for key, axes in sharded_by.items() if plan.mesh.size(axes) < plan.mesh.num_devices}
    comparison = ReplicaComparison(plan.mesh, replicated, device) if replicated else None
    Reductions(planned, peers, divisor, device, comparison).attach(module)
    # After all others that look at weights before a forward pass.
    convert_activations(module, weights, plan, ranks.device_mesh)
    name_axes(ranks.device_mesh, plan)
    return ranks.device_mesh


def _require_plan(plan: Plan) -> None:
    if plan.request.engine != "torch":
        raise InputError(
            f"the plan is for '{plan.request.engine}', which shards other dims of the weights at rest. Make it from a Request "
            f"with engine='torch'."
        )
    require_trained(plan)
    for row in plan.weights:
        assert row.at_rest is not None
        if row.stack is not None:
            raise InputError(
                f"weight '{row.name}' has all layers stacked along dim 0, which `fully_shard` would shard. Give each layer "
                f"its own parameter, as in the entries of an nn.ModuleList."
            )
        # Every plan with such a dim has the error SW104 or SW107.
        names = as_fully_shard_names(row.at_rest, row.in_use, plan.mesh)
        assert not misnamed_dims(*names, row.shape), (row.name, str(row.at_rest))


def _checked(module: nn.Module, plan: Plan) -> dict[str, nn.Parameter]:
    """The module's parameters by name. Raises InputError where they are not those of the plan."""
    parameters = dict(module.named_parameters())
    rows = {row.name: row for row in plan.weights}
    for name, one in parameters.items():
        if name not in rows:
            raise InputError(f"the plan has no weight '{name}'. {did_you_mean(name, rows)}")
        row = rows[name]
        if isinstance(one, DTensor):
            raise InputError(f"weight '{name}' is a DTensor already: the module has been sharded before.")
        if tuple(one.shape) != row.shape:
            raise InputError(f"weight '{name}' has shape {tuple(one.shape)}; it was planned as {row.shape}.")
        if _dtype(one) != row.dtype:
            raise InputError(
                f"weight '{name}' is {_dtype(one)}; it was planned as {row.dtype}. Give the Request "
                f"weights_dtype='{_dtype(one)}', or cast the module."
            )
    for name in rows:
        if name not in parameters:
            raise InputError(f"the module has no weight '{name}', which was planned. {did_you_mean(name, parameters)}")
    computed = plan.request.dtype
    for one in weights_of(plan):
        if one.gather_dtype != computed:
            raise InputError(
                f"the plan computes in {computed}, and '{one.key}' is stored in {one.dtype}: a module multiplies in that dtype. "
                f"Give the Request dtype='{one.dtype}'."
            )
        if one.dtype != computed and not one.gathered:
            raise InputError(
                f"the plan computes in {computed}, and '{one.key}' is stored in {one.dtype} and never gathered, and only "
                f"gathered weights are cast. Give the Request dtype='{one.dtype}', and compute under torch.autocast."
            )
    return parameters


def _require_unsharded_kernels(module: nn.Module, weights: Mapping[str, WeightOfLayer], plan: Plan) -> None:
    """Refuse a sharded kernel: DTensor convolves with unsharded kernels only. With a sharded one, 2.13 passes torch channels that do
    not match."""
    for name, owner in module.named_modules():
        if not isinstance(owner, _ConvNd):
            continue
        for key, _ in owner.named_parameters(recurse=False):
            one = weights.get(f"{name}.{key}" if name else key)
            if one is not None and one.in_use.axes:
                dim = next(dim for dim in one.in_use.dims if dim.axes)
                raise InputError(
                    f"'{one.key}' is the kernel of a convolution, and {' and '.join(dim.axes)} shards its dim "
                    f"'{dim.logical_axis}' in use. DTensor cannot convolve with it. Leave it unsharded by a rule of the layout: "
                    f"rules: {{{plan.by_name[one.key].component}: {{{dim.logical_axis}: []}}}}."
                )


def _require_ranks(plan: Plan) -> None:
    need = plan.mesh.num_devices
    start = f"`torchrun --nproc-per-node {need}` starts {need} on one host."
    if not dist.is_initialized():
        raise InputError(
            f"there is no process group, and the plan is for {need} ranks ({plan.mesh}). Call "
            f"torch.distributed.init_process_group() first; {start}"
        )
    if dist.get_world_size() != need:
        raise InputError(
            f"the process group has {dist.get_world_size()} ranks; the plan is for {need} ({plan.mesh}). {start}"
        )


def _fsdp_axes(one: WeightOfLayer, plan: Plan) -> FsdpAxes:
    # DTensor sums over axes whose ranks have the same tokens.
    replicas = tuple(axis for axis in one.all_reduced if axis in plan.loss_axes)
    return FsdpAxes(gathered=one.gathered, replicas=replicas, replicated_gradient=one.replicated_gradient)


def _dtensor_axes(weights: Iterable[WeightOfLayer], plan: Plan) -> dict[str, Axes]:
    """The axes of each weight's DTensor, in mesh order: those that shard it in use, and those that shard other weights, so that all
    operands are DTensors. An axis of the second kind is left out if the weight is gathered over it, or if its ranks have different
    tokens."""
    weights = tuple(weights)
    sharding = plan.mesh.larger_than_one(
        axis for axis in plan.mesh.names if any(axis in one.in_use.axes for one in weights)
    )
    return {
        one.key: tuple(
            axis
            for axis in sharding
            if axis in one.in_use.axes or (axis not in one.gathered and axis not in plan.loss_axes)
        )
        for one in weights
    }


def _placed(parameter: nn.Parameter, one: WeightOfLayer, axes: Axes, ranks: Ranks) -> nn.Parameter:
    """The parameter in use: a DTensor over ``axes`` with the rank's shard of its value."""
    value = parameter.detach()
    if not axes:
        full = value if one.gathered or value.is_meta else value.to(ranks.device)
        same = full is value and value.is_contiguous()
        return parameter if same else nn.Parameter(full.contiguous(), parameter.requires_grad)
    box = shard_box(one.in_use, ranks.mesh, one.shape, ranks.rank, in_turn=one.in_use.axes)
    assert box is not None, (one.key, str(one.in_use))
    shard = value[box.slices]
    # A copy, so that the shard does not keep the full value alive.
    shard = shard.contiguous() if shard.is_meta else shard.to(ranks.device, copy=True).contiguous()
    placed = DTensor.from_local(
        shard,
        ranks.device_mesh[axes],
        placements_of(one.in_use, axes),
        run_check=False,
        shape=torch.Size(one.shape),
        stride=tuple(prod(one.shape[dim + 1 :]) for dim in range(len(one.shape))),
    )
    return nn.Parameter(placed, parameter.requires_grad)


def _replace(module: nn.Module, placed: Mapping[nn.Parameter, nn.Parameter], device: torch.device) -> None:
    """Replace the parameters of a module, in every module that shares them, and put its buffers on the device."""
    for owner in list(module.modules()):
        for name, one in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if placed[one] is not one:
                setattr(owner, name, placed[one])
        for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if not buffer.is_meta and buffer.device != device:
                setattr(owner, name, buffer.to(device))


def _shard(unit: Unit, own: Mapping[nn.Parameter, int], plan: Plan, ranks: Ranks, divisor: int) -> None:
    """``own``: the parameters of the unit, each with its storage dim."""
    mesh = ranks.submesh(unit.axes.gathered)
    if unit.axes.replicas:
        mesh = joined([ranks.submesh(unit.axes.replicas), mesh])
    stored, computed = plan.request.weights_dtype, plan.request.dtype
    sharded = fully_shard(
        unit.module,
        mesh=mesh,
        reshard_after_forward=bool(unit.name)
        and plan.request.remat != "none"
        and not plan.request.layout.keeps_gathered(unit.axes.gathered),
        shard_placement_fn=lambda parameter: Shard(own[parameter]),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch_dtype(computed) if computed != stored else None, reduce_dtype=torch_dtype(stored)
        ),
        # Those replicated at rest: `fully_shard` would also shard all parameters that are in no unit inside.
        ignored_params={one for one in unit.module.parameters() if one not in own},
    )
    assert isinstance(sharded, FSDPModule)
    sum_over_ranks(sharded)
    # The gradient of an expert on a rank includes tokens of other ranks, so the size of the unit's mesh is not the divisor.
    # Equal gradients of several ranks are summed too, so they are divided by their number.
    sharded.set_gradient_divide_factor(float(divisor * plan.mesh.size(unit.axes.replicated_gradient)))


def _dtype(one: torch.Tensor) -> str:
    return str(one.dtype).removeprefix("torch.")
