"""What the ranks of a pipeline do, in order: the table of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "input_gradient",
    "weight_gradient",
    "send",
    "receive",
    "send_gradient",
    "receive_gradient",
    "reduce",
    "embed",
    "logits",
    "embed_gradient",
]

LETTERS: Mapping[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "input_gradient": "I",
    "weight_gradient": "W",
    "send": "SEND_F",
    "receive": "RECV_F",
    "send_gradient": "SEND_B",
    "receive_gradient": "RECV_B",
    "reduce": "REDUCE_GRAD",
    "embed": "EMBED",
    "logits": "LOGITS",
    "embed_gradient": "EMBED_B",
}
"""The names of the actions in schedule files of PyTorch and TorchTitan, but for those of ``TOGETHER``, which they have not."""

TOGETHER: tuple[Kind, ...] = ("embed", "logits", "embed_gradient")
"""What all ranks do together at an end that all stages share: the output of the embedding, for the first stage; the loss of the last
stage's output, and its cotangent; and the gradient of the embedding, from the cotangent of the first stage's input."""

COMPUTES: tuple[Kind, ...] = ("forward", "backward", "input_gradient", "weight_gradient")


class Action(NamedTuple):
    """One action of a rank: a stage, what is done, and for which microbatch; None for a reduction of gradients, once a step.

    ``backward`` is both halves at once: ``input_gradient``, the gradient of the stage's input, and ``weight_gradient``.
    ``send`` and ``receive``: the output of a stage, from the stage before in a receive. ``send_gradient`` and
    ``receive_gradient``: the gradient of a stage's input, from the stage behind in a receive.

    >>> print(Action(3, "forward", 0), Action(3, "receive_gradient", 1), Action(3, "reduce"))
    3F0 3RECV_B1 3REDUCE_GRAD
    """

    stage: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        number = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{LETTERS[self.kind]}{number}"


Placement = Literal["loop", "v"]
"""Where the chunks of a rank are. ``loop``: rank r of p has the stages r, r + p, r + 2p, ... ``v``: r and 2p - 1 - r."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """The actions of each rank of ``ranks``, with ``virtual`` stages each, for ``microbatches`` of a step.

    Equal to itself alone: to compare the actions of two takes as long as to run one on a clock.
    """

    ranks: int
    virtual: int
    microbatches: int
    placement: Placement
    actions: Sequence[Sequence[Action]]

    @property
    def num_stages(self) -> int:
        return self.ranks * self.virtual

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """
        >>> table = Table(ranks=4, virtual=2, microbatches=1, placement="v", actions=())
        >>> [table.stages_of(rank) for rank in range(4)]
        [(0, 7), (1, 6), (2, 5), (3, 4)]
        """
        return stages_of(rank, self.ranks, self.virtual, self.placement)

    def rank_of(self, stage: int) -> int:
        """
        >>> table = Table(ranks=4, virtual=2, microbatches=1, placement="loop", actions=())
        >>> [table.rank_of(stage) for stage in range(8)]
        [0, 1, 2, 3, 0, 1, 2, 3]
        """
        return rank_of(stage, self.ranks, self.placement)

    def crosses(self, stage: int, kind: Kind) -> bool:
        """Whether a stage has a ``send`` to the next stage, or a ``send_gradient`` to the one before: it is there, and on another rank.

        >>> table = Table(ranks=2, virtual=2, microbatches=1, placement="v", actions=())
        >>> [stage for stage in range(4) if table.crosses(stage, "send")]
        [0, 2]
        """
        to = stage + (1 if kind == "send" else -1)
        return 0 <= to < self.num_stages and self.rank_of(to) != self.rank_of(stage)

    def sends(self, rank: int, kind: Kind) -> int:
        """The transfers of a kind, ``send`` or ``send_gradient``, that a rank sends in a step."""
        return self.microbatches * sum(self.crosses(stage, kind) for stage in self.stages_of(rank))

    def computed(self) -> Iterator[tuple[int, Action]]:
        """Each rank with its computations, in order."""
        for rank, actions in enumerate(self.actions):
            for action in actions:
                if action.kind in COMPUTES:
                    yield rank, action

    def csv(self) -> str:
        """One line a rank, its actions separated by commas, as PyTorch and TorchTitan read a schedule."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.actions)


def stages_of(rank: int, ranks: int, virtual: int, placement: Placement) -> tuple[int, ...]:
    """The stages of a rank, its first chunk first."""
    if placement == "v":
        return rank, 2 * ranks - 1 - rank
    return tuple(rank + ranks * chunk for chunk in range(virtual))


def rank_of(stage: int, ranks: int, placement: Placement) -> int:
    """The rank that has a stage."""
    if placement == "v" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def ends(kind: Kind) -> tuple[Kind, ...]:
    """What is there once an action has ended: a backward pass is both halves."""
    return ("input_gradient", "weight_gradient") if kind == "backward" else (kind,)


def needs(action: Action, num_stages: int) -> tuple[tuple[Kind, int], ...]:
    """What a computation needs of its microbatch, each with its stage.

    >>> needs(Action(1, "forward", 0), 3), needs(Action(1, "backward", 0), 3), needs(Action(2, "weight_gradient", 0), 3)
    ((('forward', 0),), (('forward', 1), ('input_gradient', 2)), (('input_gradient', 2),))
    """
    stage, kind, _ = action
    if kind == "forward":
        return (("forward", stage - 1),) if stage else ()
    if kind == "weight_gradient":
        return (("input_gradient", stage),)
    behind: tuple[tuple[Kind, int], ...] = (("input_gradient", stage + 1),) if stage < num_stages - 1 else ()
    return (("forward", stage), *behind)
