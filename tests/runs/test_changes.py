"""Options that change where a run goes on: what is allowed, said, recorded, and which rows are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright import Request, load_layout, make_plan, model_table
from shardwright.checkpoint import OwnedBox, latest
from shardwright.core.findings.errors import InputError
from shardwright.core.plan.plan import Plan
from shardwright.data import Batch, read_corpus, read_tokenizer
from shardwright.data.batches import stream
from shardwright.data.packing import Rows
from shardwright.layouts import load_recipe
from shardwright.runs import HeldReplica, StepMetrics, run
from shardwright.runs.run import _run
from shardwright.training.options import RunOptions, RunOutcome, Silent
from tests.runs.counting import LENGTH, NOBODY, ROWS, Counting, made, options
from tests.runs.test_group import each, together
from tests.runs.test_run import contents


class Reading(Counting):
    """Keeps the tokens of every step, and saves nothing of them."""

    def __init__(self, offsets: Sequence[int] = range(ROWS)) -> None:
        super().__init__(range(ROWS), {"reading": "1"})
        self.offsets: Sequence[int] = offsets
        self.read: list[np.ndarray] = []

    def step(self, batch: Batch, before_update: Callable[[], None]) -> StepMetrics:
        before_update()
        self._step += 1
        self.read.append(batch.arrays["tokens"])
        return StepMetrics(loss=1 / self._step, grad_norm=1.0, tokens=1)

    def replicas(self) -> Iterator[OwnedBox]:
        yield from ()

    def weight_replicas(self) -> Iterator[HeldReplica]:
        yield from ()

    def boxes(self) -> Iterator[OwnedBox]:
        return (one for one in super().boxes() if one.box.stop[0] <= ROWS)


def plan_of(batch: int = ROWS, length: int = LENGTH) -> Plan:
    request = Request(
        layout=load_layout("fsdp"),
        table=model_table("llama3-test"),
        batch=batch,
        length=length,
        mesh_sizes={"fsdp": 2},
    )
    return make_plan(request)


def went(run_options: RunOptions, engine: Reading, plan: Plan, **changes: Any) -> tuple[RunOutcome, list[str]]:
    shown = Silent()
    return run(
        replace(run_options, **changes), plan, shown, connection=NOBODY, make_engine=made(engine)
    ), shown.messages


def rows(data: str, seed: int, length: int, first: int, stop: int) -> np.ndarray:
    corpus = read_corpus(data, read_tokenizer(None, vocabulary=2048))
    ordered = stream(Rows(corpus=corpus, length=length), seed)
    return np.stack([row["tokens"] for number in range(first, stop) if (row := ordered[number])])


def other_text(folder: Path) -> str:
    path = folder / "other.txt"
    path.write_text("".join(f"{number**3}: another text\n" for number in range(150)))
    return str(path)


@pytest.fixture
def stopped(tmp_path: Path) -> RunOptions:
    """Of a run of six steps that was stopped after two."""
    run_options = options(tmp_path)
    went(run_options, Reading(), plan_of(), stop_after=2)
    return run_options


def metadata(out: Path) -> dict[str, Any]:
    found = latest(out).checkpoint
    assert found is not None
    return dict(found.point.metadata)


def test_another_batch_goes_on_at_the_next_row(stopped: RunOptions) -> None:
    engine = Reading(range(6))
    ended, said = went(stopped, engine, plan_of(batch=6), resume=True, change=("batch",))
    assert said[-1] == "batch: was 4, is 6; step 3 reads rows 8 to 13"
    np.testing.assert_array_equal(np.concatenate(engine.read), rows(stopped.data, 3, LENGTH, 8, 8 + 4 * 6))
    assert [change.to_json() for change in ended.changes] == [{"step": 2, "name": "batch", "was": 4, "is": 6}]
    assert ended.to_json()["changes"] == metadata(stopped.out)["changes"]


@pytest.mark.parametrize(
    ("names", "seed", "length"), [(["data"], 3, LENGTH), (["seed"], 4, LENGTH), (["data", "length", "seed"], 9, 24)]
)
def test_other_rows_begin_at_row_0_and_are_not_begun_again(
    names: list[str], seed: int, length: int, stopped: RunOptions, tmp_path: Path
) -> None:
    data = other_text(tmp_path) if "data" in names else stopped.data
    again = replace(stopped, data=data, seed=seed, resume=True, change=tuple(names))
    first, second = Reading(), Reading()
    _, said = went(again, first, plan_of(length=length), stop_after=4)
    assert all(line.endswith("; rows begin again: step 3 reads rows 0 to 3") for line in said[-len(names) :])
    # The same command, as a job that was ended starts again: nothing changes now.
    _, said = went(again, second, plan_of(length=length))
    assert all(line.endswith(f" as before, so --change {name} changes nothing") for name, line in zip(names, said[-len(names):], strict=True))  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(first.read + second.read), rows(data, seed, length, 0, 16))
    assert [one["name"] for one in metadata(stopped.out)["changes"]] == sorted(
        names, key=["length", "data", "seed"].index
    )
    # Without --change, as the run is now; as it was before, it is another run.
    went(replace(again, change=()), Reading(), plan_of(length=length))
    with pytest.raises(InputError, match="going on would be another run"):
        went(stopped, Reading(), plan_of(), resume=True)


def test_what_a_schedule_does_next_is_said(stopped: RunOptions) -> None:
    changes: dict[str, Any] = {"lr": 1e-4, "steps": 4, "warmup": 1, "weight_decay": 0.0, "clip": 2.0}
    named = ("steps", "lr", "weight-decay", "clip", "warmup", "batch")
    _, said = went(stopped, Reading(), plan_of(), resume=True, change=named, **changes)
    # After 2 of 6 steps without a warm-up, and after 2 of 4 with one: a cosine from the peak to a tenth of it.
    was = 3e-4 * (0.1 + 0.9 * (1 + np.cos(np.pi * 2 / 6)) / 2)
    now = 1e-4 * (0.1 + 0.9 * (1 + np.cos(np.pi * 2 / 3)) / 2)
    rate = f"the learning rate of step 3 is {now:.6g}, and would have been {was:.6g}"
    assert said[-6:] == [
        f"steps: was 6, is 4; {rate}",
        f"lr: was 0.0003, is 0.0001; {rate}",
        "weight-decay: was 0.1, is 0.0; from step 3 on",
        "clip: was 1.0, is 2.0; from step 3 on",
        f"warmup: was 0, is 1; {rate}",
        "batch: is 4 as before, so --change batch changes nothing",
    ]
    assert metadata(stopped.out)["lr"] == 1e-4


def test_changes_add_up(stopped: RunOptions) -> None:
    went(stopped, Reading(), plan_of(), resume=True, change=("lr",), lr=1e-4, stop_after=3)
    ended, _ = went(stopped, Reading(), plan_of(), resume=True, change=("lr", "clip"), lr=1e-5, clip=0.5, stop_after=4)
    needed = [
        {"step": 2, "name": "lr", "was": 3e-4, "is": 1e-4},
        {"step": 3, "name": "lr", "was": 1e-4, "is": 1e-5},
        {"step": 3, "name": "clip", "was": 1.0, "is": 0.5},
    ]
    assert ended.to_json()["changes"] == metadata(stopped.out)["changes"] == needed
    # Back to a step before the last change: that change is not recorded there.
    went(stopped, Reading(), plan_of(), resume_from=3, lr=1e-4)
    assert metadata(stopped.out)["changes"] == needed[:1]


ANOTHER = "{} was saved by a run with other options or text; going on would be another run:\n"
SAME = "\nGive the same options, or another --out. The layout and the mesh may change."


@pytest.mark.parametrize(
    ("changes", "message"),
    {
        "one that is not named": (
            {"lr": 1e-4, "steps": 8, "change": ("steps",)},
            ANOTHER + "  lr: was 0.0003, is 0.0001; --lr 0.0003 keeps it" + SAME + " So may lr, with --change steps,lr.",
        ),
        "two": (
            {"weight_decay": 0.0, "clip": 2.0},
            ANOTHER + "  weight-decay: was 0.1, is 0.0; --weight-decay 0.1 keeps it\n  clip: was 1.0, is 2.0; --clip 1.0 keeps it"
            + SAME + " So may weight-decay and clip, with --change weight-decay,clip.",
        ),
        "a schedule that is over": (
            {"steps": 1, "change": ("steps",)},
            "--steps is 1, and 2 steps are done. Give at least as many, or go back with --resume-from.",
        ),
    }.values(),
)  # fmt: skip
def test_refused(changes: dict[str, Any], message: str, stopped: RunOptions) -> None:
    before = contents(stopped.out)
    with pytest.raises(InputError) as caught:
        went(stopped, Reading(), plan_of(), resume=True, **changes)
    assert str(caught.value) == message.format(stopped.out / "checkpoints/step-00000002")
    assert contents(stopped.out) == before


def test_what_may_not_change_has_no_such_offer(stopped: RunOptions) -> None:
    request = replace(plan_of().request, weights_dtype="bfloat16")
    with pytest.raises(InputError) as caught:
        went(stopped, Reading(), make_plan(request), resume=True, change=("lr",))
    assert str(caught.value) == (
        ANOTHER.format(stopped.out / "checkpoints/step-00000002")
        + "  weights_dtype: was 'float32', is 'bfloat16'"
        + SAME
    )


@pytest.mark.parametrize(("before", "after"), [(None, "mxfp8"), ("mxfp8", None), ("mxfp8", "fp8-row")])
def test_the_recipe_of_low_precision_may_not_change(tmp_path: Path, before: str | None, after: str | None) -> None:
    """Nor be left out: the run would go on in another precision."""

    def plan_by(recipe: str | None) -> Plan:
        return make_plan(replace(plan_of().request, precision=None if recipe is None else load_recipe(recipe)))

    run_options = options(tmp_path)
    went(run_options, Reading(), plan_by(before), stop_after=2)
    with pytest.raises(InputError) as caught:
        went(run_options, Reading(), plan_by(after), resume=True)
    assert f"precision: was {before!r}, is {after!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "resume", "message"),
    [
        (("lrr",), True, "--change lrr: 'lrr' may not change. Did you mean 'lr'?"),
        (("lr", "model"), True, "--change lr,model: 'model' may not change. Known: lr, warmup, steps, weight-decay, clip, average, batch, length, data, seed."),
        (("",), True, "--change : '' may not change. Known: lr, warmup, steps, weight-decay, clip, average, batch, length, data, seed."),
        (("lr",), False, "--change is for a run that goes on. Give --resume too, or leave it out."),
    ],
)  # fmt: skip
def test_names(change: tuple[str, ...], resume: bool, message: str) -> None:
    with pytest.raises(InputError) as caught:
        RunOptions(steps=1, out=Path("out"), change=change, resume=resume)
    assert str(caught.value) == message


def test_a_run_that_saved_nothing_has_nothing_to_change(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    run_options.out.mkdir()
    (run_options.out / "metrics.jsonl").write_text("")
    ended, said = went(run_options, Reading(), plan_of(), resume=True, change=("lr",), lr=1e-4)
    assert "--change lr changes nothing: the run begins with the options as they are given" in said
    assert ended.changes == ()


def test_a_manifest_that_says_anything(stopped: RunOptions) -> None:
    """Its digest is right, and its values are not those of a run."""
    from tests.checkpoint.editing import edit_manifest

    odd = {
        "lr": "\x1b[2J",
        "warmup": 10**30,
        "changes": [1, {"step": "2"}, {"step": 1, "name": "lr", "was": 0, "is": 1}],
    }
    edit_manifest(stopped.out / "checkpoints/step-00000002", lambda value: value["metadata"].update(odd))
    ended, said = went(stopped, Reading(), plan_of(), resume=True, change=("lr", "warmup"))
    assert said[-2].startswith("lr: was \\x1b[2J, is 0.0003; the learning rate of step 3 is ")
    assert [change.name for change in ended.changes] == ["lr", "lr", "warmup"]


def test_processes_must_name_the_same_changes(stopped: RunOptions) -> None:
    engines = [Reading(range(2)), Reading(range(2, 4))]
    lr = replace(stopped, resume=True, lr=1e-4, change=("lr",))
    with together(2) as groups:
        errors = each(
            groups,
            lambda group: _run(
                lr if group.index == 0 else replace(lr, change=("lr", "clip")),
                plan_of(),
                Silent(),
                group,
                made(engines[group.index]),
            ),
        )
    assert [str(error) for error in errors] == [
        "before the first step: the 2 processes of this run do not agree:\n"
        "  change: ['lr'] in process 0, ['lr', 'clip'] in process 1\n"
        "Give all of them the same command, text and files. Nothing was started."
    ] * 2


def test_both_processes_begin_the_rows_again(stopped: RunOptions, tmp_path: Path) -> None:
    engines = [Reading(range(2)), Reading(range(2, 4))]
    again = replace(stopped, resume=True, data=other_text(tmp_path), change=("data",), stop_after=3)
    with together(2) as groups:
        each(groups, lambda group: _run(again, plan_of(), Silent(), group, made(engines[group.index])))
    np.testing.assert_array_equal(
        np.concatenate([engine.read[0] for engine in engines]), rows(again.data, 3, LENGTH, 0, 4)
    )


def test_json_has_the_changes(stopped: RunOptions) -> None:
    ended, _ = went(stopped, Reading(), plan_of(), resume=True, change=("lr",), lr=1e-4)
    assert json.loads(json.dumps(ended.to_json()))["changes"][0]["name"] == "lr"
