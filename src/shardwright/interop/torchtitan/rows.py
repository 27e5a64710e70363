"""The rows of a step. A configuration counts the rows of one data-parallel rank; a step has those of all ranks and passes.

| unit | a pass of one rank | a step of all ranks |
|---|---|---|
| tokens | num_tokens_per_microbatch_per_dp_rank, times num_pp_microbatches with a pipeline | num_tokens_per_train_step, or one pass |
| rows, before July 2026 | local_batch_size | global_batch_size, or one pass |

A row has max_context_length tokens (seq_len in earlier versions).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count
from shardwright.interop.torchtitan.degrees import Degrees
from shardwright.interop.torchtitan.section import Section
from shardwright.interop.torchtitan.vocabulary import (
    CONTEXT,
    FIRST_ROWS,
    LENGTH,
    LOCAL_ROWS,
    MICROBATCH_ROWS,
    MICROBATCHES,
    STEP_ROWS,
    STEP_TOKENS,
    TOKENS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """``batch`` rows of ``length`` tokens in a step of ``passes`` passes; ``ranks`` data-parallel ranks read different rows."""

    batch: int
    length: int
    passes: int
    microbatches_of_pass: int
    ranks: int

    @property
    def microbatches(self) -> int:
        return self.passes * self.microbatches_of_pass

    def to_json(self) -> dict[str, int]:
        return {
            "batch": self.batch,
            "length": self.length,
            "passes": self.passes,
            "microbatches": self.microbatches_of_pass,
            "ranks": self.ranks,
        }


def in_its_words(finding: Finding, section: Section, rows: StepRows | None) -> Finding:
    """A finding of the core that asks for other rows or microbatches, with TorchTitan's options in place of ours."""
    asked = {name: int(size) for name, size in re.findall(r"--(batch|microbatches) (\d+)", finding.fix or "")}
    if rows is None or "microbatches" not in asked:
        return finding
    number = asked["microbatches"]
    of_rank = asked.get("batch", rows.batch) // rows.ranks
    each = of_rank // number
    if TOKENS in section.training:
        current = {TOKENS: section.training[TOKENS], MICROBATCHES: section.microbatches}
        needed = {TOKENS: each * rows.length, MICROBATCHES: number}
    else:
        name = FIRST_ROWS if FIRST_ROWS in section.training else LOCAL_ROWS
        current = {name: section.training.get(name), MICROBATCH_ROWS: max(1, section.rows_of_microbatch)}
        needed = {name: of_rank, MICROBATCH_ROWS: each}
    changes = [f"{name} = {size}" for name, size in needed.items() if size != current[name]]
    return replace(finding, fix=f"Set {' and '.join(changes)}.")


def rows_of(section: Section, degrees: Degrees) -> StepRows | Finding | None:
    """None where the file sets no step, or only running it gives one; a finding where TorchTitan ends with an error."""
    stated = section.training
    tokens = TOKENS in stated
    names = (
        (TOKENS, STEP_TOKENS, CONTEXT)
        if tokens
        else (FIRST_ROWS if FIRST_ROWS in stated else LOCAL_ROWS, STEP_ROWS, LENGTH)
    )
    given = [stated.get(name) for name in names]
    if not stated or None in given:
        return None
    per_rank, step, length = (value for value in given if value is not None)
    ranks = degrees.sizes["dp_replicate"] * degrees.sizes["dp_shard"]
    microbatches = section.microbatches if degrees.sizes["pp"] > 1 and tokens else 1
    of_pass = per_rank * microbatches * ranks
    if degrees.sizes["pp"] > 1 and not tokens:
        # Earlier versions split the rows of a rank into microbatches of this many rows.
        microbatches = max(1, per_rank // max(1, section.rows_of_microbatch))
    step = of_pass if step == -1 else step
    if step % of_pass:
        return _not_a_multiple(
            section, names, {"per_rank": per_rank, "microbatches": microbatches, "ranks": ranks, "step": step}
        )
    of_row = length if tokens else 1
    if step % (of_row * ranks * (step // of_pass) * microbatches):
        return None
    return StepRows(
        batch=step // of_row, length=length, passes=step // of_pass, microbatches_of_pass=microbatches, ranks=ranks
    )


def _not_a_multiple(section: Section, names: tuple[str, ...], sizes: Mapping[str, int]) -> Finding:
    per_rank, _, _ = names
    of_pass = sizes["per_rank"] * sizes["microbatches"] * sizes["ranks"]
    factors = [f"{sizes['per_rank']:,}"]
    if sizes["microbatches"] > 1:
        factors.append(f"{sizes['microbatches']} microbatches")
    factors.append(count(sizes["ranks"], "data-parallel rank"))
    nearest = max(1, sizes["step"] // of_pass) * of_pass
    return Finding(
        code="SW108",
        severity="error",
        where=f"'{names[1]}'",
        position=section.training_positions.get(names[1], section.training_positions.get(per_rank)),
        found=f"{sizes['step']:,} in a step, where a pass of all ranks has {' x '.join(factors)} = {of_pass:,}",
        needed=f"a multiple of {of_pass:,}",
        fix=f"Write '{names[1]} = {nearest}'.",
    )
