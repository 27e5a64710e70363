"""Tokens a second of Shardwright's step on PyTorch against FSDP2 by hand, on the same ranks, in alternation.

python -m benchmarks.torch_step [--quick] [--only TEXT]

Layouts with stages are compared with ``torch.distributed.pipelining`` by hand, which keeps weights gathered, and reduces gradients once a
step.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases import OPTIONS, SEED, Case, rows_of
from benchmarks.handwritten import torch_llama3 as by_hand
from benchmarks.handwritten import torch_stages as in_stages
from benchmarks.options import Options, begin
from benchmarks.results import Found, keep
from benchmarks.timing import Times, cpu_seconds, ratio
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.engine_torch.io.mesh import ranks_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.training.feed import feed_of
from shardwright.engine_torch.training.state import initial_state
from shardwright.engine_torch.training.step import train_step
from shardwright.init import box_values
from shardwright.training.optimizer import OptimizerOptions

RANKS = 4
LAUNCHES = 3
"""Of all ranks: where memory is allocated makes a launch as much as 10% faster or slower than the next, whatever the number of blocks."""

CASES = (
    Case(model="llama3-test", layout="fsdp", mesh="fsdp=4", remat="none"),
    Case(model="llama3-test", layout="fsdp", mesh="fsdp=4"),
    Case(model="llama3-test", layout="hsdp", mesh="data=2,fsdp=2", remat="none"),
    Case(
        model="llama3-test", layout="pp", mesh="stage=4,fsdp=1", rows=16, remat="none", microbatches=8, schedule="1f1b"
    ),
    Case(
        model="llama3-test", layout="pp", mesh="stage=2,fsdp=2", rows=16, remat="none", microbatches=4, schedule="1f1b"
    ),
    Case(
        model="llama3-test",
        layout="pp",
        mesh="stage=2,fsdp=2",
        rows=16,
        remat="none",
        microbatches=4,
        schedule="zero-bubble",
    ),
)
OF_TORCH = {"1f1b": "1F1B", "zero-bubble": "InterleavedZeroBubble"}
"""PyTorch's names of schedules."""

NAMES = {
    "attention.q": "attention.q",
    "attention.k": "attention.k",
    "attention.v": "attention.v",
    "attention.o": "attention.o",
    "mlp.gate": "mlp.gate",
    "mlp.up": "mlp.up",
    "mlp.down": "mlp.down",
    "residual.attention_norm": "attention_norm",
    "residual.feed_forward_norm": "feed_forward_norm",
}
AGREE = 1e-4
NOTES = (
    f"{RANKS} ranks over gloo, one thread each. Ratio: tokens a second of ours over those by hand, the median of the "
    "blocks and the quarters around it; above 1 ours is faster. CPU: seconds of all ranks together.",
    "The two agree in the loss and the gradient norm of three steps to the relative difference shown.",
)

Go = Callable[[], tuple[float, float]]


def main() -> None:
    """Time all cases."""
    options = begin(__doc__, devices=None)
    rows, numbers = [], []
    for case in CASES:
        if options.only not in str(case):
            continue
        times, worst = _on_ranks(case, options)
        if worst > AGREE:
            raise SystemExit(f"{case}: ours and by hand differ by {worst:.1e}")
        mine, hand = times["ours"], times["by hand"]
        cpu, wall = ratio(hand.cpu_s, mine.cpu_s), ratio(hand.wall_s, mine.wall_s)
        rows.append(
            [
                str(case),
                f"{case.tokens / mine.wall:,.0f}",
                f"{case.tokens / hand.wall:,.0f}",
                str(wall),
                f"{mine.cpu:.3f}",
                f"{hand.cpu:.3f}",
                str(cpu),
                f"{worst:.0e}",
            ]
        )
        numbers.append(
            {"case": str(case), "ours": mine.to_json(), "by_hand": hand.to_json(), "difference": worst}
            | {"cpu_ratio": cpu.to_json(), "wall_ratio": wall.to_json()}
        )
        print("  ".join(rows[-1]), flush=True)
    lowest = min(number["wall_ratio"]["middle"] for number in numbers)
    keep(
        Found(
            name="torch_step",
            title="A training step on PyTorch against FSDP2 by hand",
            columns=["case", "tokens/s", "by hand", "ratio", "CPU s/step", "by hand", "ratio of CPU", "difference"],
            rows=rows,
            headline=f"ratios of tokens a second from {lowest:.2f} up over {len(rows)} cases",
            notes=NOTES,
            numbers=numbers,
        ),
        options.load_before,
    )


def _on_ranks(case: Case, options: Options) -> tuple[dict[str, Times], float]:
    """The times of both in all launches, and the largest difference of their first steps."""
    launches = [_launched(case, options) for _ in range(1 if options.quick else LAUNCHES)]
    times = {
        name: Times(
            cpu_s=tuple(chain.from_iterable(found[name].cpu_s for found, _ in launches)),
            wall_s=tuple(chain.from_iterable(found[name].wall_s for found, _ in launches)),
        )
        for name in launches[0][0]
    }
    return times, max(worst for _, worst in launches)


