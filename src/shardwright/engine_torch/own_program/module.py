"""Layouts for a module that is not ours: an ``nn.Module`` in, the same module laid out over the ranks of a mesh.

| axes of a weight | what becomes of it |
|---|---|
| they cut it in use (``tensor``, ``expert``) | a DTensor, cut along them; each rank keeps its part of the value it has |
| they cut other weights in use, and all ranks along them have the same tokens | whole along them on the same DTensor |
| they only store it | ``fully_shard`` cuts dim 0, and gathers it unit by unit |
| it is a replica along them, with other tokens on each rank | its gradient is summed over them |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.modules.conv import _ConvNd

from shardwright.core.boxes.boxes import shard_box
from shardwright.core.boxes.placements import misnamed_dims
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.plan.fsdp_groups import WeightOfLayer, weights_of
from shardwright.core.plan.gate import require_trained
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.mesh import Peers, Ranks
from shardwright.engine_torch.io.private import joined
from shardwright.engine_torch.io.private import sum_gradients as sum_over_ranks
from shardwright.engine_torch.lowering.parameters import cutting_placements
from shardwright.engine_torch.own_program.units import Axes, IsUnit, Unit, Way, entries_of_lists, units_of
from shardwright.engine_torch.own_program.values import require_same_values
from shardwright.engine_torch.training.processes import device_of


def shapes_of(module: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each parameter of a module, by its name; a shared one once, by the first.

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
    """Lay a module out over the ranks of the process group, in place; each rank calls this alike. The mesh of the plan.

    ``plan``: of a table of the module's shapes, with ``engine="torch"``. Values of weights and buffers are those that each
    rank has, which must be the same on all; on ``meta`` they stay without. Buffers stay whole on each rank, and what a rank
    makes of its own afterwards is its own.

    ``units``: whether a module, by its name and itself, is gathered by itself; None: the entries of the outermost
    ``nn.ModuleList``s. What is left is gathered with the whole. Every rank must call the same units in the same order.
    They are gathered again for the backward pass unless the request's ``remat`` is ``none``.

    ``sum_gradients``: a gradient is the sum over the ranks that have tokens of their own, for a loss that each rank divides
    by the global count. Without, it is their average, as ``fully_shard`` makes it: for a loss that is the mean over a
    rank's own tokens, as many on each. Set ``requires_grad`` before: what has none has no gradient summed.

    Weights travel in the request's ``dtype`` and are multiplied in it; gradients are summed in their own.

    What moves between activations is the module's. Along axes that cut weights in use its weights are DTensors, over those
    axes of the mesh, and so must be what meets them: ``DTensor.from_local(tokens, mesh["tensor"])``. What a module with
    weights of its own makes in parts (an embedding, a down-projection) is summed as it comes out.

    Raises FindingsError for a plan with errors, and InputError for a plan of another engine, module or number of ranks, for
    weights that cannot be gathered in one unit, for values that are not the same on all ranks (on all of them alike), and for a
    convolution whose weight is cut in use. The module is then as it was.

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
    _require_whole_kernels(module, weights, plan)
    ways = {key: _way(one, plan) for key, one in weights.items()}
    gathered = {parameters[key]: way for key, way in ways.items() if way.gathered}
    found = units_of(module, gathered, units or entries_of_lists(module))

    device = device or device_of(dist.get_rank())
    require_same_values(module, device)
    wanted = [(axis,) for axis in plan.mesh.names]
    wanted += [axes for way in ways.values() for axes in (way.gathered, way.replicas)]
    ranks = Ranks(plan.mesh, wanted, device)
    divisor = 1 if sum_gradients else plan.mesh.size(plan.loss_axes)
    spread = _spread(weights.values(), plan)
    placed = {one: _placed(one, weights[key], spread[key], ranks) for key, one in parameters.items()}
    _replace(module, placed, device)
    _sum_outputs(module)
    for key, way in ways.items():
        if not way.gathered:
            _reduce(placed[parameters[key]], way.replicas, ranks, divisor)
    for unit in found:
        _shard(unit, {placed[one] for one in unit.weights}, plan, ranks, divisor)
    return ranks.device_mesh


