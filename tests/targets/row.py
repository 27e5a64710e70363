"""The results of a case in one row, and the file that stores the rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardwright.cli.running.compile import Compiled
from shardwright.core.installed import installed_version
from tests.targets.cases import Case

FILE = Path(__file__).parent / "compiled.json"
GB = 1e9
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case, by name. Bytes are those of a step on one device; errors are relative to the compiled program.

    ``compared_bytes``: of the larger side of each line of the comparison, the reference of ``explained_share``.
    ``temporaries``: the memory allocated for them. ``peak``: the most memory in use at one time, including arguments.
    ``versions``: of the packages that compiled it.
    """

    case: str
    predicted_bytes: int
    compiled_bytes: int
    compared_bytes: int
    matched: int
    explained: tuple[str, ...]
    explained_share: float
    unmatched: tuple[str, ...]
    bytes_error: float
    predicted_memory: int
    peak: int
    memory_error: float
    arguments: int
    temporaries: int
    seconds: float
    versions: tuple[str, ...]

    @property
    def target(self) -> str:
        """The kind of chip."""
        return self.case.split()[3].partition(":")[0]

    @property
    def text(self) -> str:
        unmatched = f"  UNMATCHED {'; '.join(self.unmatched)}" if self.unmatched else ""
        return (
            f"{self.predicted_bytes / GB:9.3f} {self.compiled_bytes / GB:9.3f} GB  memory {self.predicted_memory / GB:6.2f} "
            f"{self.peak / GB:6.2f} GB {self.memory_error:+.1%}  {self.seconds:5.0f} s  {self.case}{unmatched}"
        )


def row_of(case: Case, compiled: Compiled) -> Row:
    plan, program, agreement = compiled.plan, compiled.program, compiled.agreement
    return Row(
        case=case.name,
        predicted_bytes=sum(one.bytes_per_device * one.count_per_step for one in plan.collectives),
        compiled_bytes=sum(one.bytes_per_device * one.count_per_step for one in program.collectives),
        compared_bytes=sum(row.bytes for row in agreement.rows),
        matched=len(agreement.of_state("matched")),
        explained=tuple(sorted({name for row in agreement.of_state("explained") for name in row.explained_by})),
        explained_share=agreement.explained_share,
        unmatched=tuple(
            f"{row.component} {row.kind} {'/'.join(row.axes)} {row.predicted_bytes / GB:.3f} {row.compiled_bytes / GB:.3f}"
            for row in agreement.of_state("unmatched")
        ),
        bytes_error=agreement.bytes_error,
        predicted_memory=plan.memory.total_bytes_per_device,
        peak=program.memory.peak_bytes,
        memory_error=agreement.memory_error,
        arguments=program.memory.arguments_bytes,
        temporaries=program.memory.temporaries_bytes,
        seconds=program.compile_seconds,
        versions=tuple(f"{name} {number}" for name in COMPILERS if (number := installed_version(name))),
    )


def kept_rows() -> dict[str, Row]:
    """The stored rows, by the names of the cases; rows without a newer field are left out."""
    if not FILE.exists():
        return {}
    rows: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return {row["case"]: _read(row) for row in rows if row.keys() == {field.name for field in fields(Row)}}


def keep_rows(rows: Iterable[Row]) -> None:
    FILE.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def _read(row: dict[str, Any]) -> Row:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Row(**values)
