"""Matches the collectives of a plan with those of a program: first by component, then by kind and axes only.

1. Collectives with the same component, kind and axes match if their bytes agree, directly or after rewrites.
2. The rest are matched by kind and axes over all components: compilers merge collectives and lose their names.
3. The rest of the plan's are matched with collectives of another kind that a rewrite puts in their place.
4. The rest of the program's are known collectives that the plan leaves out, or unmatched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, NamedTuple

from shardwright.compiled.agreement.rewrites import PADDED, REWRITES, Rewrite, axes_in_order
from shardwright.compiled.agreement.widths import is_integer, planned_dtype
from shardwright.compiled.reading.program import CompiledCollective, CompiledProgram
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.core.quantization.reductions import AMAX_DTYPE

State = Literal["matched", "explained", "unmatched"]

TOLERANCE = 0.01
"""Bytes agree if they differ by at most this share of the expected bytes."""

MOST_AT_ONCE = 2
"""How many rewrites may combine in one row: for example a wider dtype and another kind."""


class Key(NamedTuple):
    """The key of comparable collectives. ``component`` None: the compiler kept no name, or all components."""

    component: str | None
    kind: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementRow:
    """The collectives of one component, kind and axes in a step: those of the plan, and those of the program.

    Bytes are those of a step on one device: of one execution, times executions. ``component`` None: the compiler kept
    no name. ``expected_bytes``: the predicted bytes after the rewrites that explain the row (``explained_by``).
    ``agreed_bytes``: the bytes of the same kind on both sides; further bytes need an explanation. ``compiled_as``: the
    kinds in the program, if the compiler replaced the planned kind.
    """

    component: str | None
    kind: str
    axes: tuple[str, ...]
    predicted_bytes: int = 0
    predicted_count: int = 0
    expected_bytes: int = 0
    compiled_bytes: int = 0
    compiled_count: int = 0
    agreed_bytes: int = 0
    state: State
    compiled_as: tuple[str, ...] = ()
    explained_by: tuple[str, ...] = ()

    @property
    def difference(self) -> int:
        """Bytes per step of the program less those of the plan; negative if the program moves less."""
        return self.compiled_bytes - self.predicted_bytes

    @property
    def bytes(self) -> int:
        """The bytes of the larger side: the weight of the row among the others."""
        return max(self.predicted_bytes, self.compiled_bytes)

    @property
    def explained_bytes(self) -> int:
        """The bytes that only a rewrite explains."""
        return self.bytes - self.agreed_bytes if self.state == "explained" else 0

    def to_json(self) -> dict[str, object]:
        return {
            "component": self.component,
            "kind": self.kind,
            "axes": list(self.axes),
            "predicted_bytes": self.predicted_bytes,
            "predicted_count": self.predicted_count,
            "expected_bytes": self.expected_bytes,
            "compiled_bytes": self.compiled_bytes,
            "compiled_count": self.compiled_count,
            "agreed_bytes": self.agreed_bytes,
            "difference": self.difference,
            "state": self.state,
            "compiled_as": list(self.compiled_as),
            "explained_by": list(self.explained_by),
        }


class Fit(NamedTuple):
    """How the two sides of a row match: the rewrites, the expected bytes, and the compiled ones that are not part of it."""

    rewrites: tuple[Rewrite, ...]
    expected: float
    aside: tuple[CompiledCollective, ...]


def total(collectives: Iterable[PlannedCollective | CompiledCollective]) -> int:
    """Bytes of a step on one device."""
    return sum(one.bytes_per_device * one.count_per_step for one in collectives)


def per_tensor(one: CompiledCollective) -> tuple[CompiledCollective, ...]:
    """One collective for each tensor of an instruction: compilers merge several collectives into one."""
    if not one.tensor_bytes:
        return (one,)
    return tuple(
        replace(one, dtypes=(dtype,), bytes_per_device=size, tensor_bytes=()) for dtype, size in one.tensor_bytes
    )


def matched_rows(plan: Plan, program: CompiledProgram) -> Iterator[AgreementRow]:
    """Every row of a comparison, in no order."""
    known = [rewrite for rewrite in REWRITES.values() if rewrite.holds_for(program.target)]
    found = [each for one in program.collectives for each in per_tensor(one)]
    plan, found = _as_planned_sums(plan, found)
    # Amaxes are compared with each other only: sums of numbers as small are left out of the plan.
    maxima = [one for one in found if one.maximum and all(map(is_integer, one.dtypes))]
    amaxes = [one for one in plan.collectives if maxima and one.dtype == AMAX_DTYPE]
    others = [one for one in plan.collectives if one not in amaxes]
    for planned, compiled in ((amaxes, maxima), (others, [one for one in found if one not in maxima])):
        search = _Search(plan, known, planned, compiled)
        yield from search.by_name()
        yield from search.merged()
        yield from search.replaced()
        yield from search.remaining()


def _as_planned_sums(plan: Plan, found: list[CompiledCollective]) -> tuple[Plan, list[CompiledCollective]]:
    """The plan with the kinds that it says a compiler makes, where the program has them, and the program with them as they are."""
    wanted = {(one.kind, frozenset(one.axes)): one.compiled_as for one in plan.collectives if one.compiled_as}

    def planned(one: CompiledCollective) -> bool:
        return wanted.get((one.stands_for or "", frozenset(one.axes))) == one.kind

    there = {(one.stands_for, frozenset(one.axes)) for one in found if planned(one)}
    # A text that does not show what a sum stands for: none of the planned kind, and such sums in its place.
    kept = {(one.stands_for or one.kind, frozenset(one.axes)) for one in found}
    there |= {
        (kind, axes) for (kind, axes), sums in wanted.items() if (kind, axes) not in kept and (sums, axes) in kept
    }
    kinds = tuple(
        replace(one, kind=one.compiled_as) if one.compiled_as and (one.kind, frozenset(one.axes)) in there else one
        for one in plan.collectives
    )
    return replace(plan, collectives=kinds), [replace(one, stands_for=None) if planned(one) else one for one in found]


class _Search:
    """The collectives that are not matched yet: ``planned`` and ``compiled``."""

    def __init__(
        self,
        plan: Plan,
        known: Sequence[Rewrite],
        planned: Iterable[PlannedCollective],
        found: Iterable[CompiledCollective],
    ) -> None:
        self.plan = plan
        scaling = [rewrite for rewrite in known if rewrite.ratio is not None and not rewrite.compiled]
        self.always = [rewrite for rewrite in scaling if rewrite.always]
        self.scaling = [rewrite for rewrite in scaling if not rewrite.always]
        self.replacing = [rewrite for rewrite in known if rewrite.planned and rewrite.compiled]
        self.unplanned = [rewrite for rewrite in known if not rewrite.planned]
        self.pads = [rewrite for rewrite in known if rewrite.name == PADDED]
        self.planned = _by_key(plan, planned)
        self.compiled = _by_key(plan, found)

    def by_name(self) -> Iterator[AgreementRow]:
        """Rows with the same component, kind and axes on both sides."""
        for key, planned in list(self.planned.items()):
            compiled = self.compiled.get(key, ())
            fit = self._fit(planned, compiled)
            if fit is None:
                continue
            yield _row(key, planned, _without(compiled, fit.aside), fit)
            self._take([key], _without(compiled, fit.aside))

    def merged(self) -> Iterator[AgreementRow]:
        """Rows of one kind and axes whose sums agree, whatever their names."""
        for kind, axes in dict.fromkeys((key.kind, key.axes) for key in self.planned):
            planned = [key for key in self.planned if (key.kind, key.axes) == (kind, axes)]
            compiled = [key for key in self.compiled if (key.kind, key.axes) == (kind, axes)]
            if planned == compiled and len(planned) == 1:
                continue
            found = tuple(one for key in compiled for one in self.compiled[key])
            fit = self._fit([one for key in planned for one in self.planned[key]], found)
            if fit is None:
                continue
            left = _without(found, fit.aside)
            expected_bytes, moved_bytes = fit.expected, total(left)
            named = fit._replace(rewrites=(REWRITES["merged"], *fit.rewrites))
            for key in planned:
                expected = self._expected(self.planned[key], fit.rewrites)
                share = moved_bytes / expected_bytes * expected if expected_bytes else 0
                own = [one for one in left if one.component == key.component]
                row = _row(key, self.planned[key], own, named._replace(expected=expected))
                moved_here = round(share)
                yield replace(row, compiled_bytes=moved_here, agreed_bytes=min(row.predicted_bytes, moved_here))
            self._take(planned, left)

    def replaced(self) -> Iterator[AgreementRow]:
        """Rows whose kind a rewrite replaced: component by component, then over all components."""
        for rewrite in self.replacing:
            for kind in rewrite.planned:
                keys = [key for key in self.planned if key.kind == kind]
                for key in keys:
                    yield from self._replaced(rewrite, [key], self._stand_ins(rewrite, key))
                for axes in dict.fromkeys(key.axes for key in keys):
                    planned = [key for key in keys if key.axes == axes and key in self.planned]
                    if planned:
                        yield from self._replaced(rewrite, planned, self._stand_ins(rewrite, Key(None, kind, axes)))

    def _stand_ins(self, rewrite: Rewrite, wanted: Key) -> list[CompiledCollective]:
        """Collectives of a rewrite's kinds that stand for the wanted kind; of all components if it names none."""
        return [
            one
            for key, ones in self.compiled.items()
            for one in ones
            if key.kind in rewrite.compiled
            and key.axes == wanted.axes
            and one.stands_for == wanted.kind
            and wanted.component in (None, key.component)
        ]

    def _replaced(
        self, rewrite: Rewrite, planned: Sequence[Key], stand_ins: Sequence[CompiledCollective]
    ) -> Iterator[AgreementRow]:
        found = total(stand_ins)
        if not found:
            return
        for others in self._scalings([one for key in planned for one in self.planned[key]], MOST_AT_ONCE - 1):
            # Collectives of the planned kind count as they are; the rest was replaced.
            expected = {key: self._expected(self.planned[key], others) for key in planned}
            same = {key: self._plain(key) for key in planned}
            padding = {key: self._padding(same[key]) for key in planned}
            kept = {key: total(same[key]) - padding[key] for key in planned}
            left = {key: expected[key] - kept[key] for key in planned if expected[key] > kept[key]}
            low, high = (
                sum(
                    self._bounds(self.planned[key], (rewrite, *others))[end] * left[key] / expected[key] for key in left
                )
                for end in (0, 1)
            )
            if not left or not _within(found, low, high):
                continue
            for key, left_bytes in left.items():
                there = total(same[key]) + round(found * left_bytes / sum(left.values()))
                named = (rewrite, *others, *(self.pads if padding[key] else ()))
                row = _row(key, self.planned[key], same[key], Fit(named, there, ()))
                yield replace(row, compiled_as=rewrite.compiled, compiled_bytes=there)
            self._take(left, [*stand_ins, *(one for key in left for one in self._plain(key))])
            return

    def _plain(self, key: Key) -> tuple[CompiledCollective, ...]:
        """The compiled collectives of a key that do not stand for another kind."""
        return tuple(one for one in self.compiled.get(key, ()) if one.stands_for in (None, key.kind))

    def remaining(self) -> Iterator[AgreementRow]:
        """Rows of collectives that the plan leaves out, and unmatched rows."""
        for key in dict.fromkeys([*self.planned, *self.compiled]):
            planned, compiled = self.planned.get(key, ()), self.compiled.get(key, ())
            unplanned = self._known_unplanned(planned, compiled)
            left = _without(compiled, unplanned)
            yield from self._unplanned_rows(key, unplanned)
            if planned or left:
                yield replace(_row(key, planned, left, Fit((), total(planned), ())), state="unmatched")

    def _take(self, planned: Iterable[Key], compiled: Iterable[CompiledCollective]) -> None:
        """Remove matched collectives from the search."""
        taken = list(compiled)
        for key in list(planned):
            self.planned.pop(key, None)
        for key in {_key(self.plan, one) for one in taken}:
            self.compiled[key] = _without(self.compiled.get(key, ()), taken)

    def _fit(self, planned: Sequence[PlannedCollective], compiled: Sequence[CompiledCollective]) -> Fit | None:
        """The fit with the fewest rewrites under which the bytes of both sides agree."""
        unplanned = self._known_unplanned(planned, compiled)
        stand_ins = tuple(one for one in compiled if one.stands_for not in (None, one.kind))
        for rewrites in self._scalings(planned, MOST_AT_ONCE):
            low, high = self._bounds(planned, rewrites)
            for aside in dict.fromkeys(((*unplanned, *stand_ins), stand_ins, unplanned, ())):
                left = _without(compiled, aside)
                found = total(left)
                padding = self._padding(left)
                if (found or not low) and _within(found - padding, low, high):
                    return Fit(
                        (*rewrites, *(self.pads if padding else ())),
                        min(max(found, low + padding), high + padding),
                        aside,
                    )
        return None

    def _padding(self, compiled: Iterable[CompiledCollective]) -> int:
        """Bytes of padding in a step, on targets that pad."""
        return sum(one.padding_bytes * one.count_per_step for one in compiled) if self.pads else 0

    def _scalings(self, planned: Sequence[PlannedCollective], most: int) -> Iterator[tuple[Rewrite, ...]]:
        """The combinations of rewrites that may have scaled the planned bytes: those that always apply, and up to
        ``most`` others."""
        always = [rewrite for rewrite in self.always if self._changes(rewrite, planned)]
        others = [rewrite for rewrite in self.scaling if self._changes(rewrite, planned)]
        for number in range(most + 1):
            yield from ((*always, *some) for some in combinations(others, number))

    def _changes(self, rewrite: Rewrite, planned: Sequence[PlannedCollective]) -> bool:
        return self._bounds(planned, (rewrite,)) != (total(planned), total(planned))

    def _bounds(self, planned: Sequence[PlannedCollective], rewrites: Sequence[Rewrite]) -> tuple[float, float]:
        """The least and the most bytes of planned collectives after rewrites."""
        least = most = 0.0
        for one in planned:
            low = high = float(one.bytes_per_device * one.count_per_step)
            for rewrite in rewrites:
                if rewrite.ratio is not None and one.kind in rewrite.planned:
                    ratio = rewrite.ratio(self.plan, one)
                    low, high = low * ratio[0], high * ratio[1]
            least, most = least + low, most + high
        return least, most

    def _expected(self, planned: Sequence[PlannedCollective], rewrites: Sequence[Rewrite]) -> float:
        return sum(self._bounds(planned, rewrites)) / 2

    def _known_unplanned(
        self, planned: Sequence[PlannedCollective], compiled: Iterable[CompiledCollective]
    ) -> tuple[CompiledCollective, ...]:
        """The collectives that the plan leaves out. One with the size of a planned collective, both of integers or both
        of floats, is the planned one."""
        wanted = {(is_integer(planned_dtype(self.plan, one)), one.bytes_per_device) for one in planned}
        return tuple(
            one
            for one in compiled
            if self._unplanned_rewrites(one) and (all(map(is_integer, one.dtypes)), one.bytes_per_device) not in wanted
        )

    def _unplanned_rewrites(self, one: CompiledCollective) -> list[Rewrite]:
        return [
            rewrite
            for rewrite in self.unplanned
            if rewrite.unplanned is not None and one.kind in rewrite.compiled and rewrite.unplanned(self.plan, one)
        ]

    def _unplanned_rows(self, key: Key, found: Iterable[CompiledCollective]) -> Iterator[AgreementRow]:
        """Rows of collectives that the plan leaves out, by the rewrite that explains them."""
        by_name: dict[str, list[CompiledCollective]] = {}
        for one in found:
            by_name.setdefault(self._unplanned_rewrites(one)[0].name, []).append(one)
        for name, ones in by_name.items():
            yield replace(_row(key, (), ones, Fit((REWRITES[name],), total(ones), ())), state="explained")


