"""Applies a fix as a person would: its text is typed into the command or the layout's file, without other knowledge."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import yaml

from shardwright.core.recipes.presets import preset
from shardwright.layouts import FOLDER
from tests.golden.findings_case import Case

FLAGS = re.compile(r"--([a-z-]+) (\S+)")
SHAPE = re.compile(r"--chips of a shape with (\d+) devices")
ENTRY = re.compile(r"(?P<entry>.+) under 'roles'")
IN_RECIPE = " in the recipe's file"
LEFT_OUT = re.compile(r"leave --(?P<option>[a-z-]+) out")
AXIS_BEFORE = re.compile(
    r"an axis '(?P<new>\w+)' before '(?P<axis>\w+)' under 'mesh', (?P<entry>.+) under 'roles', (?P<mesh>--mesh \S+) --move (?P<key>\w+)=(?P<how>\S+)"
)
RULE_REMOVED = re.compile(r"remove the rule for '(?P<name>\w+)' in '(?P<component>\w+)'")


def typed(case: Case, fix: str) -> Case:
    """The case after its fix was applied literally. Raises ValueError for a text with nothing that can be typed."""
    if match := re.match(r"--layout (\S+) ", fix):
        # Another preset, with all sizes of its mesh.
        return typed(replace(case, layout=match[1], options={**case.options, "mesh_sizes": {}}), fix[match.end() :])
    if fix.startswith("--"):
        return replace(case, options=with_flags(case.options, SHAPE.sub(r"--devices \1", fix.split(", or ")[0])))
    if fix.endswith(IN_RECIPE):
        recipe = case.options["precision"]
        made = preset(recipe) if isinstance(recipe, str) else recipe
        given = yaml.safe_load(f"{{{fix.removesuffix(IN_RECIPE)}}}")
        changes = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        return replace(case, options={**case.options, "precision": replace(made, **changes)})
    if match := LEFT_OUT.fullmatch(fix):
        return replace(case, options={**case.options, match["option"].replace("-", "_"): None})
    values = yaml.safe_load(layout_text(case))
    if match := AXIS_BEFORE.fullmatch(fix):
        pairs = [
            ({match["new"]: 1} if axis == match["axis"] else {}) | {axis: size} for axis, size in values["mesh"].items()
        ]
        values["mesh"] = {axis: size for pair in pairs for axis, size in pair.items()}
        values["roles"].update(yaml.safe_load(f"{{{match['entry']}}}"))
        values.setdefault("move", {})[match["key"]] = match["how"]
        case = replace(case, options=with_flags(case.options, match["mesh"]))
    elif match := ENTRY.fullmatch(fix):
        values["roles"].update(yaml.safe_load(f"{{{match['entry']}}}"))
    elif match := RULE_REMOVED.fullmatch(fix):
        del values["rules"][match["component"]][match["name"]]
    elif fix.startswith("rules: "):
        for component, rules in yaml.safe_load(fix)["rules"].items():
            values.setdefault("rules", {}).setdefault(component, {}).update(rules)
    elif fix.startswith("move: "):
        values.setdefault("move", {}).update(yaml.safe_load(fix)["move"])
    elif fix.startswith("mesh: "):
        values["mesh"] = yaml.safe_load(fix)["mesh"]
    else:
        raise ValueError(fix)
    return replace(case, layout=yaml.safe_dump(values, sort_keys=False))


def with_flags(options: dict[str, Any], text: str) -> dict[str, Any]:
    """The options, replaced by those of a command line."""
    assert FLAGS.sub("", text).strip() == "", text
    changed = dict(options)
    for flag, value in FLAGS.findall(text):
        if flag == "mesh":
            changed["mesh_sizes"] = {axis: int(size) for axis, size in (pair.split("=") for pair in value.split(","))}
        else:
            changed[flag.replace("-", "_")] = int(value) if value.isdigit() else value
    return changed


def layout_text(case: Case) -> str:
    if "\n" in case.layout:
        return case.layout
    return (FOLDER / f"{case.layout}.yaml").read_text(encoding="utf-8")
