"""The page of differences, docs/sameness.md, from the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.engine_jax.made_rows import LENGTH
from tests.engine_jax.steps import OPTIONS, STEPS, Case, Difference
from tests.sameness.cases import COVERING, DEEPSEEK3, MICROBATCHES, MIXTRAL, MODELS, UNTRAINED, WHOLE
from tests.sameness.measure import Measured

PAGE = Path(__file__).parents[2] / "docs" / "sameness.md"

HEAD = f"""# How much layouts differ

Every layout trains the same model: only the order of summation differs. This page reports how much the results differ.
`make test-all` trains each of the cases below on simulated CPU devices, compares it with one device, and writes this
page again; `make test` trains the first steps of those marked *.

Each case: float32, {STEPS} steps of {MICROBATCHES} microbatches, AdamW, rows of {LENGTH} tokens with very unequal
numbers of valid tokens (in every fourth step half of the rows have none), gradients clipped to a norm of {OPTIONS.clip}
in every step. One device takes the same rows in one microbatch, from the same seed. With this seed no token is so near
to a tie between two experts that the last bit of a sum decides; from such a token on, two runs could not be compared.

- *loss*: the largest relative difference of a step's loss. Allowed: 1e-5 without experts, 1e-4 with them.
- *gradient*: the largest |g - g1| / |g1| over steps 1 and 2, all weights and all layers, before clipping, and its weight
  (*of*); g1 is the gradient on one device. Allowed: 1e-4.
- *margin*: the difference between the score of the last expert that a token is assigned to and that of the next expert,
  the smallest over all steps, layers and tokens, on one device. *flipped*: the number of token-expert assignments that
  differ, of all.

Head-tail: the tokens of a row are ordered so that each device has one chunk of its head and one of its tail.
"""


COMPARED = "Layouts compared with each other"


def page(rows: Mapping[Case, str], pairs: str) -> str:
    """The entire page. ``rows``: of all cases. ``pairs``: the section of layouts compared with each other."""
    tables = (line for model in MODELS for line in _table(model, rows))
    return "\n".join([HEAD, *tables, f"## {COMPARED}\n", pairs, "", *_left()])


def rows_on(text: str) -> dict[Case, str]:
    """The rows of a page, of the cases that it has."""
    found = {}
    for model in MODELS:
        lines = (section_of(text, model) or "").splitlines()
        for case in (case for case in WHOLE if case.model == model):
            found.update((case, line) for line in lines if line.startswith(cells(case)))
    return found


def row(result: Measured) -> str:
    """A case's row."""
    difference, routing = result.difference, result.routing
    line = f"{cells(result.case)} {difference.loss:.1e} | {difference.gradient:.1e} | {difference.weight} |"
    return line + (f" {routing.margin:.1e} | {routing.flipped} of {routing.assignments} |" if routing else "")


def with_section(text: str, title: str, body: str) -> str:
    """The page with a section under a title, which replaces an older one with this title."""
    head = f"## {title}\n"
    before, had, rest = text.partition(f"\n{head}")
    if not had:
        return f"{text.rstrip()}\n\n{head}\n{body.rstrip()}\n"
    after = rest.partition("\n## ")
    following = f"\n## {after[2]}" if after[1] else ""
    return f"{before}\n{head}\n{body.rstrip()}\n{following}"


def section_of(text: str, title: str) -> str | None:
    """The page's section under a title, or None."""
    _, had, rest = text.partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0].strip() if had else None


def cells(case: Case) -> str:
    """The first cells of a case's row."""
    mark = " *" if case in COVERING else ""
    chunks = f"{case.loss_chunks} chunks of the loss" if case.loss_chunks > 1 else ""
    words = case.move, "head-tail" * case.balanced, case.settings, chunks, policy_words(case)
    more = ", ".join(word for word in words if word)
    return f"| {case.layout}{mark} | {case.mesh} | {case.rows} | {more} |"


def policy_words(case: Case) -> str:
    """What its layers keep, where they keep more than their input."""
    return "" if case.remat == "full" else f"`{case.remat}`"


def _table(model: str, of_cases: Mapping[Case, str]) -> Iterator[str]:
    rows = [of_cases[case] for case in WHOLE if case.model == model]
    experts = model in (MIXTRAL, DEEPSEEK3)
    loss, gradient = (max(float(row.split(" | ")[column]) for row in rows) for column in (4, 5))
    yield f"## {model}\n"
    yield (f"{len(rows)} cases; the largest differences are {loss:.1e} of a loss and {gradient:.1e} of a gradient.\n")
    yield "| layout | mesh | rows | more | loss | gradient | of |" + (" margin | flipped |" if experts else "")
    yield "|---|---|---|---|---|---|---|" + ("---|---|" if experts else "")
    yield from rows
    yield ""


def pairs_table(pairs: Sequence[tuple[Case, Case, Difference]]) -> Iterator[str]:
    """The lines of the section of layouts compared with each other."""
    yield "| model | layout | compared with | loss | gradient | of |"
    yield "|---|---|---|---|---|---|"
    for ours, theirs, difference in pairs:
        yield (
            f"| {ours.model} | {ours.layout} {ours.mesh} | {theirs.layout} {theirs.mesh} "
            f"| {difference.loss:.1e} | {difference.gradient:.1e} | {difference.weight} |"
        )


def _left() -> Iterator[str]:
    yield "## Presets that are not compared\n"
    yield from (f"- `{name}`: {why}." for name, why in UNTRAINED.items())
    yield ""
