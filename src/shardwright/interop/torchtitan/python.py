"""The configuration that a Python file builds. The file is parsed and never run (``program``)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Position
from shardwright.files.text import error_at
from shardwright.interop.torchtitan.program.arguments import needed
from shardwright.interop.torchtitan.program.calls import call, invoke
from shardwright.interop.torchtitan.program.constants import plain
from shardwright.interop.torchtitan.program.expressions import field
from shardwright.interop.torchtitan.program.modules import Module, parse_module
from shardwright.interop.torchtitan.program.state import RaisedError, State
from shardwright.interop.torchtitan.program.statements import run_module
from shardwright.interop.torchtitan.program.values import Function, Items, Partial, Record, Scope, Unread
from shardwright.interop.torchtitan.recomputation import (
    BUDGET,
    CLASSES,
    EARLIER_CLASS,
    FIELD,
    FORCED,
    MODE,
    OPTION,
    PER_OPERATION,
    Recomputation,
    of_options,
)
from shardwright.interop.torchtitan.section import Section
from shardwright.interop.torchtitan.vocabulary import (
    DEGREES,
    EARLIER_TRAINING,
    FIRST_LESS,
    FIRST_ROWS,
    LAST_LESS,
    LAYERS_PER_STAGE,
    MICROBATCH_ROWS,
    MICROBATCHES,
    MODULES,
    QUANTIZING,
    REMOVED,
    SAME_WEIGHTS,
    SCHEDULE,
    SECTION,
    SECTIONS,
    SEQUENCE,
    TRAINERS,
    TRAINING,
)

ABSENT = object()
CALL = SECTIONS[SECTION]
OF_STAGES = (SCHEDULE, LAYERS_PER_STAGE, FIRST_LESS, LAST_LESS, MODULES)
WATCHED = (*DEGREES, *REMOVED, SEQUENCE, MICROBATCHES, MICROBATCH_ROWS)
ROWS = (*TRAINING, *EARLIER_TRAINING, FIRST_ROWS)


def python_section(text: str, source: str, config: str | None) -> Section:
    """The options of the configuration named ``config``; of the only one where ``config`` is None.

    Raises InputError for a file that is not Python, or where a value that is needed cannot be known without running the file.
    """
    module = parse_module(text, source)
    try:
        return _section(module, config)
    except RecursionError:
        raise InputError(f"{source}: not readable: its expressions are nested too deeply.") from None


def _section(module: Module, config: str | None) -> Section:
    names = [config] if config is not None else [name for name in _names(module.tree) if _builds(module, name)]
    if not names:
        raise InputError(f"{module.source}: nothing here builds a {CALL}.")
    if len(names) > 1:
        raise InputError(
            f"{module.source}: {len(names)} configurations. Choose one with --config NAME. Known: {', '.join(names)}."
        )
    state, scope = _state(), Scope(module)
    try:
        found = _value(names[0], module, scope, state)
    except RaisedError as raised:
        raise _at(state, raised.position, f"the program ends here with {raised.text}.") from None
    return _of(found, names[0], scope, state)


def _state() -> State:
    sections = {
        name: {"ParallelismConfig": PARALLELISM, "TrainingConfig": TRAINING}[name] for name in SECTIONS.values()
    }
    return State({**sections, **dict.fromkeys(TRAINERS, SECTIONS)}, frozenset((*WATCHED, *ROWS, *SECTIONS)), call)


PARALLELISM: Mapping[str, Any] = {**DEGREES, SEQUENCE: True, MICROBATCHES: 1}


def _names(tree: ast.Module) -> Iterator[str]:
    """The names of a file that may be configurations: functions that need no arguments, and values."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) if not name.startswith("_") and not needed(node.args):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def _builds(module: Module, name: str) -> bool:
    """Whether a name is a configuration, or may be one."""
    state, scope = _state(), Scope(module)
    try:
        found = _value(name, module, scope, state)
    except RaisedError:
        return True
    if isinstance(found, Unread):
        return any(
            isinstance(node, ast.FunctionDef) and node.name == name for node in module.tree.body
        ) and _mentions_parallelism(module, name)
    return isinstance(found, Record) and (_is(found, CALL) or _parent(found) is not None)