def _require_plan(plan: Plan) -> None:
    if plan.request.engine != "torch":
        raise InputError(
            f"the plan is for '{plan.request.engine}', where weights rest on other dims. Make it of a Request with "
            f"engine='torch'."
        )
    require_trained(plan)
    for row in plan.weights:
        assert row.at_rest is not None
        if row.stack is not None:
            raise InputError(
                f"weight '{row.name}' has all layers in one, along dim 0, which `fully_shard` would cut. Give each layer "
                f"a parameter of its own, as the entries of an nn.ModuleList have."
            )
        # SW104 and SW107 are errors wherever this could be.
        assert not misnamed_dims(row.at_rest, plan.mesh, row.shape), (row.name, str(row.at_rest))


def _checked(module: nn.Module, plan: Plan) -> dict[str, nn.Parameter]:
    """The module's parameters by name, which are those of the plan."""
    parameters = dict(module.named_parameters())
    rows = {row.name: row for row in plan.weights}
    for name, one in parameters.items():
        if name not in rows:
            raise InputError(f"the plan has no weight '{name}'. {did_you_mean(name, rows)}")
        row = rows[name]
        if isinstance(one, DTensor):
            raise InputError(f"weight '{name}' is a DTensor already: the module has been laid out before.")
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
                f"the plan computes in {computed}, and '{one.key}' rests in {one.dtype}: a module multiplies with what it has. "
                f"Give the Request dtype='{one.dtype}'."
            )
        if one.dtype != computed and not one.gathered:
            raise InputError(
                f"the plan computes in {computed}, and '{one.key}' rests in {one.dtype} and is never gathered, which is where "
                f"it would be cast. Give the Request dtype='{one.dtype}', and compute under torch.autocast."
            )
    return parameters


