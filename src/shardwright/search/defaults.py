"""A layout, a mesh and a step for a machine, where nobody says them: the fastest of a few that is valid and fits.

Each arrangement gets the fewest rows that all its devices share equally, at least the natural number, and as few microbatches as fit. What
fits with a reserve (``MEMORY_WARNING_SHARE``), or at all where nothing does, is ordered by the planned seconds of one token; of those without
an error that are as fast as the first the one that needs the least memory is the choice. Where nothing fits it is the valid one that
needs the least memory. What is typed stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from shardwright.core.checks import drafts
from shardwright.core.findings.codes import OF_THE_CHIP
from shardwright.core.findings.effect import Price
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.thresholds import MEMORY_WARNING_SHARE
from shardwright.core.layout.auto import LAYOUT, AutoChoice
from shardwright.core.mesh.divisors import divisors
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.resolution.mesh_sizes import mesh_option
from shardwright.core.resolution.request import Request
from shardwright.cost.advice import priced_request
from shardwright.cost.hardware.machine import Machine
from shardwright.search.space.arrangements import Arrangement

MOST_PRICED = 8
"""Arrangements that are priced, the likeliest first."""

EQUAL_SHARE = 0.01
"""Steps whose times differ by less are equally fast: the estimate's own range is many times as wide."""

LOSS_CHUNKS = 8
"""Chunks of the loss where its logits are what does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What was chosen. ``options``: to type for the same, by option. ``missing_bytes``: by how much a device misses; 0 where it fits."""

    request: Request
    options: Mapping[str, str]
    choice: AutoChoice
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    request: Request
    total_bytes: int
    price: Price | None = None

    @property
    def text(self) -> str:
        return " ".join(f"{option} {value}" for option, value in _options(self.request).items())


def choose_defaults(
    request: Request, machine: Machine, arranged: Sequence[Arrangement], typed: Collection[str]
) -> Defaults | None:
    """The choice for a request, whose own layout and mesh are one of what is tried. ``typed``: the options that stay, as ``--batch``. None where
    nothing that is tried has a plan without an error."""
    natural = () if request.devices is None else (request,)
    candidates = (*natural, *(arrangement.of(request) for arrangement in arranged))
    # The model's own layout may be one of the others.
    by_text = {tried.text: tried for candidate in candidates if (tried := _sized(candidate, typed))}
    sized = list(by_text.values())
    limit = None if request.chip is None else request.chip.usable_bytes
    safe = [tried for tried in sized if limit is None or tried.total_bytes < MEMORY_WARNING_SHARE.value * limit]
    fits = safe or [tried for tried in sized if limit is not None and tried.total_bytes <= limit]
    if not fits:
        nearest = next(_valid(sorted(sized, key=lambda tried: tried.total_bytes)), None)
        return None if nearest is None else _defaults(nearest, [nearest], limit)
    # Small models have many that are too fine for them: then the rest are tried too.
    for some in (fits[:MOST_PRICED], fits[MOST_PRICED:]):
        priced = sorted(_priced(some, machine), key=_seconds)
        equals, slower = _fastest(_valid(priced))
        if equals:
            # Their order is that of time, so of equal memory it is the faster one.
            chosen = min(equals, key=lambda tried: tried.total_bytes)
            others = [tried for tried in equals if tried is not chosen]
            rest = [] if slower is None else priced[priced.index(slower) :]
            return _defaults(chosen, [chosen, *others, *rest], limit)
    return None


def _fastest(valid: Iterable[_Tried]) -> tuple[list[_Tried], _Tried | None]:
    """The fastest with those that are as fast, and the first that is slower; of what has no time the first alone."""
    equals: list[_Tried] = []
    for tried in valid:
        if equals and not _seconds(tried) <= _seconds(equals[0]) * (1 + EQUAL_SHARE) < float("inf"):
            return equals, tried
        equals.append(tried)
    return equals, None


