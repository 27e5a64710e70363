"""The search: it takes the candidate of the least bound, until nothing that is left can be faster than what it has.

Nodes (``solving.py``) lie in a heap by their bound. Where the first is a choice that fits and has no error, it is the next answer: everything
else in the heap is slower. Else the nodes before it are divided, several at a time, by processes of their own. What the search has depends on
neither their number nor their speed; where the budget ends it, it says how much faster what is left could be.
"""

from __future__ import annotations

import gc
import heapq
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context, parent_process
from typing import Any

from shardwright.core.findings.codes import TOO_LARGE
from shardwright.search.nodes import EQUAL, Node
from shardwright.search.solving import Solver
from shardwright.search.space.arrangements import Arrangement
from shardwright.search.space.space import Space

OF_A_TASK = 8
"""Arrangements that a process bounds at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """``priced``: nodes so far. ``best``: the fastest choice so far. ``least_seconds``: of what is left, none is faster."""

    priced: int
    left: int
    best: Node | None
    least_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``answers``: one of each arrangement, the fastest first; after those that are equally fast, the fastest of what was priced. ``ended``: candidates by the finding that ended them. ``least_seconds``: of what
    the budget left, none is faster, and 0 where it had not looked at all; None where nothing that is left matters. ``nearest``: what misses the memory by the least, where nothing
    fits."""

    answers: tuple[Node, ...]
    ended: Mapping[str, int]
    priced: int
    least_seconds: float | None = None
    nearest: Node | None = None


ENDS = ("choice", "unfit")
"""Levels of nodes that are not divided."""

Memory = dict[str, tuple[Node, ...]]
"""The nodes below each node, and those of each arrangement, by its text: what a later search of the same goes on from."""


