"""The passes of a stage for one microbatch: forward, and backward as a whole or in halves.

A half of a backward pass computes the cotangent of the stage's input, for which the stage before waits; the other half, later, the
gradients of its weights. PyTorch divides a graph between the two. What the first half leaves must be kept for the second: so where
layers are computed again, it is done here, layer by layer in the first half, and not by ``checkpoint``, which would do it anew for every
weight in the second.

B rows, L tokens, M embed. All are sizes on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from shardwright.engine_torch.experts.experts import MoeCounts
from shardwright.engine_torch.io.private import end_backward, halves
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.lowering.updates import Updated
from shardwright.engine_torch.model.stage import Batch, Result, Segment, Stage

Counts = Mapping[str, Sequence[MoeCounts]]


class Pass(Protocol):
    """A microbatch between the forward pass of a stage and the end of its backward pass. ``output``: the residual stream for the next
    stage, or the loss."""

    @property
    def output(self) -> torch.Tensor: ...
    @property
    def is_loss(self) -> bool: ...
    @property
    def counts(self) -> Counts: ...

    def backward(self, cotangent: torch.Tensor | None) -> torch.Tensor | None:
        """The backward pass of the output's cotangent, None of a loss. Returns that of the stage's input, None of the first stage."""
        ...

    def input_gradient(self, cotangent: torch.Tensor | None) -> torch.Tensor | None:
        """The same without the gradients of weights."""
        ...

    def weight_gradient(self) -> None:
        """The gradients of weights, after ``input_gradient``."""
        ...


def forward(stage: Stage, batch: Batch, x_BLM: torch.Tensor | None) -> Pass:
    """The forward pass of a microbatch. ``x_BLM``: the stage's input, None of the first stage."""
    if not stage.gathering.split:
        return Whole(stage, batch, x_BLM)
    return (InHalves if stage.links.split else Later)(stage, batch, x_BLM)


class Whole:
    """A pass whose backward pass is not divided."""

    def __init__(self, stage: Stage, batch: Batch, x_BLM: torch.Tensor | None) -> None:
        self._stage = stage
        self._x_BLM = None if x_BLM is None else x_BLM.detach().requires_grad_()
        result = stage(batch, self._x_BLM)
        self.output, self.is_loss, self.counts = result.output, result.loss is not None, result.counts

    def backward(self, cotangent: torch.Tensor | None) -> torch.Tensor | None:
        with scattered(self._stage):
            self.output.backward(cotangent)
        return None if self._x_BLM is None else self._x_BLM.grad

    def input_gradient(self, cotangent: torch.Tensor | None) -> torch.Tensor | None:
        raise AssertionError(f"the backward pass of {cotangent} is not divided")

    def weight_gradient(self) -> None:
        raise AssertionError("its backward pass is not divided")


class Later(Whole):
    """A pass of the first stage under a divided backward pass. No one waits for its input's cotangent: all is in the second half, in which
    no operation is repeated."""

    _cotangent: torch.Tensor | None = None

    def input_gradient(self, cotangent: torch.Tensor | None) -> torch.Tensor | None:
        self._cotangent = cotangent
        return None

    def weight_gradient(self) -> None:
        cotangent, self._cotangent = self._cotangent, None
        self.backward(cotangent)


@contextmanager
def scattered(stage: Stage) -> Iterator[None]:
    """A backward pass in which the gradients of a layer are scattered as soon as all are made, if the layout says so."""
    groups = [one for one in stage.updated if one.in_microbatches]
    if not groups:
        yield
        return
    parameters = stage.at_rest()

    def scatter(one: Updated, key: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, key
        gradient, parameter.grad = local_of(parameter.grad), None
        one.scatter(key, gradient)

    handles = [
        parameters[key].register_post_accumulate_grad_hook(partial(scatter, one, key))
        for one in groups
        for key in one.keys
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Computed(NamedTuple):
    """A segment with a graph, from its input to its output."""

    segment: Segment
    x_BLM: torch.Tensor | None
    output: torch.Tensor


class _Left(NamedTuple):
    """What the first half leaves of a segment: PyTorch's groups of weights with the cotangents before them."""

    computed: _Computed
    groups: list[dict[str, Any]]


class InHalves:
    """A pass whose backward pass is in halves. Layers save what ``remat`` says, and the ends all, as in other passes."""

    def __init__(self, stage: Stage, batch: Batch, x_BLM: torch.Tensor | None) -> None:
        self._stage = stage
        again = stage.plan.request.remat != "none"
        self._kept: list[tuple[Segment, torch.Tensor | None] | _Computed] = []
        self._left: list[_Left] = []
        counts: dict[str, list[MoeCounts]] = {}
        last = None
        for segment in stage.segments(batch) if again else [stage.all_of_it(batch)]:
            if again and segment.is_layer:
                with torch.no_grad():
                    last = segment.run(x_BLM)
                self._kept.append((segment, x_BLM))
            else:
                computed, last = _computed(segment, x_BLM)
                self._kept.append(computed)
            for name, of_layers in last.counts.items():
                counts.setdefault(name, []).extend(of_layers)
            x_BLM = None if last.x_BLM is None else last.x_BLM.detach()
        assert last is not None
        self.output, self.is_loss, self.counts = last.output.detach(), last.loss is not None, counts

    def backward(self, cotangent: torch.Tensor | None) -> torch.Tensor | None:
        found = self.input_gradient(cotangent)
        self.weight_gradient()
        return found

    def input_gradient(self, cotangent: torch.Tensor | None) -> torch.Tensor | None:
        of_inputs, _ = halves()
        for one in self._backwards():
            assert one.x_BLM is not None
            outputs = [one.output]
            cotangents = None if cotangent is None else [cotangent]
            [found], groups = of_inputs(outputs, cotangents, [one.x_BLM], iter(one.segment.weights()))
            self._left.append(_Left(one, groups))
            cotangent = found
        return cotangent

    def weight_gradient(self) -> None:
        _, of_weights = halves()
        for computed, groups in self._left:
            of_weights(iter(computed.segment.weights()), groups)
        self._left.clear()
        end_backward(self._stage.sharded())

    def _backwards(self) -> Iterator[_Computed]:
        """The segments, the last first, each let go of by the next one."""
        while self._kept:
            kept = self._kept.pop()
            yield kept if isinstance(kept, _Computed) else _computed(*kept)[0]


def _computed(segment: Segment, x_BLM: torch.Tensor | None) -> tuple[_Computed, Result]:
    leaf_BLM = None if x_BLM is None else x_BLM.detach().requires_grad_()
    result = segment.run(leaf_BLM)
    return _Computed(segment, leaf_BLM, result.output), result
