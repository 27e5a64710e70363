"""A TorchTitan configuration: TOML, JSON, or the Python that builds a ``ParallelismConfig``.

Every fault raises one ``InputError`` with its position.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import Position
from shardwright.core.layout.faults import shown
from shardwright.core.model.precision import TRAINED_IN
from shardwright.files.json_text import parse_json
from shardwright.files.text import error_at, place_of, read_text
from shardwright.files.toml_text import parse_toml
from shardwright.interop.torchtitan.python import python_section
from shardwright.interop.torchtitan.recomputation import (
    BUDGET,
    EARLIER_OPTION,
    FIELD,
    FORCED,
    MODE,
    OPTION,
    Recomputation,
    of_options,
)
from shardwright.interop.torchtitan.section import Section
from shardwright.interop.torchtitan.vocabulary import (
    DEGREES,
    EARLIER_SECTIONS,
    EARLIER_TRAINING,
    FIRST_ROWS,
    MICROBATCH_ROWS,
    MICROBATCHES,
    REMOVED,
    SECTION,
    SEQUENCE,
    STEP_ROWS,
    STEP_TOKENS,
    TRAINING,
)

NUMBERS = (*DEGREES, *REMOVED, MICROBATCHES, MICROBATCH_ROWS)
ROWS = (*TRAINING, *EARLIER_TRAINING, FIRST_ROWS)
OF_STEP = (STEP_TOKENS, STEP_ROWS)


def read_section(path: str, config: str | None = None) -> Section:
    """The section of a file. ``config``: the function of a Python file that builds the configuration.

    Raises InputError for a file that cannot be read, has no such section, or has values that are no degrees.
    """
    return parse_section(read_text(path), path, config)


def parse_section(text: str, source: str, config: str | None = None) -> Section:
    """As ``read_section``, from a text.

    >>> found = parse_section("[parallelism]\\ntensor_parallel_degree = 8\\n", "llama.toml")
    >>> found.degree("tensor_parallel_degree"), str(found.positions["tensor_parallel_degree"])
    (8, 'llama.toml:2:1')
    """
    if source.endswith(".py"):
        found = python_section(text, source, config)
    elif source.endswith(".json") or (not source.endswith(".toml") and text.lstrip().startswith("{")):
        parse_json(text, source)
        found = _from_tables(json.loads(text), text, source, quoted=True)
    else:
        found = _from_tables(parse_toml(text, source), text, source, quoted=False)
    texts = {source: text, **found.texts}
    for values, places in ((found.values, found.positions), (found.training, found.training_positions)):
        for name, place in places.items():
            if values[name] is None and name in ROWS and source.endswith(".py"):
                continue  # Only running the file gives it, and nothing needs it.
            _check(name, values[name], texts.get(place.source, ""), place)
    for name, dtype in found.dtypes.items():
        if dtype not in TRAINED_IN:
            place = _place(name, text, source, quoted=source.endswith(".json"))
            message = f"'training.{name}' is one of {', '.join(TRAINED_IN)}; found {shown(dtype)}."
            raise error_at(message, text, place, len(name))
    return found


def _from_tables(top: Any, text: str, source: str, *, quoted: bool) -> Section:
    if not isinstance(top, dict):
        raise InputError(
            f"{source}: a configuration has sections; this is {'a list' if isinstance(top, list) else shown(top)}."
        )
    section = top.get(SECTION, {})
    if not isinstance(section, dict):
        raise InputError(f"{source}: '{SECTION}' is a section of options; found {shown(section)}.")
    values: dict[str, Any] = {}
    for name in EARLIER_SECTIONS:
        earlier = top.get(name)
        if isinstance(earlier, dict):
            values.update((key, value) for key, value in earlier.items() if key in (*DEGREES, *REMOVED, SEQUENCE))
    values.update(section)
    if not values and SECTION not in top:
        raise InputError(f"{source}: no section '{SECTION}', and no degree of TorchTitan's in any other.")
    stated = _training(top.get("training"))
    return Section(
        source=source,
        values=values,
        positions={key: _place(key, text, source, quoted=quoted) for key in values},
        training=stated
        and {**(EARLIER_TRAINING if {*stated} & {*EARLIER_TRAINING, FIRST_ROWS} else TRAINING), **stated},
        training_positions={key: _place(key, text, source, quoted=quoted) for key in stated},
        model=_model(top.get("model")),
        recomputation=_recomputation(top, text, source, quoted=quoted),
        texts={source: text},
        stated=top,
    )


def _recomputation(top: Mapping[str, Any], text: str, source: str, *, quoted: bool) -> Recomputation | None:
    """Of a file with the section, or with one of a step or a model; one with degrees alone says nothing of it."""
    section = top.get(FIELD)
    if section is None:
        if not {"training", "model"} & set(top):
            return None
        return replace(_of_section({}, Position(source=source, line=1, column=1)), stated=False)
    if not isinstance(section, dict):
        raise InputError(f"{source}: '{FIELD}' is a section of options; found {shown(section)}.")
    stated = [name for name in (MODE, OPTION, BUDGET, *FORCED) if name in section]
    return _of_section(section, _place(stated[0] if stated else FIELD, text, source, quoted=quoted))


def _of_section(section: Mapping[str, Any], position: Position) -> Recomputation:
    return of_options(section, section.get(MODE, "selective"), EARLIER_OPTION, position)


def _training(section: Any) -> dict[str, Any]:
    """The options of the section that set the rows or tokens of a step."""
    return {key: value for key, value in section.items() if key in ROWS} if isinstance(section, dict) else {}


def _model(section: Any) -> tuple[str, str] | None:
    """Family and flavor, where both are named."""
    names = (section.get("name"), section.get("flavor")) if isinstance(section, dict) else (None, None)
    return names if all(isinstance(name, str) for name in names) else None  # pyright: ignore[reportReturnType]


def _place(key: str, text: str, source: str, *, quoted: bool) -> Position:
    """The position of a key: its last line, since a section comes after those of earlier versions."""
    pattern = rf'"{re.escape(key)}"\s*:' if quoted else rf"^\s*(?P<key>{re.escape(key)})\s*="
    found = list(re.finditer(pattern, text, re.MULTILINE))
    if not found:
        return Position(source=source, line=1, column=1)
    start = found[-1].start() if quoted else found[-1].start("key")
    return place_of(text, start, source)


def _check(name: str, value: Any, text: str, position: Position) -> None:
    def refuse(needed: str) -> NoReturn:
        raise error_at(f"'{name}' is {needed}; found {shown(value)}.", text, position, len(name))

    if name in (*NUMBERS, *ROWS) and (not isinstance(value, int) or isinstance(value, bool)):
        refuse("a whole number")
    if name == SEQUENCE and not isinstance(value, bool):
        refuse("true or false")
    if name in (*ROWS, MICROBATCHES, MICROBATCH_ROWS) and value < 1 and not (value == -1 and name in OF_STEP):
        refuse("at least 1" + (", or -1 for one microbatch of each rank" if name in OF_STEP else ""))