def _by_key(plan: Plan, collectives: Iterable) -> dict:
    found: dict[Key, list] = {}
    for one in collectives:
        found.setdefault(_key(plan, one), []).append(one)
    return {key: tuple(ones) for key, ones in found.items()}


def _key(plan: Plan, one: PlannedCollective | CompiledCollective) -> Key:
    return Key(one.component, one.kind, axes_in_order(plan.mesh, one.axes))


def _row(
    key: Key, planned: Sequence[PlannedCollective], compiled: Sequence[CompiledCollective], fit: Fit
) -> AgreementRow:
    return AgreementRow(
        component=key.component,
        kind=key.kind,
        axes=key.axes,
        predicted_bytes=total(planned),
        predicted_count=sum(one.count_per_step for one in planned),
        expected_bytes=round(fit.expected),
        compiled_bytes=total(compiled),
        compiled_count=sum(one.count_per_step for one in compiled),
        agreed_bytes=min(total(planned), total(compiled)),
        state="matched" if all(rewrite.keeps for rewrite in fit.rewrites) else "explained",
        explained_by=tuple(rewrite.name for rewrite in fit.rewrites),
    )


def _within(found: float, low: float, high: float) -> bool:
    return low * (1 - TOLERANCE) <= found <= high * (1 + TOLERANCE)


def _without(
    found: Iterable[CompiledCollective], aside: Sequence[CompiledCollective]
) -> tuple[CompiledCollective, ...]:
    """The collectives that are not in ``aside``; of equal ones all are removed or none."""
    return tuple(one for one in found if one not in aside)