def _priced(fits: Iterable[_Tried], machine: Machine) -> Iterator[_Tried]:
    for tried in fits:
        try:
            yield replace(tried, price=priced_request(tried.request, machine))
        except (FindingsError, InputError):
            continue


def _seconds(tried: _Tried) -> float:
    seconds = None if tried.price is None else tried.price.device_seconds
    return float("inf") if seconds is None else seconds


def _valid(candidates: Iterable[_Tried]) -> Iterator[_Tried]:
    """Those whose plan has no error but those of the chip, which other layouts have too."""
    for tried in candidates:
        errors = {
            d.finding.code for d in drafts(resolve(tried.request, collectives=False)) if d.finding.severity == "error"
        }
        if errors <= OF_THE_CHIP:
            yield tried


def _defaults(chosen: _Tried, priced: Sequence[_Tried], limit: int | None) -> Defaults:
    tokens = chosen.request.batch * chosen.request.length
    times = {
        tried.text: tried.price.device_seconds / tried.price.devices * tokens
        for tried in priced
        if tried.price is not None and tried.price.device_seconds is not None
    }
    return Defaults(
        request=chosen.request,
        options=_options(chosen.request),
        choice=AutoChoice(
            what=LAYOUT,
            chosen=chosen.text,
            wire_bytes={},
            seconds=times,
            bytes_held={tried.text: tried.total_bytes for tried in priced},
        ),
        missing_bytes=0 if limit is None else max(0, chosen.total_bytes - limit),
    )


def _options(request: Request) -> dict[str, str]:
    options = {"--layout": request.layout.name}
    if request.mesh_sizes:
        options["--mesh"] = mesh_option(request.mesh_sizes).removeprefix("--mesh ")
    options["--batch"] = str(request.batch)
    if request.microbatches > 1:
        options["--microbatches"] = str(request.microbatches)
    if request.loss_chunks > 1:
        options["--loss-chunks"] = str(request.loss_chunks)
    return options


def _sized(request: Request, typed: Collection[str]) -> _Tried | None:
    """The request with rows, microbatches and chunks of the loss that fit, or with those that need the least memory; None where there is no
    plan."""
    try:
        plan = resolve(request, collectives=False)
        shared = max((plan.mesh.size(row.in_use.axes_of("batch")) for row in plan.activations), default=1)
        if "--microbatches" in typed:
            shared *= request.microbatches
        rows = request.batch if "--batch" in typed else ceil(request.batch / shared) * shared
        request = replace(request, batch=rows, mesh_sizes=plan.mesh.shape)
        return _fitting(request, shared, typed)
    except (FindingsError, InputError):
        return None


def _fitting(request: Request, shared: int, typed: Collection[str]) -> _Tried:
    plan = resolve(request, collectives=False)
    if "--microbatches" not in typed and _overfull(plan):
        request = replace(request, microbatches=_microbatches(plan, shared))
        plan = resolve(request, collectives=False)
    if "--loss-chunks" not in typed and _overfull(plan):
        chunked = replace(request, loss_chunks=LOSS_CHUNKS)
        smaller = resolve(chunked, collectives=False)
        if smaller.memory.total_bytes_per_device < plan.memory.total_bytes_per_device:
            request, plan = chunked, smaller
    return _Tried(request=request, total_bytes=plan.memory.total_bytes_per_device)


def _overfull(plan: Plan) -> bool:
    chip = plan.request.chip
    return chip is not None and plan.memory.total_bytes_per_device >= MEMORY_WARNING_SHARE.value * chip.usable_bytes


def _microbatches(plan: Plan, shared: int) -> int:
    """The fewest into which a device's rows divide and that may fit; the most where none does."""
    request, held = plan.request, plan.memory
    assert request.chip is not None
    able = divisors(max(1, request.batch // shared)) if request.batch % shared == 0 else [1]
    left = MEMORY_WARNING_SHARE.value * request.chip.usable_bytes - held.state_bytes - held.gradients_bytes
    return next((number for number in able if held.activations_bytes / number < left * 0.98), able[-1])
