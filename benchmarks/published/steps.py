"""The published steps: read from steps/, with those that are left out of every fit.

The rule of the draw: steps of one source and one model stand together, by the SHA-256 of their names; through all of them in this
order, every second one is left out. So half of each source and model is, whatever the planner makes of it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).parent
LEFT_OUT = FOLDER / "left_out.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A step that was measured. ``program``: ``eager`` PyTorch, ``compiled`` by XLA or torch.compile, or ``fused`` by hand.

    ``plan``: the arguments of the nearest command of ours; ``differs``: what it cannot say. Either ``seconds`` or ``tokens_per_s`` of
    one device is published. Where ``memory_gib`` is too: ``loss``, how its program computes the loss, and ``unread``, the activations that it keeps though
    nothing reads them (``memory.py``). ``memory``: options for what its program holds, where it is no program of the engine whose time is
    planned: after those of ``plan``, in a file for all steps or in a step.
    """

    name: str
    source: str
    at: str
    program: str
    plan: str
    seconds: float | None
    tokens_per_s: float | None
    memory_gib: float | None
    memory: str
    loss: str | None
    unread: tuple[str, ...]
    differs: tuple[str, ...]
    left_out: bool

    @property
    def arguments(self) -> list[str]:
        return self.plan.split()

    @property
    def model(self) -> str:
        """The model with its overrides, as the draw tells models apart."""
        words = self.arguments
        overrides = [word for word in words[1:] if "=" in word and word.split("=")[0] in DIMENSIONS]
        return " ".join([words[0], *overrides])


DIMENSIONS = {"num_layers", "embed", "num_heads", "num_kv_heads", "mlp", "vocab", "capacity_factor"}


@cache
def published() -> tuple[Published, ...]:
    """Every step, in the order of the files."""
    return steps_of(FOLDER / "steps")


def steps_of(folder: Path) -> tuple[Published, ...]:
    """The steps of a folder's files, in their order."""
    left_out = set(LEFT_OUT.read_text(encoding="utf-8").split()) if LEFT_OUT.exists() else set[str]()
    return tuple(
        Published(
            name=row["name"],
            source=table["source"],
            at=row["at"],
            program=row["program"],
            plan=row["plan"],
            seconds=row.get("seconds"),
            tokens_per_s=row.get("tokens_per_s"),
            memory_gib=row.get("memory_gib"),
            memory=row.get("memory", table.get("memory", "")),
            loss=row.get("loss"),
            unread=tuple(row.get("unread", ())),
            differs=tuple(row.get("differs", ())),
            left_out=row["name"] in left_out,
        )
        for file in sorted(folder.glob("*.toml"))
        for table in [tomllib.loads(file.read_text(encoding="utf-8"))]
        for row in table["step"]
    )


def drawn(steps: Iterable[Published]) -> list[str]:
    """The names of a list that the rule leaves out."""
    ordered = sorted(steps, key=lambda step: (step.source, step.model, sha256(step.name.encode()).hexdigest()))
    return sorted(step.name for step in ordered[1::2])


def to_fit() -> Iterator[Published]:
    """The steps of all lists that the rule does not leave out."""
    for steps in (
        published(),
        steps_of(FOLDER / "later"),
        steps_of(FOLDER / "later" / "wider"),
        steps_of(FOLDER / "fresh"),
    ):
        left_out = set(drawn(steps))
        yield from (step for step in steps if step.name not in left_out)


if __name__ == "__main__":
    LEFT_OUT.write_text("\n".join(drawn(published())) + "\n", encoding="utf-8")
