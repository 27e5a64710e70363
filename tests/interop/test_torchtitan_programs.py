"""A configuration in Python is read with the values that running it gives, or refused with the position.

The oracle is Python: each program is run too, with TorchTitan's two sections as dataclasses.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import types

import pytest

from shardwright import InputError
from shardwright.interop.torchtitan.importing import TorchTitanRequest, import_torchtitan
from shardwright.interop.torchtitan.reading import parse_section
from shardwright.interop.torchtitan.vocabulary import DEGREES, SEQUENCE, TRAINING
from tests.conftest import ROOT
from tests.interop.torchtitan_programs import HEAD, READ, REFUSED


def program(body: str) -> str:
    return f"{HEAD}def mine():\n    {body}\n"


@pytest.fixture(scope="module")
def stand_ins():
    """Stand-ins for the names of TorchTitan that the programs use."""
    make = dataclasses.make_dataclass
    sections = {
        "ParallelismConfig": {**DEGREES, SEQUENCE: True, "num_pp_microbatches": 1},
        "TrainingConfig": TRAINING,
    }
    made = {
        name: make(
            name, [(key, object, dataclasses.field(default=value)) for key, value in fields.items()], kw_only=True
        )
        for name, fields in sections.items()
    }
    config = make(
        "Config",
        [
            ("model_spec", object, dataclasses.field(default=None)),
            ("hf_assets_path", object, dataclasses.field(default="")),
            ("parallelism", object, dataclasses.field(default_factory=made["ParallelismConfig"])),
            ("training", object, dataclasses.field(default_factory=made["TrainingConfig"])),
        ],
        kw_only=True,
        namespace={"__post_init__": lambda _: None},
    )
    modules = {
        "torchtitan": {},
        "config_registry": {},
        "torchtitan.config": made,
        "torchtitan.trainer": {"Trainer": type("Trainer", (), {"Config": config})},
        "torchtitan.models": {},
        "torchtitan.models.llama3": {"model_registry": lambda name: name},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, content in modules.items():
            module = types.ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        yield


def run(text: str):
    """The options of parallelism and of a step after running the program."""
    names: dict = {"__name__": "config_registry"}
    exec(compile(text, "mine.py", "exec"), names)
    config = names["mine"]()
    return vars(config.parallelism), vars(config.training)


def read(text: str):
    found = parse_section(text, "mine.py", "mine")
    options = {name: found.degree(name) for name in DEGREES}
    return {**options, SEQUENCE: found.sequence_parallel, "num_pp_microbatches": found.microbatches}, dict(
        found.training
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", READ)
def test_a_program_is_read_as_it_runs(name):
    text = program(READ[name])
    assert read(text) == run(text)


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_must_run_is_refused(name):
    with pytest.raises(InputError, match=r"^mine\.py:\d+:\d+: .*(run|known)"):
        read(program(REFUSED[name]))


@pytest.mark.usefixtures("stand_ins")
def test_random_programs_are_read_as_they_run():
    """Sequences of statements like those above, over three names that may be the same object."""
    draw = random.Random(11)
    for _ in range(150):
        lines = ["a, b = base(2), base(4)", "c = a"]
        for _ in range(draw.randrange(1, 9)):
            x, y = draw.choice("abc"), draw.choice("abc")
            degree, size = draw.choice(list(DEGREES)), draw.choice((1, 2, 4, 8))
            lines.append(
                draw.choice(
                    (
                        f"{x} = {y}",
                        f"{x} = copy.copy({y})",
                        f"{x} = copy.deepcopy({y})",
                        f"{x}.parallelism = {y}.parallelism",
                        f"{x}.parallelism.{degree} = {size}",
                        f"{x}.parallelism = replace({y}.parallelism, {degree}={size})",
                        f"{x} = replace({y}, parallelism=ParallelismConfig({degree}={size}))",
                        f"setattr({x}.parallelism, '{degree}', {y}.parallelism.{degree} + {size})",
                        f"if {x}.parallelism.{degree} > {size}: {y}.training.max_context_length = {size}",
                        f"{x} = [each for each in (a, b, c) if each.parallelism.{degree} <= 8 or True][{draw.randrange(3)}]",
                    )
                )
            )
        text = program("\n    ".join([*lines, f"return {draw.choice('abc')}"]))
        assert read(text) == run(text), text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            REFUSED["a choice of the machine"],
            "mine.py:21:9: 'tensor_parallel_degree' is computed by the program, which is parsed and not run: it is not known "
            "whether 'c.parallelism.tensor_parallel_degree' runs. Write a number.",
        ),
        (
            REFUSED["handed to another file"],
            "mine.py:20:5: 'parallelism' is not known without running the program: 'tune' may change it, and is not in the file.",
        ),
        (
            REFUSED["made by another file"],
            "mine.py:19:12: 'mine' is not known without running the program: 'tune' is not in the file.",
        ),
        ("raise ValueError(3)", "mine.py:19:5: the program ends here with ValueError(3)."),
        ("return 3", "mine.py: 'mine' builds no ParallelismConfig."),
    ],
)
def test_full_texts(body, message):
    with pytest.raises(InputError) as refused:
        read(program(body))
    assert str(refused.value).split("\n")[0] == message


def test_a_function_that_needs_arguments():
    with pytest.raises(InputError) as refused:
        parse_section("def f(tp, *, cp):\n    pass\n", "a.py", "f")
    assert str(refused.value) == "a.py: 'f' needs arguments: tp, cp. Name a function that needs none."
    with pytest.raises(InputError) as refused:
        parse_section(program("return base()"), "mine.py", "mien")
    assert str(refused.value) == "mine.py: no function 'mien'. It has: base, mine."


def test_names_of_files_in_the_same_folder_are_read_too(tmp_path):
    (tmp_path / "base.py").write_text(HEAD)
    (tmp_path / "mine.py").write_text("from base import base\n\ndef mine():\n    return base(4)\n")
    assert import_torchtitan(TorchTitanRequest(file=str(tmp_path / "mine.py"), devices=8)).degrees.sizes["tp"] == 4
    (tmp_path / "base.py").write_text("def base(:\n")
    with pytest.raises(InputError, match=r"'mine' is not known.*base\.py:1:10: not Python: invalid syntax\.\n"):
        import_torchtitan(TorchTitanRequest(file=str(tmp_path / "mine.py"), config="mine", devices=8))


def test_a_program_without_end_is_refused():
    text = (
        "def f(n=0):\n" + "    for a in range(100):\n     for b in range(100):\n      for c in range(100): n = n + 1\n"
    )
    with pytest.raises(InputError, match=r"^a\.py: too long to read without running it: more than 200,000 steps"):
        parse_section(text, "a.py", "f")


REGISTRY = json.loads((ROOT / "tests" / "interop" / "torchtitan_registry.json").read_text())
"""Module, function, degrees in the order of ``DEGREES``, sequence parallelism, microbatches, tokens and model of every registered
configuration, as running it gives them (pytorch/torchtitan b5bcd76c6): only numbers, none of its text."""


def table_line(module, function, sizes, sequence, microbatches, training, model, folder) -> str:
    """The result of ``import torchtitan`` for these numbers on 64 ranks, as a line of docs/torchtitan.md."""
    options = {**dict(zip(DEGREES, sizes, strict=True)), SEQUENCE: sequence, "num_pp_microbatches": microbatches}
    section = {} if training is None else {"training": dict(zip(TRAINING, training, strict=True))}
    (folder / "a.json").write_text(json.dumps({"parallelism": options, **section}))
    product = sizes[0] * sizes[1] * abs(sizes[2]) * sizes[3] * sizes[4]
    found = import_torchtitan(TorchTitanRequest(file=str(folder / "a.json"), devices=64 if sizes[2] == -1 else product))
    mesh = " ".join(f"{axis} {size}" for axis, size in (found.mesh.shape if found.mesh else {}).items())
    rows = "-" if found.rows is None else f"{found.rows.batch} x {found.rows.length:,}"
    return f"| {module} | `{function}` | {model} | {mesh} | {rows} |"


def test_the_table_of_all_registered_configurations(tmp_path):
    shown = (ROOT / "docs" / "torchtitan.md").read_text(encoding="utf-8")
    made = "\n".join(table_line(*row, tmp_path) for row in REGISTRY)
    assert made in shown, "regenerate docs/torchtitan.md: python -m tests.interop.torchtitan_table"
    assert len(REGISTRY) == 120
