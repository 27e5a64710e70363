"""The rules of a run: which of its checkpoints stay, with saves in the background, by two processes, and after damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint import describe, open_checkpoint
from shardwright.core.findings.errors import InputError
from shardwright.data import Batch
from shardwright.runs import StepMetrics, run
from shardwright.runs.run import _run
from shardwright.training.options import RunOptions, Silent
from tests.runs.counting import NOBODY, Counting, made, options, plan_of
from tests.runs.test_group import each, together
from tests.runs.test_run import by_two

LOSSES = (5.0, 2.0, 4.0, 3.0, 4.5, 4.25)


class Losing(Counting):
    """Its loss is ``LOSSES``, its gradient norm the step."""

    def step(self, batch: Batch, before_update: Callable[[], None]) -> StepMetrics:
        super().step(batch, before_update)
        return StepMetrics(loss=LOSSES[self._step - 1], grad_norm=float(self._step), tokens=1)


def losing() -> Losing:
    return Losing(range(4), {"losing": "1"})


def steps(out: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-????????"))


def went(run_options: RunOptions, **changes: Any) -> list[str]:
    shown = Silent()
    again = replace(run_options, checkpoint_every=1, **changes)
    run(again, plan_of(), shown, connection=NOBODY, make_engine=made(losing()))
    return shown.messages


RULES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "newest": ({"keep": 2}, [5, 6]),
    "multiples": ({"keep_every": 2}, [2, 4, 6]),
    "multiples beside the newest": ({"keep": 2, "keep_every": 3}, [3, 5, 6]),
    # All are saved within one hour, or two.
    "best": ({"keep_best": 2}, [2, 4, 6]),
    "best of another metric": ({"keep": 1, "keep_best": 1, "best_of": "grad_norm"}, [1, 6]),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("rules", RULES)
def test_what_stays(rules: str, asynchronous: bool, tmp_path: Path) -> None:
    given, needed = RULES[rules]
    run_options = options(tmp_path)
    went(run_options, async_checkpoints=asynchronous, **given)
    assert steps(run_options.out) == needed
    last = open_checkpoint(run_options.out / "checkpoints/step-00000006")
    assert last.point.metrics == {"loss": 4.25, "grad_norm": 6.0}
    assert [one["step"] for one in describe(run_options.out)["checkpoints"] if one["kept_by"]] == needed[::-1]


def test_hours_keep_the_first_one(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    went(run_options, keep_every_hours=1_000_000)
    assert steps(run_options.out) == [1, 6]


def test_two_processes(tmp_path: Path) -> None:
    engines = [Losing((0, 1), {"losing": "1"}), Losing((2, 3), {"losing": "1"})]
    by_two(tmp_path, list(engines), checkpoint_every=1, keep_best=1, async_checkpoints=True)
    assert steps(tmp_path / "out") == [2, 6]


def test_processes_with_other_rules_do_not_begin(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    with together(2) as groups:
        errors = each(
            groups,
            lambda group: _run(
                replace(run_options, keep_every=2 + group.index), plan_of(), Silent(), group, made(losing())
            ),
        )
    assert "  keep: {'every_steps': 2} in process 0, {'every_steps': 3} in process 1\n" in str(errors[0])


def flip(out: Path, step: int) -> None:
    (path,) = (out / f"checkpoints/step-{step:08d}").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def test_a_run_whose_newest_steps_are_damaged_goes_on_from_the_best(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    rules: dict[str, Any] = {"keep": 2, "keep_best": 1}
    went(run_options, stop_after=5, **rules)
    assert steps(run_options.out) == [2, 4, 5]
    flip(run_options.out, 5)
    flip(run_options.out, 4)
    said = went(run_options, resume=True, **rules)
    assert f"resumed from {run_options.out}/checkpoints/step-00000002 (layout fsdp)" in said
    assert steps(run_options.out) == [2, 5, 6]
    # What is damaged stays, under another name, whatever the rules.
    damaged = sorted(path.name.split("-")[1] for path in (run_options.out / "checkpoints").glob("*.damaged-*"))
    assert damaged == ["00000004.damaged", "00000005.damaged"]


def test_back_to_a_step_the_later_ones_do_not_count(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    went(run_options)
    went(run_options, resume_from=3, keep_best=1)
    # Those that were set aside are neither counted nor deleted.
    assert steps(run_options.out) == [2, 6]
    assert len(list((run_options.out / "checkpoints").glob("*.set-aside-*"))) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_every": 0}, "--keep-every is 0, and must be at least 1."),
        ({"keep_every_hours": -1}, "--keep-every-hours is -1, and must be at least 1."),
        ({"best_of": "loss"}, "--best-of is for --keep-best. Give both, or neither."),
        ({"keep_best": 1, "best_of": "speed"}, "--best-of is speed, and must be one of loss, grad_norm."),
    ],
)
def test_rules_that_keep_nothing(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        RunOptions(steps=1, out=tmp_path, **changes)
    assert str(caught.value) == message
