"""Every name of PyTorch that is private, or differs between the supported versions, each with the reason for its use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

# 2.13 has new names for collectives of one tensor in and one out, and deprecates the older names, the only ones in 2.11.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's ``shard`` along dim 0 of ``out``, in the order of the group."""
    _gather(out, shard, group=group)


def reduce_scatter(out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """This rank's shard, along dim 0, of the sum of ``full`` over the group."""
    _scatter(out, full, group=group)


def flattened(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """The axes, in mesh order, as one axis with its own process group: PyTorch has no public function for some axes of a mesh.

    For all axes it is the world, whose group exists already.
    """
    return mesh[tuple(axes)]._flatten("_".join(axes))


def named(mesh: DeviceMesh, axes: Sequence[str], name: str) -> None:
    """Give axes of a root mesh, in mesh order, a name of their own as one axis; without axes, it has this rank alone.

    PyTorch has no public function for that, and makes an axis of one rank only beside another one.
    """
    # The joined name of other axes may be the same.
    mesh._flatten_mapping.pop(name, None)
    if axes:
        mesh[tuple(axes)]._flatten(name)
    else:
        first, *_ = mesh.mesh_dim_names or ("",)
        beside = mesh[first]._unflatten(0, (mesh[first].size(), 1), (f"{first}_beside_{name}", name))
        mesh._flatten_mapping[name] = beside[name]


def joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Meshes of one dim each as one mesh of several dims. Slicing the root mesh is no alternative: it does not accept flattened axes
    (2.13 warns, reversed order raises)."""
    return DeviceMesh._concatenate(list(meshes))


def changes_of(tensor: torch.Tensor) -> int:
    """How many changes in place PyTorch has counted of a tensor and its views: all but those through ``.data`` and outside of it.

    Autograd counts them to detect values that a backward pass still needs; a tensor has no public name for the count.
    """
    return tensor._version


@contextmanager
def imagined_ranks(count: int, rank: int = 0) -> Iterator[None]:
    """This process as ``rank`` of ``count`` ranks that do not exist: collectives have shapes and groups, and send nothing.

    PyTorch has no public function for such a group.
    """
    # Imported here: it is part of PyTorch's tests, and training does not need it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def without_values() -> AbstractContextManager[object]:
    """A context in which tensors have shapes and no values: PyTorch has no public one for an entire program."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def global_shapes(inside: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have ``inside`` around all that DTensor computes for the sake of shapes: before it runs an operation on shards for the first time in
    a process, it runs it on tensors of the global shape, without values. No rank holds them, and PyTorch has no public name for it."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    plain = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(self: ShardingPropagator, op_schema: Any) -> Any:
        with inside():
            return plain(self, op_schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = plain


def group_of(arguments: Iterable[object]) -> dist.ProcessGroup:
    """The process group among an operation's arguments, which PyTorch passes as a ScriptObject."""
    boxed = next(one for one in arguments if isinstance(one, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed)


def no_view(x: torch.Tensor) -> torch.Tensor:
    """The same elements as a tensor that PyTorch takes for no view: `fully_shard` warns of a module that returns one. The public way
    is a copy."""
    return torch.ops.aten._unsafe_view(x, x.shape)


def mapped_tensors(change: Callable[[torch.Tensor], object], values: Any) -> Any:
    """Values with each tensor in them changed, also those in the outputs of other libraries, as far as PyTorch knows their classes; it has
    no public function for that."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda value: change(value) if isinstance(value, torch.Tensor) else value, values)


def storage_key(storage: torch.UntypedStorage) -> int:
    """A key that is the same for all views of one storage: the Python objects for it do not last."""
    return storage._cdata


def storage_mark(storage: torch.UntypedStorage) -> object:
    """While it is there, no other storage has the same key. The public weak references are to the Python object, which does not last."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)


def sharded_parameters(module: FSDPModule) -> list[torch.nn.Parameter]:
    """The parameters of a module's own group as they are at rest, in the order of the module. Between its forward and its backward pass the
    module itself has gathered ones."""
    group = module._get_fsdp_state()._fsdp_param_group
    assert group is not None
    return [one.sharded_param for one in group.fsdp_params]


def sum_gradients(module: FSDPModule) -> None:
    """Make ``fully_shard`` sum gradients over ranks, not average them: the step divides once, by the tokens of all ranks.

    Without the second call PyTorch multiplies in the collective (``PREMUL_SUM``), which gloo does not support.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def mesh_of(module: FSDPModule) -> DeviceMesh:
    """The mesh over which ``fully_shard`` shards a module's weights."""
    return _groups(module)[0].mesh_info.mesh


class GatheredParameter:
    """A parameter that ``fully_shard`` gathers, as it knows it: PyTorch has no public way from a module to it."""

    def __init__(self, state: Any, parameter: Any) -> None:
        self._state, self._parameter = state, parameter

    @property
    def sharded(self) -> torch.nn.Parameter:
        return self._parameter.sharded_param

    def is_made_of(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter that a module has is this one, sharded or gathered, with the memory that the next gather reads."""
        names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        if not any(getattr(self._parameter, name, None) is parameter for name in names):
            return False
        # Until its first pass ``fully_shard`` takes over new memory.
        started, gathered = self._state._is_root is not None, self._parameter._sharded_param_data
        shard = self.sharded.to_local() if isinstance(self.sharded, DTensor) else self.sharded
        return not started or shard.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()


def gathered_parameters(root: torch.nn.Module) -> dict[tuple[int, str], GatheredParameter]:
    """What ``fully_shard`` gathers in a module, by the id of the module that has it and its name there."""
    found = {}
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for parameter in (held for group in _groups(module) for held in group.fsdp_params):
                info, gathered = parameter._module_info, GatheredParameter(_state(module), parameter)
                owners = zip(
                    (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True
                )
                found |= {(id(owner), name): gathered for owner, name in owners}
    return found


def backward_pass() -> int | None:
    """The number of the backward pass that this thread is in, which autograd passes to no hook."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that this thread is in has made all gradients, before ``backward`` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # pyright: ignore[reportAttributeAccessIssue]


def tensor_hooks(parameter: torch.Tensor) -> Sequence[Callable[..., object]]:
    """The hooks of ``register_hook``."""
    return tuple((parameter._backward_hooks or {}).values())


def reattach_hooks(parameter: torch.Tensor) -> None:
    """Have autograd call a tensor's hooks again: ``torch.utils.swap_tensors``, by which ``to`` and ``to_empty`` change a DTensor, leaves them
    with the Python object and takes what autograd reads away."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(parameter, name, None)) is not None:
            setattr(parameter, name, hooks)


def elements_of(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a parameter, the very tensor: ``to_local`` has another one of the same memory."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def replace_elements(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Have a parameter consist of other elements on this rank, of another type too: the same object, so that modules and optimizers that share
    it have them. PyTorch has a public way for what is no DTensor; ``fully_shard`` takes over what it finds before its first pass."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = local
        return
    kept = dict(parameter.__dict__)
    other = torch.nn.Parameter(local, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)
    for name, value in kept.items():
        if name not in parameter.__dict__:
            setattr(parameter, name, value)


def accumulate_hooks(parameter: torch.Tensor) -> Sequence[Callable[..., object]]:
    """The hooks that see a gradient when it has been added to ``.grad``."""
    return tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def forget_forward_order(modules: Iterable[FSDPModule]) -> None:
    """Have the next backward pass gather ahead in the order of the next forward pass alone. With several microbatches between their passes,
    ``fully_shard`` takes the order of all: after the first layer it would gather the last one again, in vain."""
    for module in modules:
        # Before the first forward pass there is none.
        getattr(_state(module)._comm_ctx, "post_forward_order", []).clear()
        for group in _groups(module):
            group._post_forward_indices.clear()


def end_backward(modules: Iterable[FSDPModule]) -> None:
    """What ``fully_shard`` does at the end of a backward pass, for modules of which the outermost is the first: gradients are cast and
    summed, or reduced, as the modules are set. Its hooks do not run where ``torch.autograd.grad`` makes half of the pass."""
    outermost = next(iter(modules), None)
    if outermost is not None:
        _state(outermost)._root_post_backward_final_callback()


def _state(module: FSDPModule) -> Any:
    return fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]


def _groups(module: FSDPModule) -> Sequence[Any]:
    """The parameter groups of a module: several in 2.13, one at most in 2.11."""
    state = _state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [one for one in (state._fsdp_param_group,) if one is not None]


def is_traced() -> bool:
    """Whether ``torch.compile`` traces this, which cannot read a context. Before 2.13 it would lose the gradients of functions whose result
    is another tensor of theirs under a new name: what reads a context is left untraced there, and runs as it is."""
    return torch.compiler.is_compiling() and COMPILES_WHOLE


def is_tracing() -> bool:
    """Whether ``torch.compile`` looks at the tensors of a program that it traces: it is no part of the program that asks."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def untraceable(func: Any) -> Exception:
    """The exception upon which ``torch.compile`` leaves an operation untraced, and runs it on real tensors."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    return UnsupportedOperatorException(func)


COMPILES_WHOLE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether this version compiles a module with a recipe without leaving any of it untraced."""


def many_shapes() -> AbstractContextManager[object]:
    """Let ``torch.compile`` make a kernel for more shapes, dtypes and recipes than its default of 8, and go on without one where it fails.
    Not until 2.13 is the first a public option, and the second is none."""
    from torch import _dynamo

    return _dynamo.config.patch(
        recompile_limit=256,
        accumulated_recompile_limit=4096,
        specialize_int=True,
        specialize_float=True,
        suppress_errors=True,
    )


@contextmanager
def programs_called(
    found: Callable[[Callable[[list[Any]], Any], Sequence[Any], Sequence[Any]], object],
) -> Iterator[None]:
    """Inside of it ``found`` is given every program of PyTorch's compiler that this thread calls, with its inputs and outputs. What calls it in
    ``torch.compile`` asks first whether it was made for such arguments, and there is no public way around that."""
    from torch._inductor.output_code import CompiledFxGraph

    plain, thread = CompiledFxGraph.__call__, get_ident()

    def call(self: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        # It empties the list.
        given = list(inputs)
        outputs = plain(self, inputs)
        if get_ident() == thread and self.current_callable is not None:
            found(self.current_callable, given, outputs)
        return outputs

    CompiledFxGraph.__call__ = call
    try:
        yield
    finally:
        CompiledFxGraph.__call__ = plain


def autocast_of(device: str) -> torch.dtype | None:
    """The dtype to which operations on a device cast now; None where they do not."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_modes() -> AbstractContextManager[object]:
    """A context in which no dispatch mode sees operations; the public way out of a mode is to leave it."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def halves() -> tuple[Any, Any]:
    """PyTorch's two halves of a backward pass: that for inputs, and that for weights, which begins with what the first one left."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    return stage_backward_input, stage_backward_weight
