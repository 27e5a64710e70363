"""The degrees of a configuration on a number of ranks, and findings on them.

| degree | ranks |
|---|---|
| pp, dp_replicate, dp_shard, cp, tp | multiply to the world, in this order, the last one fastest |
| ep | none of its own: the innermost of dp_shard x cp x tp |
| efsdp | the rest of those ranks: experts are sharded over it at rest |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod

from shardwright.core.findings.bounds import BOUNDS, number_text
from shardwright.core.findings.codes import Severity
from shardwright.core.findings.errors import FindingsError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.nearest import nearest
from shardwright.core.layout.wording import count, either
from shardwright.core.model.table import ModelTable
from shardwright.interop.torchtitan.section import Section
from shardwright.interop.torchtitan.vocabulary import AXES, DEGREES, KNOWN, REMOVED, RESHARD, RESHARDS

EP = "expert_parallel_degree"
SHARD = "data_parallel_shard_degree"
MAX_RANKS = BOUNDS["devices"].most


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Sizes by axis, in the order of the ranks, and the degree of expert parallelism. ``keep_gathered``: weights are gathered once for the
    forward and the backward pass."""

    sizes: Mapping[str, int]
    ep: int
    sequence_parallel: bool
    keep_gathered: bool = False

    @property
    def world(self) -> int:
        return prod(self.sizes.values())

    @property
    def borrowable(self) -> int:
        """The number of ranks that experts may borrow."""
        return prod(self.sizes[axis] for axis in ("dp_shard", "cp", "tp"))


def degrees_of(section: Section, devices: int | None, natural: int | None) -> tuple[Degrees, dict[str, str]]:
    """The degrees, with dp_shard computed, and the defaults that were chosen.

    ``natural``: the number of ranks where dp_shard is -1 and no number of ranks is given.
    Raises FindingsError (SW106) where the product of the degrees is not the number of ranks.
    """
    chosen: dict[str, str] = {}
    given = {axis: section.degree(name) for name, axis in AXES.items()}
    faults = [*_below_one(section), *_too_large(section)]
    known = prod(size for axis, size in given.items() if axis != "dp_shard" or size != -1)
    if not faults and given["dp_shard"] == -1:
        if devices is None and known <= MAX_RANKS:
            devices = _ranks_that_fit(section, given, known, natural or 1)
            chosen["--devices"] = str(devices)
        if devices is None or (devices > MAX_RANKS and "--devices" in chosen):
            faults.append(_too_many(section, given, known if devices is None else devices))
        elif devices % known:
            faults.append(_product(section, given, known, devices))
        given["dp_shard"] = 1 if devices is None else devices // known
    elif not faults and known > MAX_RANKS:
        faults.append(_too_many(section, given, known))
    elif not faults and devices is not None and known != devices:
        faults.append(_product(section, given, known, devices))
    if faults:
        raise FindingsError(faults)
    degrees = Degrees(
        sizes=given,
        ep=section.degree(EP),
        sequence_parallel=section.sequence_parallel,
        keep_gathered=section.keep_gathered,
    )
    return degrees, chosen


