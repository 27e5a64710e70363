"""Gradients of a user's own module that ``fully_shard`` does not reduce: summed over replicas, once in each backward pass.

A reduction belongs to the name of a weight, not to a Parameter object. Before each forward pass under grad mode, the parameters that the
module has now get the hooks that they lack (``planned.py``). A hook keeps what this pass adds to a gradient. At the end of the backward
pass all ranks say which weights they used, and then sum all gradients in buckets, in the order of the plan's names: ranks that use weights
in another order, or not at all, sum gradients of the same weights. A rank that has not used a weight adds zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.io.private import (
    accumulate_hooks,
    backward_pass,
    call_at_end_of_backward,
    gathered_parameters,
    reattach_hooks,
    tensor_hooks,
)
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.own_program.steps.buffers import unsaved_on_meta, warn_of_not_finite
from shardwright.engine_torch.own_program.steps.planned import PlannedWeight, WeightEntry, current_weights, entries_of
from shardwright.engine_torch.own_program.steps.replicas import ReplicaComparison

BUCKET_BYTES = 32 * 2**20
"""Gradients that are summed in one collective: enough that its latency is small, and no second copy of all gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassGradient:
    """What one backward pass adds to the gradient of a weight. ``previous``: of the passes before. ``accumulated``: it goes to ``.grad``;
    ``torch.autograd.grad`` returns it otherwise."""

    parameter: nn.Parameter
    gradient: torch.Tensor
    previous: torch.Tensor | None
    accumulated: bool = False

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return local_of(self.gradient)

    def store(self) -> None:
        if self.accumulated and self.previous is not None:
            self.parameter.grad = self.previous.add_(self.gradient)
        else:
            self.parameter.grad = self.gradient if self.accumulated else self.previous


BackwardPass = dict[str, _PassGradient]
"""What a backward pass adds to the gradient of each weight, by its name."""


