"""Options back to a command line: the arguments that type a run again, and those of a run that is resumed by its folder alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from shardwright.cli.arguments.declared import declaration
from shardwright.cli.typed.options import PlanOptions, TrainOptions
from shardwright.cli.typed.verbs import TrainVerb
from shardwright.core.findings.errors import InputError
from shardwright.training.started import RECORD_FILE, StartRecord, last_start

OF_ONE_START = frozenset(
    {
        "out",
        "stop_after",
        "resume",
        "resume_from",
        "change",
        "json",
        "coordinator",
        "processes",
        "process",
        "join_timeout",
        "stall_timeout",
        "besides",
        "training_only",
    }
)
"""What belongs to a command and not to its run: a run that goes on does not take it from the command before."""

PATHS = frozenset(
    {"--data", "--tokenizer", "--layout", "--weights", "--checkpoints", "--remat", "--precision", "--chips"}
)
"""Options whose value may be a path relative to the folder in which the run was started."""

DEVICES_FOLLOW = {
    "--layout": ("--mesh", "--devices", "--move", "--stages", "--schedule"),
    "--mesh": ("--devices", "--stages"),
    "--devices": ("--mesh", "--stages"),
    "--chips": ("--mesh", "--devices", "--stages"),
}
"""What else of the earlier command is left out where an option is typed again: sizes belong to a layout and to the devices."""


def arguments_of(verb: TrainVerb) -> list[str]:
    """The arguments that type this run again, in one form: the model, and each option that is not its default.

    >>> arguments_of(TrainVerb(model="llama3-test", run=TrainOptions(steps=6, out=Path("run"), seed=3)))
    ['llama3-test', '--steps', '6', '--seed', '3']
    """
    layout = [] if verb.layout is None else ["--layout", verb.layout]
    return [verb.model, *layout, *typed_options(verb.plan), *typed_options(verb.run)]


def with_options_of_its_run(arguments: Sequence[str]) -> list[str]:
    """``train --resume RUN`` without a model and --out, as the command line that goes on with the run in the folder RUN.

    Options that are typed besides take the place of the run's. Any other command line is returned as it is. Raises InputError where RUN
    is no folder of a run, or does not say its options.
    """
    line = list(arguments)
    arguments = [part for argument in line for part in _resumed(argument)]
    if arguments[:1] != ["train"] or "--resume" not in arguments or "--out" in map(_name, arguments):
        return line
    place = arguments.index("--resume") + 1
    if place == len(arguments) or arguments[place].startswith("--"):
        return line
    folder = arguments.pop(place)
    if not folder:
        raise InputError("--resume is empty. Give the folder of a run, its --out.")
    run = Path(folder)
    start = _start_of(run)
    typed = arguments[1:]
    model = [typed.pop(0)] if typed and not typed[0].startswith("--") else start.arguments[:1]
    names = {_name(argument) for argument in typed if argument.startswith("--")}
    left_out = names | {other for name in names for other in DEVICES_FOLLOW.get(name, ())}
    kept = [part for name, *values in _grouped(start.arguments[1:]) if name not in left_out for part in (name, *values)]
    # What was typed comes first: messages number it as it was typed, the model in the place of the folder.
    return ["train", *_from_here(model, start), *typed, *_from_here(kept, start), "--out", str(run)]


def _start_of(run: Path) -> StartRecord:
    if not run.is_dir():
        raise InputError(
            f"--resume {run}: there is no such folder. Give the folder of a run, its --out; or a model, --out and --resume without a value."
        )
    start = last_start(run)
    if start is None:
        raise InputError(
            f"--resume {run}: {run / RECORD_FILE} does not say with which options the run was started. Give them as they were: the model, "
            f"--steps and the others, with --out {run} --resume."
        )
    return start


def typed_options(options: PlanOptions | TrainOptions) -> Iterator[str]:
    """The options that are not their defaults, but for those of one start."""
    for field in fields(options):
        value = getattr(options, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name in OF_ONE_START or value == default:
            continue
        yield from _written(f"--{field.name.replace('_', '-')}", value)


def _written(option: str, value: Any) -> Iterator[str]:
    if value is True:
        yield option
    elif isinstance(value, tuple):
        for values in value:
            yield option
            yield from values
    else:
        yield option
        yield str(value)


def _resumed(argument: str) -> list[str]:
    """``--resume=RUN`` as two arguments, any other as it is."""
    option, equals, value = argument.partition("=")
    return [option, value] if option == "--resume" and equals else [argument]


def _name(argument: str) -> str:
    """The option of an argument; by its name, where the argument has a former one."""
    typed = argument.partition("=")[0].replace("_", "-")
    return next((option.name for option in declaration(TrainVerb).options if typed in option.former), typed)


def _grouped(arguments: Sequence[str]) -> list[list[str]]:
    """Each option with its values.

    >>> _grouped(["--steps", "6", "--set", "a=1", "b=2", "--json"])
    [['--steps', '6'], ['--set', 'a=1', 'b=2'], ['--json']]
    """
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--"):
            groups.append([argument])
        else:
            groups[-1].append(argument)
    return groups


def _from_here(arguments: Sequence[str], start: StartRecord) -> list[str]:
    """Paths that were relative to another folder, from this one."""
    if Path(start.directory) == Path.cwd():
        return list(arguments)
    written: list[str] = []
    for number, argument in enumerate(arguments):
        path = Path(start.directory, argument)
        of_path = number == 0 or arguments[number - 1] in PATHS
        if of_path and not argument.startswith("--") and path.exists():
            argument = os.path.relpath(path)
        written.append(argument)
    return written