def _ranks_that_fit(section: Section, given: Mapping[str, int], known: int, natural: int) -> int:
    """The largest number of ranks up to ``natural`` for which ep divides dp_shard x cp x tp; the least such number where all are larger."""
    ep = max(1, section.degree(EP))
    step = ep // gcd(ep, given["cp"] * given["tp"])
    return max(1, natural // known // step) * step * known


def _below_one(section: Section) -> Iterator[Finding]:
    for name in DEGREES:
        size = section.degree(name)
        if size < 1 and not (name == SHARD and size == -1):
            yield Finding(
                code="SW106",
                severity="error",
                where=f"'{name}'",
                position=section.positions.get(name),
                found=f"degree {size}",
                needed="a degree of at least 1" + (", or -1 for the remaining ranks" if name == SHARD else ""),
            )


def _too_large(section: Section) -> Iterator[Finding]:
    """Degrees above the maximum number of ranks. Nothing is computed with one: that would take all memory."""
    for name in DEGREES:
        size = section.degree(name)
        if size > MAX_RANKS:
            yield Finding(
                code="SW106",
                severity="error",
                where=f"'{name}'",
                position=section.positions.get(name),
                found=f"degree {number_text(size)}",
                needed=f"at most {number_text(MAX_RANKS)}",
                fix="Give a smaller degree.",
            )


def _too_many(section: Section, given: Mapping[str, int], ranks: int) -> Finding:
    large = [f"{axis} {size}" for axis, size in given.items() if size > 1]
    ep = section.degree(EP)
    for_ep = f", with the dp_shard that ep {ep} needs" if given["dp_shard"] == -1 and ep > 1 else ""
    return Finding(
        code="SW106",
        severity="error",
        where="the degrees whose product is the world size",
        position=next((section.positions[name] for name in (*AXES, EP) if name in section.positions), None),
        found=f"{' x '.join(large) or '1'}{for_ep} = {number_text(ranks)} ranks",
        needed=f"at most {number_text(MAX_RANKS)}",
        fix=BOUNDS["devices"].fix.replace("devices", "ranks"),
    )


def _product(section: Section, given: Mapping[str, int], known: int, devices: int) -> Finding:
    large = [f"{axis} {size}" for axis, size in given.items() if size > 1] or ["1"]
    product = " x ".join(large) + (f" = {known}" if len(large) > 1 else "")
    borrowed = "; ep has no ranks of its own" if section.degree(EP) > 1 else ""
    if given["dp_shard"] == -1:
        found = f"{product}, which does not divide {count(devices, 'rank')}: TorchTitan rounds dp_shard down to {devices // known}"
        needed = f"a product that divides {devices}"
        fix = ""
    else:
        found, needed = product, count(devices, "rank")
        others = known // given["dp_shard"]
        fix = "" if devices % others else f"Write '{SHARD} = {devices // others}'."
    place = next((section.positions[name] for name in AXES if name in section.positions), None)
    return Finding(
        code="SW106",
        severity="error",
        where="the degrees whose product is the world size",
        position=place,
        found=f"{found}{borrowed}",
        needed=needed,
        fix=fix,
    )


def check_degrees(section: Section, degrees: Degrees, table: ModelTable | None) -> Iterator[Finding]:
    """Options that are not read, and an ep that does not divide the ranks it borrows or the model's experts."""
    for name in section.values:
        if name not in KNOWN:
            near = nearest(name, _of_kind(name), cutoff=0.85)
            yield Finding(
                code="SW111",
                severity="error",
                where=f"'{name}'",
                position=section.positions.get(name),
                found=f"TorchTitan has no option '{name}'",
                needed=f"'{near}'" if near else "an existing option",
                fix=f"Write '{near}'." if near else "",
            )
    reshards = section.values.get(RESHARD)
    if reshards is not None and reshards not in RESHARDS:
        near = nearest(str(reshards), RESHARDS)
        yield Finding(
            code="SW111",
            severity="error",
            where=f"'{RESHARD}'",
            position=section.positions.get(RESHARD),
            found=f"{reshards!r}",
            needed=either(RESHARDS),
            fix=f"Write '{near}'." if near else "",
        )
    for name, why in REMOVED.items():
        if name in section.values:
            yield _experts(
                section,
                name,
                f"{section.values[name]}, and {why}",
                "no such option",
                fix=f"Take '{name}' out.",
                severity="error" if section.values[name] != 1 else "warning",
            )
    borrowable, ep = degrees.borrowable, degrees.ep
    if borrowable % ep:
        legal = [size for size in range(1, borrowable + 1) if borrowable % size == 0]
        yield _experts(
            section,
            EP,
            f"{ep}, which does not divide the ranks it borrows from: dp_shard {degrees.sizes['dp_shard']} x cp "
            f"{degrees.sizes['cp']} x tp {degrees.sizes['tp']} = {borrowable}",
            either(legal),
            fix=f"Write '{EP} = {max(size for size in legal if size <= ep)}'.",
        )
    if table is None or ep == 1:
        return
    experts = table.sizes.get("experts")
    if experts is None:
        yield _experts(section, EP, f"{ep}, and {table.name} has no experts: it has no effect", "1", severity="warning")
    elif experts % ep:
        legal = [size for size in range(1, experts + 1) if experts % size == 0 and borrowable % size == 0]
        near = max(size for size in legal if size <= ep)
        yield _experts(
            section,
            EP,
            f"{experts} experts of {table.name} over ep {ep}",
            f"a degree that divides {experts}: {either(legal)}",
            fix=f"Write '{EP} = {near}'.",
        )


def _of_kind(name: str) -> tuple[str, ...]:
    """The options that a name may misspell: degrees for a degree, and none with the opposite meaning."""
    if name.endswith(("degree", "degrees")):
        return tuple(DEGREES)
    return tuple(
        each for each in KNOWN if each not in DEGREES and each.startswith("disable") == name.startswith("disable")
    )


def _experts(
    section: Section, name: str, found: str, needed: str, *, fix: str = "", severity: Severity = "error"
) -> Finding:
    return Finding(
        code="SW109",
        severity=severity,
        where=f"'{name}'",
        position=section.positions.get(name),
        found=found,
        needed=needed,
        fix=fix,
    )