class Reductions:
    """The reductions of one module. ``planned``: its weights by name. ``peers``: the replicas by their axes. ``divisor``: of every
    gradient. ``comparison``: of the replicas of all weights. A deep copy of the module has reductions of its own."""

    def __init__(
        self,
        planned: Mapping[str, PlannedWeight],
        peers: Mapping[tuple[str, ...], Peers],
        divisor: int,
        device: torch.device,
        comparison: ReplicaComparison | None = None,
    ) -> None:
        self.planned, self.peers, self.divisor, self.device = planned, peers, divisor, device
        self._comparison = comparison
        self._unsaved: frozenset[str] = frozenset()
        self._root: Callable[[], nn.Module | None] = lambda: None
        self._hooks: dict[str, _WeightHook] = {}
        self._passes: dict[int, BackwardPass] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Reductions:
        copied = Reductions(
            self.planned, self.peers, self.divisor, self.device, self._comparison and self._comparison.again()
        )
        memo[id(self)] = copied
        # None in a copy of a part of the module.
        root = memo.get(id(self._root()))
        if isinstance(root, nn.Module):
            copied._root = weakref.ref(root)
        return copied

    def attach(self, root: nn.Module) -> None:
        """Have every forward pass of the module, and of a part of it, look at its weights first."""
        self._root = weakref.ref(root)
        self.refresh()
        self._unsaved = unsaved_on_meta(root)
        root.register_forward_pre_hook(self.before_forward, prepend=True)
        root.register_forward_hook(self.after_forward)
        for owner in root.modules():
            leaves = tuple(
                leaf
                for leaf, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
                if self.has_hook(parameter)
            )
            if leaves and owner is not root:
                owner.register_forward_pre_hook(_LookAtLeaves(self, leaves))

    def before_forward(self, _root: nn.Module, _inputs: object) -> None:
        if torch.is_grad_enabled():
            _call_untraced(Reductions.refresh, self)

    def after_forward(self, _root: nn.Module, _inputs: object, output: object) -> None:
        """A rank takes part in the end of a pass that has a gradient of the output, also where it uses none of these weights."""
        by_all = self._comparison is not None or any(peers.group is not None for peers in self.peers.values())
        if torch.is_grad_enabled() and by_all:
            _call_untraced(Reductions._begin_at, self, output)

    def refresh(self) -> None:
        """Hook the parameters that the module has now. Raises InputError for what is not in its plan (``current_weights``)."""
        root = self._root()
        if root is None:
            raise InputError(
                "this module is a copy of a part of a module that `parallelize` has sharded, and its gradients would not be reduced. "
                "Copy the entire module, or freeze this part."
            )
        entries = current_weights(root, self.planned)
        if self._unsaved:
            warn_of_not_finite(root, self._unsaved)
            self._unsaved = frozenset()
        if backward_pass() is None:
            # Of passes that have raised an error.
            self._passes.clear()
        self._hooks = {}
        for name, entry in entries.items():
            hook = self._hook_of(entry.parameter) or _WeightHook(self)
            self._hooks[name] = hook.of(entry)
            if entry.parameter.requires_grad:
                hook.register()

    def has_hook(self, parameter: nn.Parameter) -> bool:
        return self._hook_of(parameter) is not None

    def _hook_of(self, parameter: torch.Tensor) -> _WeightHook | None:
        owners = (getattr(hook, "__self__", None) for hook in tensor_hooks(parameter))
        return next((owner for owner in owners if isinstance(owner, _WeightHook) and owner.reductions is self), None)

    def _begin_at(self, output: object) -> None:
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._enter)

    def _enter(self, _gradient: torch.Tensor) -> None:
        self.begin()

    def begin(self) -> BackwardPass:
        """The backward pass that this thread is in."""
        number = backward_pass()
        assert number is not None
        if number not in self._passes:
            self._passes[number] = {}
            call_at_end_of_backward(lambda: self._end(self._passes.pop(number)))
        return self._passes[number]

    @torch.no_grad()
    def _end(self, backward: BackwardPass) -> None:
        if self._comparison is not None and self._comparison.is_over(self._shards_at_rest()):
            self._comparison = None
        for axes, peers in self.peers.items():
            if peers.group is not None:
                names = [
                    name for name, weight in self.planned.items() if weight.replicas == axes and not weight.gathered
                ]
                used = self._agree(backward, names, peers)
                for bucket in _buckets(used):
                    _sum(bucket, peers.group)
        for kept in backward.values():
            kept.local.div_(self.divisor)
            kept.store()

    def _shards_at_rest(self) -> dict[str, torch.Tensor]:
        root, shards = self._root(), {}
        assert root is not None
        gathered = gathered_parameters(root)
        for entry in entries_of(root):
            state = gathered.get((id(entry.owner), entry.leaf))
            shards.setdefault(entry.name, local_of(entry.parameter if state is None else state.sharded))
        return shards

    def _agree(self, backward: BackwardPass, names: Sequence[str], peers: Peers) -> list[torch.Tensor]:
        """The gradients of the weights that any of the ranks used, by name, with zeros where this one did not."""
        rows = []
        for name in names:
            hook, kept = self._hooks.get(name), backward.get(name)
            parameter = None if hook is None else hook.parameter()
            trained = kept is not None or (parameter is not None and parameter.requires_grad)
            rows.append((trained, kept is not None, kept is not None and kept.accumulated))
        counts = torch.tensor(rows, dtype=torch.int32, device=self.device)
        dist.all_reduce(counts, group=peers.group)
        found = []
        for name, (trained, used, accumulated) in zip(names, counts.tolist(), strict=True):
            if used and (
                0 < trained < peers.size or accumulated not in (0, used) or (not accumulated and used < peers.size)
            ):
                raise InputError(
                    f"weight '{name}' has a gradient on {used} of {peers.size} ranks, is trained on {trained}, and `.grad` gets it on "
                    f"{accumulated}: its gradient cannot be summed. Freeze the same weights on every rank, and use them there."
                )
            if used and name not in backward:
                parameter = self._hooks[name].parameter()
                assert parameter is not None, name
                zeros = _like(parameter, torch.zeros_like(local_of(parameter)))
                backward[name] = _PassGradient(
                    parameter=parameter,
                    gradient=zeros,
                    previous=parameter.grad,
                    accumulated=True,
                )
            if used:
                found.append(backward[name].local)
        return found


