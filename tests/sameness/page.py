"""The page of differences, docs/sameness.md, from what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.engine_jax.made_rows import LENGTH
from tests.engine_jax.steps import OPTIONS, STEPS, Case, Difference
from tests.sameness.cases import COVERING, MICROBATCHES, MODELS, UNTRAINED
from tests.sameness.measure import Measured

PAGE = Path(__file__).parents[2] / "docs" / "sameness.md"

HEAD = f"""# How far layouts are apart

Every layout trains the same model: only the order in which numbers are added differs. This page is how much that is.
`make test-all` trains each of the cases below on simulated CPU devices, holds it against one device, and writes this
page anew; `make test` takes the first steps of those marked *.

Each case: float32, {STEPS} steps of {MICROBATCHES} microbatches, AdamW, rows of {LENGTH} tokens of which very unequal
numbers are valid (in every fourth step half of the rows have none), gradients clipped to a norm of {OPTIONS.clip} in
every step. One device takes the same rows in one microbatch, from the same seed: one under which no token comes so near
to a tie between two experts that the last bit of a sum decides, since from there on two runs are two runs.

- *loss*: the largest relative difference of a step's loss. Allowed: 1e-5 without experts, 1e-4 with them.
- *gradient*: the largest |g - g1| / |g1| over steps 1 and 2, all weights and all layers, before clipping, and where it
  was; g1 is that of one device. Allowed: 1e-4.
- *margin*: by how much the last expert that a token chose was above the first that it did not, the smallest over all
  steps, layers and tokens, on one device. *flipped*: how many choices of experts were others, of how many.

Head-tail: rows lie in the order that gives each device pieces of both of their ends.
"""


def page(results: Sequence[Measured], pairs: Sequence[tuple[Case, Case, Difference]]) -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for model in MODELS for line in _table(model, results)), *_pairs(pairs), *_left()])


def with_section(text: str, title: str, body: str) -> str:
    """The page with a section of its own under a title, in place of the one that it had."""
    head = f"## {title}\n"
    before, had, rest = text.partition(f"\n{head}")
    if not had:
        return f"{text.rstrip()}\n\n{head}\n{body.rstrip()}\n"
    after = rest.partition("\n## ")
    following = f"\n## {after[2]}" if after[1] else ""
    return f"{before}\n{head}\n{body.rstrip()}\n{following}"


def section_of(text: str, title: str) -> str | None:
    """What the page has under a title, if it has it."""
    _, had, rest = text.partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0].strip() if had else None


def cells(case: Case) -> str:
    """The first cells of a case's row."""
    mark = " *" if case in COVERING else ""
    more = ", ".join(word for word in (case.move, "head-tail" * case.balanced, case.settings) if word)
    return f"| {case.layout}{mark} | {case.mesh} | {case.rows} | {more} |"


def _table(model: str, results: Sequence[Measured]) -> Iterator[str]:
    rows = [result for result in results if result.case.model == model]
    experts = rows[0].routing is not None
    yield f"## {model}\n"
    yield (
        f"{len(rows)} cases; the largest differences are {max(row.difference.loss for row in rows):.1e} of a loss and "
        f"{max(row.difference.gradient for row in rows):.1e} of a gradient.\n"
    )
    yield "| layout | mesh | rows | more | loss | gradient | of |" + (" margin | flipped |" if experts else "")
    yield "|---|---|---|---|---|---|---|" + ("---|---|" if experts else "")
    for result in rows:
        difference, routing = result.difference, result.routing
        line = f"{cells(result.case)} {difference.loss:.1e} | {difference.gradient:.1e} | {difference.weight} |"
        yield line + (f" {routing.margin:.1e} | {routing.flipped} of {routing.choices} |" if routing else "")
    yield ""


def _pairs(pairs: Sequence[tuple[Case, Case, Difference]]) -> Iterator[str]:
    yield "## Layouts beside each other\n"
    yield "| model | layout | beside | loss | gradient | of |"
    yield "|---|---|---|---|---|---|"
    for ours, theirs, difference in pairs:
        yield (
            f"| {ours.model} | {ours.layout} {ours.mesh} | {theirs.layout} {theirs.mesh} "
            f"| {difference.loss:.1e} | {difference.gradient:.1e} | {difference.weight} |"
        )
    yield ""


def _left() -> Iterator[str]:
    yield "## Presets that are not here\n"
    yield from (f"- `{name}`: {why}." for name, why in UNTRAINED.items())
    yield ""
