"""Random option sets as command lines: presets and layouts with rules of their own, on both engines.

    python -m tests.cli.drawn [--first 0] [--count 200]

Where the plan has no error, the step is built: lowered by JAX for simulated devices, or dry-run by PyTorch.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

# The simulated devices of the tests, and their environment.
import tests.conftest  # noqa: F401
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import planned, typed_request
from shardwright.core.findings.errors import ShardwrightError
from shardwright.core.layout.layout import ATTENTION_MOVES, MOE_MOVES
from shardwright.core.layout.roles import COMPONENTS, ROLES
from shardwright.core.model.precision import TRAINED_IN
from shardwright.core.plan.plan import Plan
from shardwright.core.policies.policy import BASES
from shardwright.layouts import FOLDER, preset_names

DENSE = "num_layers=1,embed=32,num_heads=4,num_kv_heads=4,head_dim=8,mlp=32"
MODELS = {
    "llama3-test": DENSE,
    "llama3-test tied": f"{DENSE},tied=true",
    "mixtral-test": f"{DENSE},num_experts=8",
    "deepseek3-test": "num_layers=2,embed=32,q_lora=16,kv_lora=8,nope_dim=8,rope_dim=8,value_dim=8,mlp=32,expert_mlp=16,"
    "num_experts=8,num_groups=2,num_chosen_groups=1,top_k=2",
}
OUTSIDE = ("data", "fsdp", "fsdp", "context", "context", "tensor", "tensor", "idle")
"""Roles outside of the experts; those that stand twice are drawn as often."""
RULED = {
    "attention": ("embed", "heads", "kv_heads", "q_lora", "kv_lora"),
    "mlp": ("embed", "mlp"),
    "moe": ("embed", "mlp", "experts"),
    "logits": ("vocab", "embed"),
    "embedding": ("vocab", "embed"),
}
"""Dims of weights that a rule may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A model, the text of a layout's file, and the options of ``plan``."""

    model: str
    layout: str
    options: PlanOptions

    def question(self, folder: Path) -> tuple[str, str, PlanOptions]:
        """The model, the file of the layout, and the options."""
        path = folder / "drawn.yaml"
        path.write_text(self.layout, encoding="utf-8")
        return self.model, str(path), self.options


def drawn(seed: int) -> Drawn:
    """The option set of a seed."""
    dice = random.Random(seed)
    name = dice.choice(list(MODELS))
    values = _roles(dice, name) if dice.random() < 0.4 else _preset(dice)
    if dice.random() < 0.3:
        _edited(dice, values)
    sizes = _sizes(dice, list(values["mesh"]))
    moves = {"attention": dice.choice(ATTENTION_MOVES), "moe": dice.choice(MOE_MOVES)}
    options = PlanOptions(
        mesh=",".join(f"{axis}={size}" for axis, size in sizes.items()),
        move=",".join(f"{what}={how}" for what, how in moves.items()) if dice.random() < 0.5 else None,
        engine=dice.choice(("jax", "torch")),
        batch=dice.choice((1, 3, 4, 8, 8, 16, 16, 16)),
        length=dice.choice((8, 12, 30, 32, 32, 64)),
        microbatches=dice.choice((1, 1, 2, 2, 4)),
        remat=dice.choice(BASES),
        dtype=dice.choice(TRAINED_IN),
        weights_dtype=dice.choice(("float32", "float32", "bfloat16")),
        moments_dtype=dice.choice(("float32", "bfloat16,float32", "bfloat16")),
        set=((MODELS[name],),),
        expert_buffer=dice.choice((0.5, 1.5, 4.0)) if dice.random() < 0.15 else None,
        load_balance=dice.random() < 0.3,
    )
    return Drawn(model=name.split()[0], layout=yaml.safe_dump(values, sort_keys=False), options=options)


def _preset(dice: random.Random) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{dice.choice(preset_names())}.yaml").read_text(encoding="utf-8"))


def _roles(dice: random.Random, model: str) -> dict[str, Any]:
    """A role table with a word of its own for some components."""
    roles: dict[str, Any] = {}
    for axis in ("a", "b", "c")[: dice.choice((1, 2, 2, 3))]:
        entry: dict[str, Any] = {"elsewhere": dice.choice((*OUTSIDE, "stage") if axis == "a" else OUTSIDE)}
        if not model.startswith("llama3") and dice.random() < 0.5:
            entry["moe"] = "expert"
        for component in COMPONENTS:
            if dice.random() < 0.12 and component not in entry:
                entry[component] = dice.choice([role for role in OUTSIDE if component in ROLES[role].components])
        roles[axis] = entry
    return {"name": "drawn", "mesh": dict.fromkeys(roles, 2), "roles": roles}


def _edited(dice: random.Random, values: dict[str, Any]) -> None:
    """A rule, or dims to store on, that the layout did not have."""
    axis = dice.choice(list(values["roles"]))
    if dice.random() < 0.5:
        component = dice.choice(list(RULED))
        axes = [one for one in values["roles"] if dice.random() < 0.5]
        values.setdefault("rules", {}).setdefault(component, {})[dice.choice(RULED[component])] = axes
    else:
        entry = values["roles"][axis]
        entry = {"elsewhere": entry} if isinstance(entry, str) else dict(entry)
        entry["weights"] = dice.choice(("whole", "mlp", ["embed"], ["heads", "mlp"], ["experts", "embed"]))
        values["roles"][axis] = entry


def _sizes(dice: random.Random, axes: list[str]) -> dict[str, int]:
    while True:
        sizes = {axis: dice.choice((1, 2, 2, 2, 3, 4, 8)) for axis in axes}
        if prod(sizes.values()) <= 8:
            return sizes


def plan_of(one: Drawn, folder: Path) -> Plan:
    """The plan that ``plan`` prints. Raises what ``plan`` says in its place."""
    return planned(typed_request(*one.question(folder)))


def build(plan: Plan) -> None:
    """The step, as the plan's engine makes it."""
    if plan.request.engine == "torch":
        from shardwright.engine_torch.dry_run.dry_run import dry_run

        dry_run(plan)
    else:
        from shardwright.cost import read_machine
        from shardwright.engine_jax.compile.compiling import lower_step

        lower_step(plan, read_machine(f"cpu:{plan.mesh.num_devices}"))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    given = parser.parse_args()
    ends: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        for seed in range(given.first, given.first + given.count):
            one = drawn(seed)
            try:
                plan = plan_of(one, Path(folder))
            except ShardwrightError as error:
                ends[type(error).__name__] += 1
                continue
            if plan.errors:
                ends.update({finding.code for finding in plan.errors})
                continue
            try:
                build(plan)
                ends[f"built by {plan.request.engine}"] += 1
            except Exception as error:  # Any error is reported, and the next set is tried.
                ends["not built"] += 1
                place = traceback.extract_tb(error.__traceback__)[-1]
                print(
                    f"seed {seed}: {type(error).__name__}: {str(error)[:300]} at {place.filename}:{place.lineno}\n{one}",
                    flush=True,
                )
    print(dict(ends))
    return 1 if ends["not built"] else 0


if __name__ == "__main__":
    sys.exit(main())
