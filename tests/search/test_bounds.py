"""Whatever a search leaves out it could not have wanted: no bound exceeds a step below it, whatever the names, memory and number of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.search.saved import SearchFile
from shardwright.search.searching import OF_A_TASK, Memory, Outcome, Search
from shardwright.search.solving import Node, Solver
from shardwright.search.space import forms
from shardwright.search.space import space as space_module
from shardwright.search.space.forms import DENSE, Form
from shardwright.search.space.space import Space, space_of
from tests.matrix import rest
from tests.search.every_candidate import Question, candidates, with_memory, with_policies

SAME = 1e-9
SMALL = Question(model="llama3-test", chips="h100:2x4", engine="torch")


@pytest.fixture(scope="module")
def solver() -> Solver:
    return with_policies(SMALL.solver(Random(0)), Random(0), 4)


@pytest.fixture(scope="module")
def space(solver: Solver) -> Space:
    """Some layouts, of them two of stages."""
    arrangements = space_of(solver.request, solver.machine).arrangements
    return Space(arrangements=arrangements[::5])


@pytest.fixture(scope="module")
def memory(solver: Solver, space: Space) -> Memory:
    """What a search of some layouts has priced."""
    memory: Memory = {}
    Search(solver, space, keep=3, memory=memory).run()
    return memory


def text_of(outcome: Outcome) -> object:
    return [(node.text, node.seconds, node.bytes_per_device) for node in outcome.answers], outcome.ended


@pytest.mark.parametrize("seed", [0, *(rest(seed) for seed in range(1, 13))])
def test_no_bound_exceeds_a_step_below_it(seed: int) -> None:
    random = Random(seed)
    question = Question(
        model=random.choice(("llama3-test", "mixtral-test", "deepseek3-test")),
        chips=random.choice(("h100:1x8", "h100:2x4", "v5e:2x4")),
        engine=random.choice(("jax", "torch")),
        memory=random.choice((None, 0.2, 0.5)),
    )
    if question.chips.startswith("v5e"):
        question = replace(question, engine="jax")
    solver = with_policies(question.solver(random), random, 4)
    arrangements = space_of(solver.request, solver.machine).arrangements
    for arrangement in random.sample(arrangements, k=1 if seed == 0 else 3):
        nodes = [node for node in solver.first(arrangement) if node.level != "unfit"]
        steps = [node.seconds for _, node in candidates(solver, [arrangement], every_order=False)]
        if steps:
            assert min(node.seconds for node in nodes) <= min(steps) * (1 + SAME), arrangement.key
        for node in nodes:
            divided(solver, node, (), random)


def divided(solver: Solver, node: Node, above: tuple[Node, ...], random: Random) -> None:
    """Divides a node, and one of those below it, down to a choice."""
    for bound in above:
        assert bound.seconds <= node.seconds * (1 + SAME), (bound.text, node.text)
    if node.level == "choice":
        return
    below = solver.below(node)
    choices = [lower for lower in below if lower.level == "choice"]
    for lower in choices or random.sample(below, k=min(2, len(below))):
        divided(solver, lower, (*above, node), random)


def test_two_processes_have_the_same_answers(solver: Solver, space: Space, memory: Memory) -> None:
    alone = Search(solver, space, keep=3, memory=dict(memory)).run()
    assert alone.answers
    # What the first has priced is of no help to the second: its processes price all that they take.
    assert text_of(Search(solver, space, keep=3, processes=2).run()) == text_of(alone)


@pytest.mark.parametrize("within", [0.02, 0.2])
def test_nothing_is_more_than_so_much_faster_than_the_first_answer(
    solver: Solver, space: Space, memory: Memory, within: float
) -> None:
    fastest = Search(solver, space, keep=1, memory=dict(memory)).run().answers[0]
    # What was priced before is of no help: it ends as soon as nothing that is left matters.
    less: Memory = {}
    outcome = Search(solver, space, keep=1, within=within, memory=less).run()
    assert outcome.least_seconds is None
    assert fastest.seconds * (1 - SAME) <= outcome.answers[0].seconds <= fastest.seconds / (1 - within)
    assert len(less) <= len(memory)


def test_other_names_of_axes_change_nothing(
    solver: Solver, space: Space, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an axis has the name that another one had."""
    first = Search(solver, space, keep=3, memory=dict(memory)).run()
    names = {"stage": "stage", "data": "fsdp", "fsdp": "tensor", "context": "data", "tensor": "z"}
    renamed = Form(name="renamed", axes=tuple((names[axis], entry) for axis, entry in DENSE.axes))
    monkeypatch.setattr(forms, "MIXTURE", (renamed,))
    monkeypatch.setattr(space_module, "DENSE", renamed)
    again = Space(arrangements=space_of(solver.request, solver.machine).arrangements[::5])
    other = Search(solver, again, keep=3).run()
    assert [node.seconds for node in other.answers] == pytest.approx([node.seconds for node in first.answers], rel=SAME)
    assert [node.bytes_per_device for node in other.answers] == [node.bytes_per_device for node in first.answers]
    sizes = {names[axis]: size for axis, size in first.answers[0].arrangement.sizes.items()}
    assert dict(other.answers[0].arrangement.sizes) == sizes


