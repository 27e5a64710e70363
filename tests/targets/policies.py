"""Memory under policies of recomputation that are drawn: what is planned beside what is compiled.

python -m tests.targets.policies predict    draws the cases, and stores the memory that is planned of each
python -m tests.targets.policies compile    compiles those that are not compiled yet, for absent chips, and writes the page
python -m tests.targets.policies page       writes docs/compiled-policies.md from both

Predictions are stored, and committed, before anything is compiled. Needs the compilers of ``make test-targets``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import planned, typed_request

PREDICTED = Path(__file__).parent / "policies-predicted.json"
COMPILED = Path(__file__).parent / "policies-compiled.json"
PAGE = Path(__file__).parent.parent.parent / "docs" / "compiled-policies.md"
CHANGED = "rules were changed after some of these"
SEEDS, NUMBER = {16: CHANGED, 2311: CHANGED, 977: "predicted before any of these"}, 20
"""Of the draws, each with what was known of its programs when the rules of the estimate were last changed; and how many cases a draw has."""
CHIPS = {"h100:8": "8", "v5p:2x2x2": "8", "v6e:2x4": "8"}
DENSE = ("attention.attended", "attention.queries", "attention.keys", "attention.projected", "mlp.gate", "mlp.up")
"""Activations of which a policy keeps some."""

CAUSES = """## What a program holds at its peak

Buffers of XLA for GPUs (`XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text"`), and the schedule of a compiled program for TPUs (`shardwright
compile --hlo FILE`) with the time that each array lives, show what there is at a time:

| array | |
|---|---|
| zeros in which gradients are summed | nothing precedes zeros, and XLA's scheduler placed those of the layers and of the embedding before the forward pass. The engine makes them of a scalar that comes after the cotangent (`optimization_barrier`) |
| the logits' cotangent | XLA for GPUs made the logits' weight's gradient after all layers. The engine has it first, reduced over devices, before the layers' backward pass goes on |
| logits in float32, their cotangent in bfloat16 | 6 bytes for each. XLA for TPUs makes the cotangent of a tied embedding inside of the products that read it where a device has several rows: 4 bytes |
| the logits' weight | gathered, once: its gradient takes the place of the logits, which nothing needs any more |
| layers' weights in bfloat16 | on TPU: XLA takes the cast of weights that rest in float32 out of the loop over layers, also through a barrier, and holds the copies of all layers at rest |
| what layers save | by policy; on TPU a head of 64 elements takes the memory of 128, the lanes of a tile |

After the layers, at the embedding's backward pass, a program holds all gradients but the embedding's, and that one in float32 and rounded.
"""
"""What the assignment of buffers shows."""


def drawn() -> list[dict[str, str]]:
    """The cases of all draws: options of ``shardwright compile``."""
    return [case for of_seed in draws().values() for case in of_seed]


def draws() -> dict[int, list[dict[str, str]]]:
    """The cases by the seed of their draw. No draw has a case of an earlier one."""
    found: dict[int, list[dict[str, str]]] = {}
    for seed in SEEDS:
        found[seed] = drawn_with(seed, [case for of_seed in found.values() for case in of_seed])
    return found


def drawn_with(seed: int, known: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The cases of one draw."""
    dice, found = Random(seed), []
    while len(found) < NUMBER:
        model = dice.choice(("llama3-8b", "llama3-1b"))
        chips = dice.choice(tuple(CHIPS))
        layout, mesh = dice.choice((("fsdp", "fsdp=8"), ("fsdp", "fsdp=8"), ("hsdp", "data=2,fsdp=4")))
        some = ",".join(sorted(dice.sample(DENSE, dice.randint(1, 4))))
        policy = dice.choice(("full", "dots", f"keep={some}", f"keep={some}", f"dots,recompute={some.split(',')[0]}"))
        rows, length = dice.choice((("8", "4096"), ("8", "8192"), ("16", "4096")))
        one = {"model": model, "layout": layout, "mesh": mesh, "chips": chips, "batch": rows, "length": length}
        if (case := {**one, "remat": policy}) not in (*known, *found):
            found.append(case)
    return found


def name_of(case: dict[str, str]) -> str:
    return " ".join([case["model"], *(f"--{name} {value}" for name, value in case.items() if name != "model")])