class _WeightHook:
    """What happens to the gradient of one weight. It has no reference to the parameter: ``torch.utils.swap_tensors``, by which ``to_empty``
    changes a DTensor, takes none."""

    def __init__(self, reductions: Reductions) -> None:
        self.reductions = reductions
        self._name, self._leaf = "", ""
        self._owner: Callable[[], nn.Module | None] = lambda: None

    def of(self, entry: WeightEntry) -> _WeightHook:
        self._name, self._owner, self._leaf = entry.name, weakref.ref(entry.owner), entry.leaf
        return self

    def parameter(self) -> nn.Parameter | None:
        owner = self._owner()
        return None if owner is None else owner._parameters.get(self._leaf)

    def register(self) -> None:
        """Raises InputError for a hook that would see a gradient before it is reduced."""
        parameter = self.parameter()
        assert parameter is not None, self._name
        if self.reductions.has_hook(parameter):
            reattach_hooks(parameter)
        else:
            parameter.register_hook(self.keep)
            parameter.register_post_accumulate_grad_hook(self.accumulate)
        if len(accumulate_hooks(parameter)) > 1:
            raise InputError(
                f"weight '{self._name}' has a hook of `register_post_accumulate_grad_hook`, which would see the gradient of this rank's "
                f"tokens alone: gradients are reduced at the end of a backward pass. Do it after `backward()`."
            )

    @torch.no_grad()
    def keep(self, gradient: torch.Tensor) -> torch.Tensor:
        """Keep what a pass adds to the gradient."""
        name, parameter = self._name, self.parameter()
        if parameter is None or not any(getattr(hook, "__self__", None) is self for hook in tensor_hooks(parameter)):
            raise InputError(
                f"weight '{name}' was replaced between a forward pass and its backward pass, so its gradient is that of another tensor. "
                f"Replace weights after the backward pass."
            )
        if gradient.requires_grad:
            raise InputError(
                f"a gradient of the gradient of weight '{name}' is wanted (create_graph=True), and the sum over ranks has none. Take it of the "
                f"inputs only."
            )
        if gradient.layout != torch.strided:
            raise InputError(
                f"the gradient of weight '{name}' is sparse, and is summed over ranks as a dense tensor. Make the nn.Embedding with sparse=False."
            )
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        # A copy: another weight's gradient may share the memory.
        kept = _like(parameter, local_of(gradient).clone())
        self.reductions.begin()[name] = _PassGradient(parameter=parameter, gradient=kept, previous=parameter.grad)
        parameter.grad = None
        return kept

    def accumulate(self, weight: torch.Tensor) -> None:
        backward = self.reductions.begin()
        assert weight.grad is not None, self._name
        # A copy, or what another hook made of it.
        backward[self._name] = replace(backward[self._name], gradient=weight.grad, accumulated=True)


class _LookAtLeaves:
    """Before a module is called: whether its parameters have hooks. A program may call parts of a module alone."""

    def __init__(self, reductions: Reductions, leaves: tuple[str, ...]) -> None:
        self._reductions, self._leaves = reductions, leaves

    def __call__(self, owner: nn.Module, _inputs: object) -> None:
        # A compiled program calls its root module first, which is not compiled up to here.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for leaf in self._leaves:
            parameter = owner._parameters.get(leaf)
            if parameter is None or (parameter.requires_grad and not self._reductions.has_hook(parameter)):
                self._reductions.refresh()
                return
            reattach_hooks(parameter)


def _call_untraced(function: Callable[..., None], *arguments: object) -> None:
    """Call a function that ``torch.compile`` does not trace: what it looks at may be another tensor in each pass."""
    if torch.compiler.is_compiling():
        function = torch.compiler.disable(function)  # pyright: ignore[reportAssignmentType]
    function(*arguments)


def _like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """A rank's shard as a tensor sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The gradients in turn, those of one dtype together, up to ``BUCKET_BYTES``."""
    waiting: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        bucket = waiting.setdefault(gradient.dtype, [])
        bucket.append(gradient)
        if sum(member.nbytes for member in bucket) >= BUCKET_BYTES:
            yield waiting.pop(gradient.dtype)
    yield from waiting.values()


def _sum(bucket: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        dist.all_reduce(bucket[0], group=group)
        return
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors_in(member)
    elif isinstance(value, tuple | list):
        for member in value:
            yield from _tensors_in(member)
