"""The predictions of the cases' plans, stored before anything is compiled: written by ``make golden``, never by a comparison."""

from __future__ import annotations

import json
from pathlib import Path

from shardwright.cli.typed.request import planned, typed_request
from shardwright.core.plan.plan import Plan
from tests.targets.cases import CASES, LARGE, Case

FILE = Path(__file__).parent / "predicted.json"

Prediction = dict[str, int]


def predicted(plan: Plan) -> Prediction:
    """Bytes on one device: the memory by category, and each collective by component, phase, kind and axes."""
    found: Prediction = {f"memory {name}": size for name, size in plan.memory.to_json().items()}
    for one in plan.collectives:
        key = f"{one.component} {one.phase} {one.kind} {'/'.join(one.axes)}"
        found[key] = found.get(key, 0) + one.bytes_per_device * one.count_per_step
    return dict(sorted(found.items()))


def plan_of(case: Case) -> Plan:
    return planned(typed_request(case.model, case.layout, case.options))


def kept() -> dict[str, Prediction]:
    """The predictions in the file, by the names of the cases."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def write() -> None:
    """Predict every case again."""
    found = {case.name: predicted(plan_of(case)) for case in (*CASES, *LARGE)}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