def planned_memory(case: dict[str, str]) -> int:
    """Bytes of one device at the peak of a step, as the plan has them."""
    options = {name: value for name, value in case.items() if name not in ("model", "layout")}
    given: dict[str, Any] = {**options, "batch": int(case["batch"]), "length": int(case["length"])}
    return planned(typed_request(case["model"], case["layout"], PlanOptions(**given))).memory.total_bytes_per_device


def predict() -> None:
    """Store what is planned."""
    found = {name_of(case): planned_memory(case) for case in drawn()}
    PREDICTED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def peak_of_refused(findings: list[dict[str, Any]]) -> int:
    """What a program needs that its compiler refuses for want of memory: the finding has it, in three digits."""
    said = [match for one in findings if (match := re.match(r"([\d.]+) GiB at its peak", one["found"]))]
    return round(float(said[0][1]) * 2**30)


def compile_drawn() -> None:
    """Compile each case in a process of its own, and keep what its program needs."""
    found = json.loads(COMPILED.read_text(encoding="utf-8")) if COMPILED.exists() else {}
    for case in drawn():
        if name_of(case) in found:
            continue
        words = [str(Path(sys.executable).parent / "shardwright"), "compile", *name_of(case).split(), "--json"]
        done = subprocess.run(words, stdout=subprocess.PIPE, env=dict(os.environ), check=False)
        if not done.stdout:
            print(f"{name_of(case)}: exit code {done.returncode}", file=sys.stderr)
            continue
        read = json.loads(done.stdout)
        if read["compiled"] is None:
            found[name_of(case)] = {"peak_bytes": peak_of_refused(read["findings"]), "unmatched": None}
        else:
            unmatched = read["agreement"]["collectives_unmatched"]
            found[name_of(case)] = {"peak_bytes": read["compiled"]["memory"]["peak_bytes"], "unmatched": unmatched}
        COMPILED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        page()


def text_of_page() -> str:
    """The page of the stored predictions and results."""
    planned_bytes = json.loads(PREDICTED.read_text(encoding="utf-8"))
    compiled = json.loads(COMPILED.read_text(encoding="utf-8")) if COMPILED.exists() else {}
    rows, errors = [], dict[tuple[str, str], list[float]]()
    for seed, of_seed in draws().items():
        for name in map(name_of, of_seed):
            size = planned_bytes[name]
            if name not in compiled:
                rows.append(f"| {seed} | `{name}` | {size / 1e9:.2f} | - | - | - |")
                continue
            peak, unmatched = compiled[name]["peak_bytes"], compiled[name]["unmatched"]
            error = size / peak - 1
            errors.setdefault((SEEDS[seed], "H100" if "h100" in name else "TPU"), []).append(error)
            shown = "refused" if unmatched is None else str(unmatched)
            rows.append(f"| {seed} | `{name}` | {size / 1e9:.2f} | {peak / 1e9:.2f} | {error:+.1%} | {shown} |")
    everyone = [error for some in errors.values() for error in some]
    lines = "\n".join(
        f"| {when} | {chips} | {len(some)} | {mean(map(abs, some)):.1%} | {max(map(abs, some)):.1%} |"
        for (when, chips), some in (*sorted(errors.items()), (("all", "all"), everyone))
        if some
    )
    return (
        f"""# Memory under drawn policies, beside what is compiled

`python -m tests.targets.policies` draws cases with seeds {" and ".join(map(str, SEEDS))}, stores the memory that is planned of each before anything is compiled, and
then compiles them for absent chips. GB of one device; the last column counts collectives of the program that the plan does not explain.
Where it says `refused`, the program needs more than the chip has: its compiler says how much, to three digits.

The aim is 2% in the mean and 8% at worst. {len(everyone)} of {len(planned_bytes)} cases are compiled:

| | chips | cases | error, mean | error, worst |
|---|---|---:|---:|---:|
{lines}

{CAUSES}
## Case by case

| seed | `shardwright compile` | planned | compiled | error | unmatched |
|---:|---|---:|---:|---:|---:|
"""
        + "\n".join(rows)
        + "\n"
    )


def page() -> None:
    """Write the page."""
    PAGE.write_text(text_of_page(), encoding="utf-8")


if __name__ == "__main__":
    {"predict": predict, "compile": compile_drawn, "page": page}[sys.argv[1]]()