class Search:
    """A search and what it has so far."""

    def __init__(
        self,
        solver: Solver,
        space: Space,
        *,
        keep: int,
        within: float = 0.0,
        budget_s: float | None = None,
        without_answer_s: float | None = None,
        processes: int = 1,
        memory: Memory | None = None,
        save: Callable[[], None] = lambda: None,
        report: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """``within``: the share of its step by which something that is left may be faster than the first answer; 0: those that are equally fast are
        answers too. ``without_answer_s``: the budget as long as nothing fits; None: the same. ``memory``: what an earlier search of the same has priced; it grows. ``save``: called when it has grown. ``report``: called with the
        progress."""
        self.solver, self.space, self.keep, self.within = solver, space, keep, within
        self.memory: Memory = {} if memory is None else memory
        self._budget_s, self._without_answer_s = budget_s, without_answer_s
        self._processes, self._save, self._report = processes, save, report
        self._heap: list[tuple[tuple[object, ...], Node]] = []
        self._refused: set[str] = set()
        self._ended: Counter[str] = Counter()
        self._answers: list[Node] = []
        self._answered: set[str] = set()
        self._best: Node | None = min(self._choices(), key=lambda node: node.key, default=None) if within else None
        self._nearest: Node | None = None
        self._dived: set[str] = set()
        self._turn = 0
        self._began = time.monotonic()

    def run(self) -> Outcome:
        """Searches until the answer is certain or the budget is used."""
        self._ended.update(self.space.ended)
        with _workers(self.solver, self._processes) as workers:
            unseen = self._bound(workers)
            left = unseen
            while not left and self._heap and not self._is_certain():
                if self._is_over():
                    left = True
                    break
                self._step(workers)
            least = None if not left else 0.0 if unseen else self._heap[0][1].seconds
            self._take_choices(workers)
        return Outcome(
            answers=tuple(self._answers),
            ended=dict(self._ended),
            priced=self._priced,
            least_seconds=least,
            nearest=None if self._answers else self._nearest or self._nearest_by_arithmetic(),
        )

    def _nearest_by_arithmetic(self) -> Node | None:
        smallest = self.space.smallest
        return None if smallest is None else next(iter(self.solver.first(smallest)), None)

    @property
    def _priced(self) -> int:
        return sum(len(nodes) for nodes in self.memory.values())

    def _bound(self, workers: Workers) -> bool:
        """Bounds all arrangements; whether some are left."""
        waiting = list(self.space.arrangements)
        for start in range(0, len(waiting), OF_A_TASK * workers.number):
            # A search has looked at some layouts, however small its budget.
            if start and self._is_over():
                return True
            some = waiting[start : start + OF_A_TASK * workers.number]
            for nodes in self._remembered(workers, "first", some):
                self._push(nodes)
            self._dive(workers)
            self._show(left=len(waiting) - start - len(some))
        return False

    def _dive(self, workers: Workers) -> None:
        """Divides some nodes down to choices, if they could be the fastest so far: a search that its budget ends early has an answer. Each time
        those of other forms, of which the first by its bound; as long as nothing fits, the smallest too."""
        by_form: dict[tuple[str, bool], Node] = {}
        smallest: Node | None = None
        for _, node in self._heap:
            if node.level == "choice" or node.text in self._dived:
                continue
            if node.seconds >= self._matters_below_s:
                continue
            form = node.arrangement.form, node.ranks > 1
            if form not in by_form or node.key < by_form[form].key:
                by_form[form] = node
            if node.bytes_per_device and (smallest is None or _size(node) < _size(smallest)):
                smallest = node
        forms = sorted(by_form)
        able = [by_form[forms[(self._turn + place) % len(forms)]] for place in range(min(workers.number, len(forms)))]
        self._turn += len(able)
        if smallest is not None and self._best is None and smallest not in able:
            able = [smallest, *able[1:]]
        self._dived.update(node.text for node in able)
        for divided in workers.map("dive", able, self._matters_below_s):
            for node, nodes in divided:
                self._remember(node.text, nodes)

    @property
    def _matters_below_s(self) -> float:
        """The seconds from which on nothing can be the first answer."""
        return inf if self._best is None else self._best.seconds * (1 - self.within)

    def _remember(self, text: str, nodes: tuple[Node, ...]) -> None:
        self.memory[text] = nodes
        able = [node for node in nodes if node.level == "choice" and node.text not in self._refused]
        self._best = min(
            [*able, *([] if self._best is None else [self._best])], key=lambda node: node.key, default=None
        )
        self._save()

    def _is_over(self) -> bool:
        budget = self._budget_s
        if self._best is None and self._without_answer_s is not None:
            budget = self._without_answer_s
        return budget is not None and time.monotonic() - self._began > budget

    def _is_certain(self) -> bool:
        """Whether what is left is not so much faster than the first answer; or slower than it and all that are equally fast."""
        if self.within:
            return bool(self._answers) and self._is_near(self._answers[0])
        return bool(self._answers) and self._heap[0][1].seconds > self._answers[0].seconds * (1 + EQUAL)

    def _is_near(self, node: Node) -> bool:
        """Whether nothing that is left is so much faster than a choice."""
        return self._heap[0][1].seconds >= node.seconds * (1 - self.within)

    def _push(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.level == "unfit":
                self._ended[TOO_LARGE] += 1
                if self._nearest is None or node.bytes_per_device < self._nearest.bytes_per_device:
                    self._nearest = node
                continue
            heapq.heappush(self._heap, (node.key, node))

    def _step(self, workers: Workers) -> None:
        """Takes the fastest choice if nothing that is left matters, or the first node if it is a choice; or divides some of the first."""
        if self.within and self._best is not None and self._is_near(self._best):
            self._take(self._best, workers)
            return
        if self._heap[0][1].level == "choice":
            self._take(heapq.heappop(self._heap)[1], workers)
            return
        some: list[Node] = []
        while self._heap and len(some) < workers.number and self._heap[0][1].level != "choice":
            some.append(heapq.heappop(self._heap)[1])
        for nodes in self._remembered(workers, "below", some):
            self._push(nodes)
        self._dive(workers)
        self._show(left=len(self._heap))

    def _take(self, node: Node, workers: Workers) -> None:
        """Makes a choice an answer, unless a faster one of its arrangement is one or a check ends it."""
        if node.arrangement.key in self._answered or node.text in self._refused:
            return
        (codes,) = workers.map("errors", [node])
        if codes:
            self._ended.update(codes[:1])
            self._refused.add(node.text)
            if self._best is not None and node.text == self._best.text:
                self._best = min(self._choices(), key=lambda choice: choice.key, default=None)
            return
        self._answered.add(node.arrangement.key)
        (fastest,) = workers.map("order", [node])
        self._answers.append(fastest)

    def _take_choices(self, workers: Workers) -> None:
        """Makes answers of the choices that there are, of which some that are left might be faster."""
        for node in sorted(self._choices(), key=lambda choice: choice.key):
            if len(self._answers) == self.keep:
                return
            self._take(node, workers)

    def _choices(self) -> list[Node]:
        """All that were priced and not refused."""
        every = (node for nodes in self.memory.values() for node in nodes if node.level == "choice")
        return [node for node in every if node.text not in self._refused]

    def _remembered(self, workers: Workers, task: str, some: Sequence[Arrangement | Node]) -> list[tuple[Node, ...]]:
        """The nodes of some arrangements, or below some nodes."""
        texts = [item.text if isinstance(item, Node) else item.key for item in some]
        new = [item for item, text in zip(some, texts, strict=True) if text not in self.memory]
        for item, nodes in zip(new, workers.map(task, new, self._matters_below_s), strict=True):
            self._remember(item.text if isinstance(item, Node) else item.key, nodes)
        return [self.memory[text] for text in texts]

    def _show(self, left: int) -> None:
        least = self._heap[0][1].seconds if self._heap else None
        self._report(Progress(priced=self._priced, left=left, best=self._best, least_seconds=least))


def _size(node: Node) -> tuple[object, ...]:
    """Orders nodes by the least that they need."""
    return (node.bytes_per_device, *node.key)


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes that price, or this one."""

    number: int
    solver: Solver
    pool: ProcessPoolExecutor | None = None

    def map(self, task: str, items: Sequence[object], below_s: float = inf) -> Sequence[Any]:
        """``below_s``: the seconds that may still matter."""
        if self.pool is None:
            return [_done(self.solver, task, item, below_s) for item in items]
        return list(self.pool.map(_in_a_worker, [(task, item, below_s) for item in items]))


@contextmanager
def _workers(solver: Solver, processes: int) -> Iterator[Workers]:
    if processes == 1:
        yield Workers(1, solver)
        return
    # A fresh process inherits neither threads nor locks of the caller.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(solver,))
    try:
        yield Workers(processes, solver, pool)
    finally:
        pool.shutdown(cancel_futures=True)


_SOLVER: list[Solver] = []


def _begin(solver: Solver) -> None:
    # An interrupt is the caller's, who ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Plans are values without cycles: collecting them takes a sixth of the time.
    gc.set_threshold(200_000, 20, 100)
    _SOLVER[:] = [solver]
    threading.Thread(target=_end_with_the_caller, daemon=True).start()


def _end_with_the_caller() -> None:
    """A caller that is killed cannot end its workers."""
    caller = parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def _in_a_worker(work: tuple[str, object, float]) -> object:
    return _done(_SOLVER[0], *work)


def _done(solver: Solver, task: str, item: object, below_s: float) -> object:
    if isinstance(item, Arrangement):
        return solver.first(item)
    assert isinstance(item, Node)
    if task in ("dive", "below"):
        return {"dive": solver.dive, "below": solver.below}[task](item, below_s)
    return {"errors": solver.errors, "order": solver.in_another_order}[task](item)


def processes_here() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
