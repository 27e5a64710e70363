"""Memory on PyTorch of drawn steps: what is planned beside what a dry run holds.

python -m tests.targets.torch_policies predict    draws the steps, and stores the memory that is planned of each
python -m tests.targets.torch_policies run        runs those that are not run yet, and writes the page
python -m tests.targets.torch_policies page       writes docs/memory-torch.md from both

Predictions are stored, and committed, before anything is run. A dry run needs no compiler and no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import planned, typed_request
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import routed_evenly
from tests.targets.policies import DENSE, name_of

PREDICTED = Path(__file__).parent / "torch-policies-predicted.json"
RUN = Path(__file__).parent / "torch-policies-run.json"
PAGE = Path(__file__).parent.parent.parent / "docs" / "memory-torch.md"
SEED, NUMBER = 1117, 20
LAYOUTS = {
    "llama3-8b": (
        ("fsdp", "fsdp=8"),
        ("hsdp", "data=2,fsdp=4"),
        ("fsdp-tp", "fsdp=2,tensor=4"),
        ("cp", "fsdp=2,context=4"),
    ),
    "deepseek3-16b": (("fsdp", "fsdp=8"), ("ep", "fsdp=2,expert=4")),
}
LAYOUTS["llama3-1b"] = LAYOUTS["llama3-8b"]


def drawn() -> list[dict[str, str]]:
    """The steps: options of ``shardwright compile --engine torch``."""
    dice, found = Random(SEED), []
    while len(found) < NUMBER:
        model = dice.choice(("llama3-1b", "llama3-1b", "llama3-8b", "llama3-8b", "deepseek3-16b"))
        layout, mesh = dice.choice(LAYOUTS[model])
        some = ",".join(sorted(dice.sample(DENSE, dice.randint(1, 4))))
        policy = dice.choice(("full", "dots", "none", f"keep={some}", f"keep={some}"))
        rows, length = dice.choice((("8", "4096"), ("8", "8192"), ("16", "4096")))
        one = {"model": model, "layout": layout, "mesh": mesh, "batch": rows, "length": length, "remat": policy}
        if dice.random() < 0.25:
            one |= {"batch": "16", "microbatches": "2"}
        elif dice.random() < 0.25:
            one |= {"loss-chunks": "8"}
        if model == "deepseek3-16b" and policy.startswith("keep"):
            one["remat"] = "keep=attention.attended,shared.gate"
        if one not in found:
            found.append(one)
    return found


def plan_of(step: dict[str, str]) -> Plan:
    options = {name.replace("-", "_"): value for name, value in step.items() if name not in ("model", "layout")}
    numbers = {
        name: int(options[name]) for name in ("batch", "length", "microbatches", "loss_chunks") if name in options
    }
    given: dict[str, Any] = {**options, **numbers, "engine": "torch"}
    return planned(typed_request(step["model"], step["layout"], PlanOptions(**given)))


def planned_memory(step: dict[str, str]) -> int:
    """Bytes of one rank at the peak of a step, with as many rows for every expert, as a dry run has them."""
    return routed_evenly(plan_of(step)).memory.total_bytes_per_device


def predict() -> None:
    """Store what is planned."""
    found = {name_of(step): planned_memory(step) for step in drawn()}
    PREDICTED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def run() -> None:
    """Run each step without values, and keep what it needs."""
    from shardwright.engine_torch.dry_run.dry_run import dry_run

    found = json.loads(RUN.read_text(encoding="utf-8")) if RUN.exists() else {}
    for step in drawn():
        if name_of(step) not in found:
            found[name_of(step)] = dry_run(plan_of(step)).peak_bytes
            RUN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            page()


def text_of_page() -> str:
    """The page of the stored predictions and results."""
    planned_bytes = json.loads(PREDICTED.read_text(encoding="utf-8"))
    held = json.loads(RUN.read_text(encoding="utf-8")) if RUN.exists() else {}
    errors = {name: size / held[name] - 1 for name, size in planned_bytes.items() if name in held}
    sizes = [abs(error) for error in errors.values()] or [0.0]
    rows = "\n".join(
        f"| `{name}` | {size / 1e9:.2f} | {held[name] / 1e9:.2f} | {errors[name]:+.1%} |"
        if name in held
        else f"| `{name}` | {size / 1e9:.2f} | - | - |"
        for name, size in planned_bytes.items()
    )
    return f"""# Memory on PyTorch, beside dry runs

`python -m tests.targets.torch_policies` draws steps with seed {SEED}, stores the memory that is planned of each before anything is run, and then
makes a dry run of each ([compile.md](compile.md#pytorch)). GB of one rank, with as many rows for every expert.

{len(errors)} of {len(planned_bytes)} steps are run: {mean(sizes):.1%} off in the mean, {max(sizes):.1%} at worst.

One miss has changed the program and no prediction: `llama3-1b` under `fsdp-tp` with `none` held 34.99 GB, 18.2% more than planned, since
each product copied its gathered input and kept the copy. Now it is put in order once, and the step holds what the table says. Later the
mask that each layer kept under `none` became one of all layers, in the program and in the rule: both columns are of that program.

## What is counted

PyTorch frees each array when the last operation that reads it is through, so what a rank holds is known at every moment. A plan takes the
largest of these, beside weights and what the optimizer keeps:

| moment | what layers save | gradients of layers | besides |
|---|---|---|---|
| the loss is computed | all | none | 8 bytes for each logit of a microbatch or chunk, the projection's input and the stream; gathered weights of both ends, which are one group that stays gathered; the last layer's gather, whose buffer the next gather takes |
| its backward pass | all | none | 6 bytes for each logit, the gradient of the projection; gathered weights of both ends |
| the last layer's backward pass | all | none | a layer's activations and the cotangents of its largest component, its gathered weights, their gradients, and the gather ahead; gathered weights of both ends, the gradient of the projection |
| the first layer's backward pass | none | all | the same without a gather ahead |
| the embedding's backward pass | none | all | its gradient in float32 and rounded, the cotangents of its rows in both dtypes; gathered weights of both ends, the gradient of the projection |
| the gradients of both ends are reduced | none | all | these gradients as they were made, and in the dtype of the reduction |

With microbatches all gradients are there at each moment. Under `none` the kernels of attention keep their mask in the computation's dtype,
once for all layers.

## Step by step

| `shardwright compile --engine torch` | planned | held | error |
|---|---:|---:|---:|
{rows}
"""


def page() -> None:
    """Write the page."""
    PAGE.write_text(text_of_page(), encoding="utf-8")


if __name__ == "__main__":
    {"predict": predict, "run": run, "page": page}[sys.argv[1]]()
