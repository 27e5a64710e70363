"""``plan`` and ``train`` agree: what a plan has no error of begins, and what does not begin is an error of the plan, in the
same words. Every preset, family and engine; then option sets that nobody wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

import shardwright.engine_jax.compile.compiling as jax_compiling
import shardwright.engine_jax.training.run as jax_run
import shardwright.engine_torch.dry_run.dry_run as torch_dry_run
import shardwright.engine_torch.training.run as torch_run
from shardwright import FindingsError, Plan, ShardwrightError, make_plan
from shardwright.cli import plan as plan_verb
from shardwright.cli.main import main
from shardwright.cli.running import train as train_verb
from shardwright.cli.typed.options import PlanOptions, TrainOptions
from shardwright.cli.typed.request import TypedRequest, planned, typed_request
from shardwright.cli.typed.verbs import PlanVerb, TrainVerb
from shardwright.cost import read_machine
from shardwright.layouts import preset_names
from shardwright.training.options import RunOptions, RunOutcome
from tests.cli.drawn import build, drawn
from tests.golden.engine_cases import ON_ENGINES
from tests.golden.findings_case import request
from tests.sameness.cases import MESHES

Question = tuple[str, str | None, PlanOptions]

FAMILIES = {"llama3-test": "", "llama3-test ": "tied=true", "mixtral-test": "", "deepseek3-test": ""}
"""Models with settings; the second one's embedding is tied, as that of llama3-1b is."""

SIZES = {**MESHES, "pp": ("stage=2,fsdp=2", "stage=1,fsdp=4")}
SEEDS = range(25)


def questions() -> Iterator[Question]:
    """Each preset for each model on each engine, the meshes of a preset in turn."""
    for number, (model, settings) in enumerate(FAMILIES.items()):
        for name in preset_names():
            for turn, engine in enumerate(("jax", "torch")):
                mesh = SIZES[name][(number + turn) % 2]
                options = PlanOptions(
                    mesh=mesh,
                    engine=engine,
                    batch=16,
                    length=64,
                    microbatches=2,
                    set=((settings,),) if settings else (),
                )
                yield model.strip(), name, options


class BegunError(Exception):
    """What an engine does instead of beginning."""


@pytest.fixture(autouse=True)
def _engines_that_only_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines up to what follows their gate: a run, or the ranks of one."""

    def begin(*_arguments: object, **_options: object) -> RunOutcome:
        raise BegunError

    monkeypatch.setattr(jax_run, "run", begin)
    monkeypatch.setattr(torch_run, "run", begin)
    monkeypatch.setattr(train_verb, "launch", begin)


def said_by_plan(question: Question, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[dict], Plan]:
    """The exit code of ``plan``, the errors that it prints, and the plan, which ``train`` is given too."""
    model, layout, options = question
    made = planned(typed_request(model, layout, options))

    def once(_: TypedRequest) -> Plan:
        return made

    monkeypatch.setattr(plan_verb, "planned", once)
    monkeypatch.setattr(train_verb, "planned", once)
    shown = StringIO()
    with redirect_stdout(shown):
        code = plan_verb.run_plan(PlanVerb(model=model, layout=layout, plan=replace(options, json=True)))
    return code, [one for one in json.loads(shown.getvalue())["findings"] if one["severity"] == "error"], made


def said_by_train(question: Question, out: Path) -> tuple[int, list[dict]]:
    """The exit code of ``train``, 0 where the engine begins, and the findings that it ends with."""
    model, layout, options = question
    verb = TrainVerb(model=model, layout=layout, plan=replace(options, json=True), run=TrainOptions(steps=1, out=out))
    try:
        train_verb.run_train(verb, [])
    except BegunError:
        return 0, []
    except FindingsError as error:
        return error.exit_code, [finding.to_json() for finding in error.findings]
    raise AssertionError("neither begun nor refused")


def assert_agree(question: Question, out: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    code, errors, plan = said_by_plan(question, monkeypatch)
    assert said_by_train(question, out) == (code, errors), question
    assert code == (1 if errors else 0)
    return plan


def test_every_preset_for_every_family_on_both_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {}
    for question in questions():
        plan = assert_agree(question, tmp_path, monkeypatch)
        if plan.errors:
            refused[question] = [finding.code for finding in plan.errors]
    assert refused == {}


def test_random_option_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    green = []
    for seed in SEEDS:
        try:
            plan = assert_agree(drawn(seed).question(tmp_path), tmp_path, monkeypatch)
        except ShardwrightError:
            continue
        if not plan.errors:
            green.append((seed, plan))
    # ``python -m tests.cli.drawn`` builds as many as one likes.
    for _, plan in green[:4]:
        build(plan)
    assert len(green) >= 10


def _jax_train(plan: Plan) -> object:
    return jax_run.JaxEngine(RunOptions(steps=1, out=Path("nowhere")), plan)


def _jax_lower(plan: Plan) -> object:
    return jax_compiling.lower_step(plan, read_machine("cpu:8"))


def _torch_train(plan: Plan) -> object:
    return torch_run.train(RunOptions(steps=1, out=Path("nowhere")), plan)


GATES: dict[str, tuple[Callable[[Plan], object], ...]] = {
    "jax": (_jax_train, _jax_lower),
    "torch": (_torch_train, torch_dry_run.dry_run),
}


@pytest.mark.parametrize("case", ON_ENGINES, ids=lambda case: case.name)
def test_an_engine_refuses_what_its_plan_says_and_nothing_else(case) -> None:
    plan = make_plan(request(case))
    for begin in GATES[plan.request.engine]:
        with pytest.raises(FindingsError) as refused:
            begin(plan)
        assert refused.value.findings == plan.errors
        assert str(refused.value) == "\n\n".join(finding.text() for finding in plan.errors)


VERBS = {
    "plan": (["plan"], 1),
    "train": (["train", "--steps", "1", "--out", "run"], 1),
    "lock": (["lock"], 0),
}


OF_THE_OTHER_ENGINE = {"jax": "1f1b", "torch": "circular"}
"""A schedule that an engine does not run."""


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_a_lock_does_not_depend_on_what_the_engine_runs(engine: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    roles = f"roles: {{stage: {{elsewhere: stage, schedule: {OF_THE_OTHER_ENGINE[engine]}}}, fsdp: fsdp}}\n"
    Path("mine.yaml").write_text("name: mine\nmesh: {stage: 2, fsdp: auto}\n" + roles, encoding="utf-8")
    asks = ["llama3-test", "--layout", "mine.yaml", "--devices", "8", "--microbatches", "2", "--engine", engine]
    for words, code in VERBS.values():
        assert main([words[0], *asks, *words[1:]]) == code
    out, err = capsys.readouterr()
    assert out.count("error SW415") == 2
    assert err == "shardwright: the plan has errors, so nothing was started.\n"
    assert main(["check", "llama3-test.mine.lock.json"]) == 0
    assert main(["diff", "llama3-test.mine.lock.json", "fsdp"]) == 0