def _mentions_parallelism(module: Module, name: str) -> bool:
    """Whether a function that cannot be evaluated uses any name of the two sections."""
    node = next(node for node in module.tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    used = {getattr(each, "attr", getattr(each, "id", getattr(each, "arg", ""))) for each in ast.walk(node)}
    return bool(used & {*WATCHED, *SECTIONS, CALL})


def _value(name: str, module: Module, scope: Scope, state: State) -> Any:
    """The value of a name of a file; of a function, what it returns."""
    run_module(scope, state)
    functions = {node.name for node in module.tree.body if isinstance(node, ast.FunctionDef)}
    known = [each for each in _names(module.tree) if each in functions]
    if name not in scope.names or name.startswith("__"):
        raise InputError(f"{module.source}: no function '{name}'. It has: {', '.join(known) or 'none'}.")
    value = scope.names[name]
    if isinstance(value, Function):
        arguments = needed(value.node.args)
        if arguments:
            raise InputError(
                f"{module.source}: '{name}' needs arguments: {', '.join(arguments)}. Name a function that needs none."
            )
    if isinstance(value, Function | Partial):
        node = value.node if isinstance(value, Function) else module.tree
        return invoke(value, [], {}, node, scope, state)
    return value


def _of(found: Any, name: str, scope: Scope, state: State) -> Section:
    """The section of an evaluated configuration."""
    module: Module = scope.module
    if isinstance(found, Unread):
        raise _at(state, found.position, f"'{name}' is not known without running the program: {found.why}.")
    for option, position in state.unknown_stores:
        raise _at(state, position, f"'{option}' is set on an object that is not known without running the program.")
    if not isinstance(found, Record):
        raise InputError(f"{module.source}: '{name}' builds no {CALL}.")
    parent = _parent(found)
    if parent is None and not _is(found, CALL):
        raise InputError(f"{module.source}: '{name}' builds no {CALL}: {found.name} has no explicit '{SECTION}'.")
    parallelism = found if parent is None else field(parent, SECTION, module.tree, scope, state)
    values, positions = _degrees(parallelism, scope, state)
    training, places = {}, {}
    stated: dict[str, Any] = {}
    if parent is not None and parent is found:
        training, places = _training(field(parent, "training", module.tree, scope, state))
    if found is not parallelism:
        stated = _stated(found, set())
        if parent is not None and parent is not found:
            stated |= stated.pop("trainer")
    model, note = _model(found)
    return Section(
        source=module.source,
        texts=dict(state.texts),
        values=values,
        positions=positions,
        training=training,
        training_positions=places,
        model=model,
        other_weights=note,
        stated=stated or {SECTION: values},
        recomputation=None if parent is None else _recomputation(parent, module.at(module.tree)),
    )


def _recomputation(parent: Record, start: Position) -> Recomputation | None:
    """Of the configuration with the section; a class of ours that is not known says nothing."""
    value, position = parent.fields.get(FIELD, (ABSENT, start))
    if value is ABSENT:
        # Since June 2026; before March 2026 the default was every second layer.
        return Recomputation(mode="selective", position=None, stated=False)
    if value is None:
        return Recomputation(mode="none", position=position)
    kind = next((name for name in (*CLASSES, EARLIER_CLASS) if isinstance(value, Record) and _is(value, name)), None)
    if kind is None or value.invalidated is not None:
        why = value.why if isinstance(value, Unread) else "its class is not TorchTitan's"
        return Recomputation(mode="full", position=position, unknown=why)
    options = {name: _literal(found) for name, (found, _) in value.fields.items()}
    unread = [name for name in (MODE, OPTION, BUDGET, *FORCED) if name in options and options[name] is None]
    if unread:
        return Recomputation(mode="full", position=position, unknown=f"'{unread[0]}' is computed")
    mode = CLASSES.get(kind, options.get(MODE, "selective"))
    return of_options(options, mode, PER_OPERATION, position)


def _parent(found: Record) -> Record | None:
    """The configuration with the section: this one, or that of its trainer, as in reinforcement learning."""
    for each in (found, found.fields.get("trainer", (None, None))[0]):
        if isinstance(each, Record) and (SECTION in each.fields or any(_is(each, kind) for kind in TRAINERS)):
            return each
    return None


def _is(found: Record, kind: str) -> bool:
    return found.kind == kind or found.kind.endswith(f".{kind}")


def _degrees(parallelism: Any, scope: Scope, state: State) -> tuple[dict[str, Any], dict[str, Position]]:
    """The final value of each option. Raises InputError for a degree that only running the program gives."""
    if isinstance(parallelism, Record) and parallelism.invalidated is not None:
        parallelism = parallelism.invalidated
    if isinstance(parallelism, Unread):
        raise _at(
            state, parallelism.position, f"'{SECTION}' is not known without running the program: {parallelism.why}."
        )
    if not isinstance(parallelism, Record):
        raise InputError(f"{scope.module.source}: '{SECTION}' is no {CALL}.")
    if not _is(parallelism, CALL):
        raise InputError(f"{scope.module.source}: '{SECTION}' is a {parallelism.name}, and no {CALL}.")
    values: dict[str, Any] = {}
    positions: dict[str, Position] = {}
    for name, (value, position) in parallelism.fields.items():
        positions[name] = position
        values[name] = _literal(value)
        if values[name] is None and (name in WATCHED or (name in OF_STAGES and value is not None)):
            why = f": {value.why}" if isinstance(value, Unread) else ""
            place = value.position if isinstance(value, Unread) else position
            needed = "a number" if name in WATCHED else "its value"
            message = f"'{name}' is computed by the program, which is parsed and not run{why}. Write {needed}."
            raise _at(state, place, message)
    return values, positions


def _stated(record: Record, seen: set[int]) -> dict[str, Any]:
    """Every option of an object as a table, with those of its own objects inside; a list is a list of values or class names."""
    seen.add(id(record))
    table: dict[str, Any] = {}
    for name, (value, _) in record.fields.items():
        call = value.call if isinstance(value, Unread) else None
        if isinstance(value, Record) and id(value) not in seen:
            table[name] = _stated(value, seen)
        elif call is not None and call.name.endswith("model_registry"):
            table[name] = {key: _named(given) for key, given in call.keywords.items() if key != "flavor"}
        else:
            table[name] = _named(value)
    return table


def _named(value: Any) -> Any:
    """A value that is known, with the class of an object for it; None for all else."""
    if isinstance(value, Items | tuple):
        return [_named(each) for each in value]
    if isinstance(value, Record):
        return value.name.removesuffix(".Config").rpartition(".")[2]
    return _literal(value)


def _literal(value: Any) -> Any:
    """A value that is known, also a list of such; None for all else."""
    if isinstance(value, Items | tuple):
        items = [_literal(one) for one in value]
        return None if None in items or getattr(value, "invalidated", None) is not None else items
    return value if plain(value) else None


def _training(training: Any) -> tuple[dict[str, Any], dict[str, Position]]:
    """The options of a step; None for a value that only running the program gives."""
    if not isinstance(training, Record) or training.invalidated is not None:
        return dict.fromkeys(TRAINING), {}
    stated = {name: found for name, found in training.fields.items() if name in ROWS}
    start = EARLIER_TRAINING if any(name in (*EARLIER_TRAINING, FIRST_ROWS) for name in stated) else TRAINING
    values: dict[str, Any] = dict(start)
    values.update({name: value if isinstance(value, int) else None for name, (value, _) in stated.items()})
    return values, {name: position for name, (_, position) in stated.items()}


def _model(found: Record) -> tuple[tuple[str, str] | None, str]:
    """Family and flavor of ``model_spec=model_registry("8B")``, and the option that gives it other weights than the flavor's."""
    spec = found.fields.get("model_spec", (None, None))[0]
    call = spec.call if isinstance(spec, Unread) else None
    if call is None or not call.name.endswith("model_registry"):
        return None, ""
    flavor = call.arguments[0] if call.arguments else call.keywords.get("flavor")
    if not isinstance(flavor, str):
        return None, ""
    package = call.name.rpartition(".")[0].rpartition(".")[2]
    for name, value in call.keywords.items():
        if name == "converters" and isinstance(value, Items) and value.invalidated is None:
            kinds = [each.name if isinstance(each, Record) else "" for each in value]
            if all(any(f".{kind}.Config" in f".{each}" for kind in QUANTIZING) for each in kinds):
                continue
        if name not in (*SAME_WEIGHTS, "flavor") and value is not None:
            return (package, flavor), name
    return (package, flavor), ""


def _at(state: State, position: Position, message: str) -> InputError:
    return error_at(message, state.texts.get(position.source, ""), position)
