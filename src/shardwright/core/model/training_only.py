"""What a model's configuration says of its training alone, and neither engine computes: data of its table."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.findings.position import Position

AUXILIARY_LOSS = "the auxiliary loss that balances the experts: nothing does here"
LOSS_OF_EACH_SEQUENCE = "an auxiliary loss of each sequence"
PREDICTION_LAYERS = "layers for multi-token prediction, and their loss"
AS_PUBLISHED = "{value} in the published configuration"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOnly:
    """A ``key`` with a ``value`` that changes no output, and with which training here lacks a ``part``.

    ``position``: in the file that says it; None for a model by its name.
    """

    key: str
    value: str
    part: str
    position: Position | None = None

    def to_json(self) -> dict[str, str]:
        return {"key": self.key, "value": self.value, "part": self.part}


def published(part: str, **values: str) -> tuple[TrainingOnly, ...]:
    """Of a model by its name, for each key.

    >>> [row.value for row in published(AUXILIARY_LOSS, aux_loss_alpha="0.001")]
    ['0.001 in the published configuration']
    """
    return tuple(
        TrainingOnly(key=key, value=AS_PUBLISHED.format(value=value), part=part) for key, value in values.items()
    )