def _launched(case: Case, options: Options) -> tuple[dict[str, Times], float]:
    """The times of both, as CPU seconds of all ranks in total, and the difference of their first steps."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        arguments = (Path(folder) / "store", case, options.blocks(14), options.block_s(0.7), answers)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{case}: a rank ended with an error")
        found = [answers.get() for _ in ranks]
    times = {
        name: Times(
            cpu_s=tuple(map(sum, zip(*(each[0][name].cpu_s for each in found), strict=True))),
            wall_s=tuple(map(max, zip(*(each[0][name].wall_s for each in found), strict=True))),
        )
        for name in found[0][0]
    }
    return times, max(each[1] for each in found)


def _rank(rank: int, store: Path, case: Case, blocks: int, block_s: float, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    plan = plan_of(case)
    batch = feed_of(plan, rank, torch.device("cpu"))
    rows = rows_of(case, plan.request.table.sizes["vocab"])
    own = batch.on_device({name: array[list(batch.offsets)] for name, array in rows.items()})
    steps = {"ours": ours(plan, own), "by hand": handwritten(plan, own)}
    worst = 0.0
    for _ in range(3):
        first, second = (go() for go in steps.values())
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(first, second, strict=True)))
    answers.put((_turns(steps, blocks, block_s), worst))
    dist.destroy_process_group()


def _turns(steps: Mapping[str, Go], blocks: int, block_s: float) -> dict[str, Times]:
    """As ``timing.take_turns``, with the number of steps per block that the first rank determines."""
    names = list(steps)
    times = {name: Times(cpu_s=(), wall_s=()) for name in names}
    started = time.perf_counter()
    steps["by hand"]()
    length = torch.tensor([max(1, round(block_s / (time.perf_counter() - started)))])
    dist.broadcast(length, 0)
    for block in range(blocks):
        for name in names if block % 2 == 0 else reversed(names):
            dist.barrier()
            before, started = cpu_seconds(), time.perf_counter()
            for _ in range(int(length)):
                steps[name]()
            cpu, wall = cpu_seconds() - before, time.perf_counter() - started
            kept, each = times[name], int(length)
            times[name] = replace(kept, cpu_s=(*kept.cpu_s, cpu / each), wall_s=(*kept.wall_s, wall / each))
    return times


def plan_of(case: Case) -> Plan:
    """The plan of a case on PyTorch."""
    options = PlanOptions(
        mesh=case.mesh,
        batch=case.rows,
        length=case.length,
        dtype=case.dtype,
        remat=case.remat,
        engine="torch",
        microbatches=case.microbatches,
        schedule=case.schedule,
    )
    return make_plan(typed_request(case.model, case.layout, options).request)


def ours(plan: Plan, batch: Mapping[str, torch.Tensor]) -> Go:
    """Shardwright's step, as ``shardwright train --engine torch`` builds it."""
    ranks = ranks_of(plan, torch.device("cpu"))
    state = initial_state(Model(plan, ranks), SEED)
    step = train_step(plan, OptimizerOptions(**OPTIONS._asdict()))

    def go() -> tuple[float, float]:
        metrics = step(state, batch)
        return metrics.loss, metrics.grad_norm

    return go


def handwritten(plan: Plan, batch: Mapping[str, torch.Tensor]) -> Go:
    """The step by hand, from the same initial values."""
    table, mesh = plan.request.table, plan.mesh
    form = table.architecture
    axes = mesh.larger_than_one(mesh.names)
    sizes = by_hand.Sizes(
        vocab=form.vocab,
        embed=form.embed,
        mlp=form.mlp,
        heads=form.attention.heads,
        kv_heads=form.attention.kv_heads,
        head_dim=form.attention.head_dim,
        layers=form.stacks[0].num,
        eps=form.norm_eps,
        frequencies=tuple(form.rope.inverse_frequencies(form.attention.rotary_dim)),
        recomputed=plan.request.remat == "full",
    )
    if plan.pipeline is not None:
        stepped = in_stages.Step(
            sizes,
            _values(plan),
            init_device_mesh("cpu", (mesh.size("stage"), mesh.size("fsdp")), mesh_dim_names=("stage", "fsdp")),
            [stage.layers for stage in plan.pipeline.choice.stages],
            OF_TORCH[plan.pipeline.choice.schedule],
            plan.request.microbatches,
            (OPTIONS.lr, OPTIONS.warmup, OPTIONS.weight_decay, OPTIONS.clip),
        )
        return lambda: stepped(batch)
    model = by_hand.sharded(
        sizes,
        _values(plan),
        init_device_mesh("cpu", tuple(mesh.size(axis) for axis in axes), mesh_dim_names=axes),
    )
    step = by_hand.Step(model, OPTIONS.lr, OPTIONS.warmup, OPTIONS.weight_decay, OPTIONS.clip)
    return lambda: step(batch)


def _values(plan: Plan) -> dict[str, torch.Tensor]:
    """The initial values under the names of the model by hand, as PyTorch stores them."""
    table = plan.request.table
    found = {}
    for weight in table.weights:
        shape = weight.shape if weight.stack is None else (weight.num, *weight.shape)
        whole = torch.from_numpy(box_values(weight, SEED, Box.whole(shape)))
        dims = weight.torch_dims or tuple((name,) for name in weight.logical_axes)
        order = [weight.logical_axes.index(name) for dim in dims for name in dim]
        stored = plan.by_name[weight.name].shape
        if weight.stack is None:
            name = {"embedding.tokens": "tokens", "residual.final_norm": "final_norm", "logits.kernel": "kernel"}
            found[f"{name[weight.name]}.weight"] = whole.permute(order).reshape(stored)
            continue
        for number in range(weight.num):
            short = NAMES[weight.name.partition(".")[2]]
            found[f"blocks.{number}.{short}.weight"] = whole[number].permute(order).reshape(stored)
    return found


if __name__ == "__main__":
    main()