def _require_whole_kernels(module: nn.Module, weights: Mapping[str, WeightOfLayer], plan: Plan) -> None:
    """DTensor convolves with whole kernels alone: of a cut one, 2.13 hands torch channels that do not match."""
    for name, owner in module.named_modules():
        if not isinstance(owner, _ConvNd):
            continue
        for key, _ in owner.named_parameters(recurse=False):
            one = weights.get(f"{name}.{key}" if name else key)
            if one is not None and one.in_use.axes:
                dim = next(dim for dim in one.in_use.dims if dim.axes)
                raise InputError(
                    f"'{one.key}' is a convolution's, and {' and '.join(dim.axes)} cuts '{dim.logical_axis}' of it in use, which "
                    f"DTensor cannot convolve with. Leave it whole by a rule of the layout: "
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


def _way(one: WeightOfLayer, plan: Plan) -> Way:
    # Along axes where all have the same tokens, DTensor sums.
    replicas = tuple(axis for axis in one.all_reduced if axis in plan.loss_axes)
    return Way(gathered=one.gathered, replicas=replicas, alike=one.replicated_gradient)


def _spread(weights: Iterable[WeightOfLayer], plan: Plan) -> dict[str, Axes]:
    """The axes of each weight's DTensor, mesh order: those that cut it in use, and, so that everything that meets on a rank
    is a DTensor, those that cut others, unless it is gathered over them or is a replica with other tokens."""
    weights = tuple(weights)
    cutting = plan.mesh.larger_than_one(
        axis for axis in plan.mesh.names if any(axis in one.in_use.axes for one in weights)
    )
    return {
        one.key: tuple(
            axis
            for axis in cutting
            if axis in one.in_use.axes or (axis not in one.gathered and axis not in plan.loss_axes)
        )
        for one in weights
    }


def _placed(parameter: nn.Parameter, one: WeightOfLayer, axes: Axes, ranks: Ranks) -> nn.Parameter:
    """The parameter as it is in use: the rank's part of its value, on ``axes``."""
    value = parameter.detach()
    if not axes:
        whole = value if one.gathered or value.is_meta else value.to(ranks.device)
        same = whole is value and value.is_contiguous()
        return parameter if same else nn.Parameter(whole.contiguous(), parameter.requires_grad)
    box = shard_box(one.in_use, ranks.mesh, one.shape, ranks.rank, "nested")
    assert box is not None, (one.key, str(one.in_use))
    part = value[box.slices]
    # A copy, so that the whole is not kept alive by its part.
    part = part.contiguous() if part.is_meta else part.to(ranks.device, copy=True).contiguous()
    placed = DTensor.from_local(
        part,
        ranks.device_mesh[axes],
        cutting_placements(one.in_use, axes),
        run_check=False,
        shape=torch.Size(one.shape),
        stride=tuple(prod(one.shape[dim + 1 :]) for dim in range(len(one.shape))),
    )
    return nn.Parameter(placed, parameter.requires_grad)


def _replace(module: nn.Module, placed: Mapping[nn.Parameter, nn.Parameter], device: torch.device) -> None:
    """Put parameters in the place of others, wherever they are shared, and buffers on the device."""
    for owner in list(module.modules()):
        for name, one in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if placed[one] is not one:
                setattr(owner, name, placed[one])
        for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if not buffer.is_meta and buffer.device != device:
                setattr(owner, name, buffer.to(device))


def _sum_outputs(module: nn.Module) -> None:
    """What a module makes of its own cut weights is summed once, as it comes out. Left in parts, PyTorch sums it at each use,
    and cannot use what an embedding has looked up a second time (2.13: an AssertionError without a word)."""
    for owner in module.modules():
        if any(isinstance(one, DTensor) for one in owner.parameters(recurse=False)):
            owner.register_forward_hook(_whole_sums)


def _whole_sums(_module: nn.Module, _inputs: object, output: object) -> object:
    if not isinstance(output, DTensor) or not any(isinstance(one, Partial) for one in output.placements):
        return None
    return output.redistribute(
        placements=[Replicate() if isinstance(one, Partial) else one for one in output.placements]
    )


def _shard(unit: Unit, own: set[nn.Parameter], plan: Plan, ranks: Ranks, divisor: int) -> None:
    mesh = ranks.submesh(unit.way.gathered)
    if unit.way.replicas:
        mesh = joined([ranks.submesh(unit.way.replicas), mesh])
    rests, computed = plan.request.weights_dtype, plan.request.dtype
    sharded = fully_shard(
        unit.module,
        mesh=mesh,
        reshard_after_forward=bool(unit.name) and plan.request.remat != "none",
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch_dtype(computed) if computed != rests else None, reduce_dtype=torch_dtype(rests)
        ),
        # Those that rest whole: `fully_shard` would take in all that no unit inside has.
        ignored_params={one for one in unit.module.parameters() if one not in own},
    )
    assert isinstance(sharded, FSDPModule)
    sum_over_ranks(sharded)
    # Of experts, a rank has the sum over all whose tokens they saw: the ranks of the unit are not those to divide by.
    # And what ranks make alike is summed over them too.
    sharded.set_gradient_divide_factor(float(divisor * plan.mesh.size(unit.way.alike)))


def _reduce(parameter: nn.Parameter, replicas: Axes, ranks: Ranks, divisor: int) -> None:
    """What ``fully_shard`` does of a gradient, for a weight that it does not gather: as each backward pass makes it."""
    peers = ranks.peers(replicas)
    if not parameter.requires_grad:
        return

    def reduced(cotangent: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor) or not isinstance(cotangent, DTensor):
            return _summed(cotangent, peers, divisor)
        cotangent = cotangent.redistribute(placements=parameter.placements)
        local = _summed(cotangent.to_local(), peers, divisor)
        return DTensor.from_local(
            local,
            cotangent.device_mesh,
            cotangent.placements,
            run_check=False,
            shape=cotangent.shape,
            stride=cotangent.stride(),
        )

    if peers.group is not None or divisor > 1 or isinstance(parameter, DTensor):
        parameter.register_hook(reduced)


def _summed(cotangent: torch.Tensor, peers: Peers, divisor: int) -> torch.Tensor:
    # A copy: the same memory may be another weight's gradient too.
    total = cotangent.clone()
    if peers.group is not None:
        dist.all_reduce(total, group=peers.group)
    return total.div_(divisor)


def _dtype(one: torch.Tensor) -> str:
    return str(one.dtype).removeprefix("torch.")
