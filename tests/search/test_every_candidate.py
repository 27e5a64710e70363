"""The first answer of a search is the fastest of all candidates, priced one by one."""

from __future__ import annotations

from random import Random

import pytest

from shardwright.search.searching import Search
from shardwright.search.space.settings import microbatches_of
from shardwright.search.space.space import Space, space_of
from tests.matrix import some
from tests.search.every_candidate import Question, candidates, fastest, with_policies

SAME = 1e-3
"""By so little an answer may be slower than the fastest candidate."""

QUESTIONS = tuple(
    Question(model=model, chips=chips, engine=engine, memory=memory)
    for chips in ("h100:1x8", "h100:2x4", "v5e:2x4")
    for model in ("llama3-test", "mixtral-test", "deepseek3-test")
    for engine in (("jax",) if chips.startswith("v5e") else ("jax", "torch"))
    for memory in (None, 0.3)
)


@pytest.mark.parametrize("question", some(QUESTIONS, (2, 5, 15)), ids=str)
def test_of_some_layouts_nothing_is_faster_than_the_answer(question: Question) -> None:
    random = Random(str(question))
    solver = with_policies(question.solver(random), random, 4)
    space = space_of(solver.request, solver.machine)
    whole = [item for item in space.arrangements if "stage" not in item.sizes]
    staged = [item for item in space.arrangements if item.sizes.get("stage") == 2 and len(item.sizes) == 2]
    few = [item for item in staged if len(microbatches_of(item, solver.request, solver.free)) < 3]
    drawn = [*random.sample(few, k=1), *random.sample(whole, k=3)]
    outcome = Search(solver, Space(arrangements=tuple(drawn)), keep=len(drawn)).run()
    nodes = [node for _, node in candidates(solver, drawn, every_order=False)]
    assert outcome.least_seconds is None
    seconds = outcome.answers[0].seconds if outcome.answers else float("inf")
    faster = fastest(solver, nodes, seconds * (1 - SAME))
    assert faster is None, (faster.text, faster.seconds, [(a.text, a.seconds) for a in outcome.answers[:1]])
    assert len(nodes) > 50


@pytest.mark.matrix
@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_of_all_layouts_nothing_is_faster_than_the_answer(question: Question) -> None:
    random = Random(str(question))
    solver = with_policies(question.solver(random), random, 6)
    space = space_of(solver.request, solver.machine)
    outcome = Search(solver, space, keep=1).run()
    nodes = [node for _, node in candidates(solver, space.arrangements, every_order=True)]
    faster = fastest(solver, nodes, outcome.answers[0].seconds * (1 - SAME))
    assert faster is None, (faster.text, faster.seconds, outcome.answers[0].text, outcome.answers[0].seconds)
