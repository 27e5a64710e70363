"""Stages of TorchTitan's pipelines: its formula, its schedules, and what it or a plan refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from shardwright.cli.main import main
from shardwright.core.stages.notation import read_stages
from shardwright.interop.torchtitan.importing import TorchTitanImport, TorchTitanRequest, import_torchtitan


def imported(
    folder: Path, lines: str, pp: int = 4, model: str | None = "llama3-8b", devices: int = 16
) -> TorchTitanImport:
    path = folder / "a.toml"
    path.write_text(f"[parallelism]\npipeline_parallel_degree = {pp}\n{lines}\n")
    return import_torchtitan(TorchTitanRequest(file=str(path), model=model, devices=devices))


def split(layers: int, number: int, first: int, last: int) -> list[str]:
    """Slots of ends and layers, split into parts of which the first ones are longer, as NumPy splits."""
    slots = ["E"] * first + ["t"] * layers + ["L"] * last
    parts = ["".join(part) for part in np.array_split(np.array(slots), number)]
    ends = "E" if "E" not in parts[0] else "", "L" if "L" not in parts[-1] else ""
    parts[0], parts[-1] = ends[0] + parts[0], parts[-1] + ends[1]
    return [part.replace("E" * max(1, first), "E").replace("L" * max(1, last), "L") for part in parts]


@pytest.mark.parametrize(
    ("lines", "pp", "schedule", "virtual", "first", "last"),
    [
        ("", 4, "1f1b", 1, 1, 1),
        ("pipeline_parallel_schedule = 'Interleaved1F1B'", 4, "interleaved", 2, 1, 1),
        (
            "pipeline_parallel_schedule = 'interleaved1f1b'\npipeline_parallel_layers_per_stage = 3",
            4,
            "interleaved",
            3,
            1,
            1,
        ),
        ("pipeline_parallel_schedule = 'ZBVZeroBubble'", 2, "zbv", 2, 1, 1),
        (
            "pipeline_parallel_schedule = 'DualPipeV'\npipeline_parallel_last_stage_less_layers = 2",
            4,
            "dualpipev",
            2,
            1,
            2,
        ),
        (
            "pipeline_parallel_first_stage_less_layers = 0\npipeline_parallel_last_stage_less_layers = 3",
            8,
            "1f1b",
            1,
            0,
            3,
        ),
        ("pipeline_parallel_layers_per_stage = 9", 4, "1f1b", 1, 1, 1),
    ],
)
def test_layers_are_those_of_its_formula(
    tmp_path, lines: str, pp: int, schedule: str, virtual: int, first: int, last: int
):
    found = imported(tmp_path, lines, pp)
    assert found.stages is not None, found.findings
    assert found.stages.units is not None
    assert list(read_stages(found.stages.units)) == split(32, pp * virtual, first, last)
    assert (found.stages.schedule, found.stages.virtual) == (schedule, virtual)
    assert found.plan is not None
    assert found.plan.pipeline is not None
    assert not [one for one in found.findings if one.severity == "error"]
    choice = found.plan.pipeline.choice
    assert (choice.text, choice.schedule, choice.virtual) == (found.stages.units, schedule, virtual)
    # Its stages of a rank: rank + k * pp, or in a V rank and 2 * pp - 1 - rank.
    for rank in range(pp):
        loop = [rank + k * pp for k in range(virtual)]
        expected = [rank, 2 * pp - 1 - rank] if schedule in ("zbv", "dualpipev") else loop
        assert [stage.number for stage in found.plan.pipeline.of_rank(rank)] == expected


def test_modules_of_each_stage(tmp_path):
    layers = [f"layers.{number}" for number in range(32)]
    parts = [["tok_embeddings", *layers[:5]], layers[5:14], layers[14:23], [*layers[23:], "norm", "output"]]
    found = imported(tmp_path, f"module_fqns_per_model_part = {json.dumps(parts)}")
    assert found.stages is not None
    assert found.stages.units == "Et*5|(t*9|)*2t*9L"
    assert found.plan is not None
    assert found.plan.pipeline is not None
    assert not [one for one in found.findings if one.severity == "error"]


@pytest.mark.parametrize(
    ("lines", "found", "fix"),
    [
        ("pipeline_parallel_schedule = '2F2B'", "'2F2B'", ""),
        ("pipeline_parallel_schedule = 3", "3", ""),
        ("pipeline_parallel_layers_per_stage = 0", "0", ""),
        (
            "pipeline_parallel_layers_per_stage = 5",
            "5, which makes 7 stages of 32 layers and their ends on 4 ranks",
            "Write 'pipeline_parallel_layers_per_stage = 9'.",
        ),
        ("pipeline_parallel_last_stage_less_layers = 12", "12, and a stage has 11 of 45", ""),
        (
            "pipeline_parallel_schedule_csv = 'mine.csv'",
            "'mine.csv': a timetable or a split of the user's own",
            "Take 'pipeline_parallel_schedule_csv' out.",
        ),
        ("module_fqns_per_model_part = 'all'", "'all'", ""),
        ("module_fqns_per_model_part = [['tok_embeddings'], [], ['norm', 'output']]", "no module in stage 1", ""),
        (
            "module_fqns_per_model_part = [['tok_embeddings', 'layers.1'], ['layers.0'], ['norm', 'output']]",
            "'layers.1' where 'layers.0' is next",
            "",
        ),
        (
            "module_fqns_per_model_part = [['tok_embeddings'], ['layers.0', 'rope'], ['norm', 'output']]",
            "module 'rope'",
            "",
        ),
        ("module_fqns_per_model_part = [['tok_embeddings'], ['norm'], ['output']]", "['norm']", ""),
        ("module_fqns_per_model_part = [['tok_embeddings'], ['norm', 'output']]", "2 stages on 4 ranks", ""),
    ],
)
def test_what_is_no_pipeline_is_one_finding(tmp_path, lines: str, found: str, fix: str):
    result = imported(tmp_path, lines)
    assert result.stages is None
    wrong = [one for one in result.findings if one.code in ("SW110", "SW123") and one.severity == "error"]
    assert [(one.found, one.fix) for one in wrong] == [(found, fix)]
    assert wrong[0].where.strip("'") == lines.partition(" ")[0]
    assert wrong[0].position is not None
    assert wrong[0].position.line == 3


def test_passes_that_accumulate_become_one_timetable(tmp_path):
    training = "[training]\nlocal_batch_size = 8\nseq_len = 128\nglobal_batch_size = {}"
    several, one = (
        imported(tmp_path, f"pipeline_parallel_microbatch_size = 2\n{training.format(rows)}") for rows in (96, 32)
    )
    [found] = [one for one in several.findings if one.code == "SW123" and "passes" in one.found]
    assert several.rows is not None
    assert (several.rows.passes, several.rows.microbatches) == (3, 12)
    assert found.severity == "info"
    assert found.found.startswith("3 passes in a step: TorchTitan runs the schedule for 4 microbatches in each")
    assert found.position is not None
    assert found.position.line == 7
    assert several.plan is not None
    assert several.plan.request.microbatches == 12
    assert not [each for each in one.findings if "passes" in each.found]


def test_without_a_model_the_schedule_is_known(tmp_path, capsys):
    found = imported(tmp_path, "pipeline_parallel_schedule = 'ZBVZeroBubble'", model=None)
    assert found.stages is not None
    assert found.stages.units is None
    assert found.layout is not None
    assert (found.layout.entries["pp"].schedule, found.layout.entries["pp"].virtual) == ("zbv", 2)
    assert main(["import", "torchtitan", str(tmp_path / "a.toml"), "--devices", "16", "--model", "llama3-8b"]) == 0
    assert "stages  zbv, 2 a rank: --stages 'Et*4|t*5|(t*4|)*5t*3L'" in " ".join(
        capsys.readouterr().out.split()
    ).replace("stages zbv", "stages  zbv")


@pytest.mark.parametrize(
    "options",
    [
        {"num_tokens_per_microbatch_per_dp_rank": 8192, "max_context_length": 2048, "num_pp_microbatches": 2},
        {"local_batch_size": 2, "pipeline_parallel_microbatch_size": 1},
        {"local_batch_size": 8, "pipeline_parallel_microbatch_size": 4},
    ],
)
def test_a_fix_for_microbatches_is_in_torchtitans_options_and_works(tmp_path, options: dict[str, int]):
    """A file is imported without our options for rows, so a fix with them could not be typed."""

    def errors(options: dict[str, int]) -> list[str]:
        training = {name: size for name, size in options.items() if not name.startswith(("num_pp", "pipeline"))}
        lines = [f"{name} = {size}" for name, size in options.items() if name not in training]
        lines += ["[training]", *(f"{name} = {size}" for name, size in training.items())]
        found = imported(tmp_path, "\n".join(lines)).findings
        return [one.fix or "" for one in found if one.severity == "error"]

    (fix,) = errors(options)
    changed = {name: int(size) for name, size in re.findall(r"(\w+) = (\d+)", fix)}
    assert changed.keys() <= options.keys()
    assert errors({**options, **changed}) == []