def test_a_search_that_ended_early_goes_on_from_its_file(
    solver: Solver, space: Space, memory: Memory, tmp_path: Path
) -> None:
    whole = Search(solver, space, keep=3, memory=dict(memory)).run()
    file = SearchFile.of(tmp_path / "a.json", "1")
    file.memory_of("").update(dict(list(memory.items())[: len(memory) // 2]))
    file.write()
    again = SearchFile.of(tmp_path / "a.json", "1")
    assert again.memory_of("") == file.memory_of("")
    assert text_of(Search(solver, space, keep=3, memory=again.memory_of("")).run()) == text_of(whole)
    with pytest.raises(InputError, match="another model, machine, options or version"):
        SearchFile.of(tmp_path / "a.json", "2")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"search": 1}',
        '{"priced": {}}',
        '{"search": "SAME", "priced": {"": {"a": [1]}}}',
        "\0",
        "\udcff",
    ],
)
def test_a_file_of_anything_else_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    file = SearchFile.of(path, "1")
    path.write_text(content.replace("SAME", file.digest), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(InputError, match="--out"):
        SearchFile.of(path, "1")


def test_a_budget_that_ends_before_the_first_bound_says_so(solver: Solver, space: Space) -> None:
    """What it has not looked at may be faster than anything."""
    many = space_of(solver.request, solver.machine)
    assert len(many.arrangements) > OF_A_TASK >= len(space.arrangements) - 1
    outcome = Search(solver, many, keep=3, budget_s=0.0).run()
    assert outcome.least_seconds == 0.0
    assert outcome.answers


@pytest.mark.matrix
def test_more_memory_more_layouts_and_faster_links_are_never_worse(
    solver: Solver, space: Space, memory: Memory
) -> None:
    first = Search(solver, space, keep=1, memory=dict(memory)).run().answers[0]
    held = sorted(node.bytes_per_device for nodes in memory.values() for node in nodes if node.level == "choice")
    less = with_memory(solver, held[len(held) // 4])
    with_less = Search(less, space, keep=1).run().answers
    assert not with_less or with_less[0].seconds >= first.seconds * (1 - SAME)
    of_fewer = Search(solver, replace(space, arrangements=space.arrangements[1:]), keep=1, memory=dict(memory)).run()
    assert of_fewer.answers[0].seconds >= first.seconds * (1 - SAME)
    slower = Search(with_links(solver, 0.5), space, keep=1).run().answers
    assert slower[0].seconds >= first.seconds * (1 - SAME)


def with_links(solver: Solver, share: float) -> Solver:
    """The machine with a share of the rate of the links between its nodes."""
    numbers = solver.machine.numbers
    assert numbers is not None
    rates = {
        name: replace(number, used=replace(number.used, value=number.used.value * share))
        if name == "scale_out_bytes_per_s"
        else number
        for name, number in numbers.numbers.items()
    }
    assert rates != dict(numbers.numbers), list(numbers.numbers)
    return replace(solver, machine=replace(solver.machine, numbers=replace(numbers, numbers=rates)))
