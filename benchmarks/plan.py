"""Time of `shardwright plan` for big models: the entire command, and the planning in it.

python -m benchmarks.plan [--quick]
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from benchmarks.options import begin
from benchmarks.results import Found, keep
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.core.planning import make_plan

MODELS = ("deepseek3-671b", "llama3-405b", "mixtral-8x22b")
OF_405B = (
    "llama3-405b --layout benchmarks/published/layouts/megatron.yaml --length 8192 --schedule interleaved --remat none "
    "--weights-dtype bfloat16 --master-dtype float32 --gradients-dtype float32 --precision mxfp8 "
)
ON_GB200 = "--chips gb200:4x64+benchmarks/published/machines/gb200-megatron.toml"
LONG = {
    "671B in 16 stages of 128 microbatches, does not fit": "deepseek3-671b --layout pp --mesh stage=16,fsdp=8 --batch 1024 "
    "--length 4096 --microbatches 128 --chips h100:16x8",
    "405B in 64 stages of 32 microbatches": f"{OF_405B} --mesh stage=8,data=8,context=1,tensor=4 --batch 256 "
    f"--microbatches 32 --stages Et|(t*2|)*62tL {ON_GB200}",
    "405B in 128 stages of 384 microbatches, does not fit": f"{OF_405B} --mesh stage=16,data=4,context=1,tensor=4 --batch 1536 "
    f"--microbatches 384 --stages E|(t|)*126L {ON_GB200}",
}
"""Pipelines as large as published ones. Of a layout that does not fit each fix that is offered is planned too."""
COMMAND = "from shardwright.cli.main import main; raise SystemExit(main())"


def main() -> None:
    """Time every model's natural layout."""
    options = begin(__doc__, devices=8)
    rows, numbers = [], []
    times = 3 if options.quick else 7
    for model in MODELS:
        whole, planning = [_command_s(model) for _ in range(times)], []
        for _ in range(times):
            started = time.process_time()
            make_plan(typed_request(model, None, PlanOptions()).request)
            planning.append(time.process_time() - started)
        rows.append([model, f"{median(whole):.2f}", f"{min(whole):.2f}", f"{median(planning) * 1e3:.0f}"])
        numbers.append({"model": model, "command_s": whole, "planning_cpu_s": planning})
    for name, arguments in LONG.items():
        whole = [_command_s(arguments) for _ in range(times)]
        rows.append([name, f"{median(whole):.2f}", f"{min(whole):.2f}", ""])
        numbers.append({"model": name, "command_s": whole})
    keep(
        Found(
            name="plan",
            title="Time of `shardwright plan`",
            columns=["model", "command, s (median)", "fastest", "planning, ms of CPU"],
            rows=rows,
            headline="; ".join(f"{row[0]} {row[1]} s" for row in rows),
            numbers=numbers,
        ),
        options.load_before,
    )


def _command_s(arguments: str) -> float:
    """Seconds of `shardwright plan` with these arguments, in a process of its own."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "plan", *arguments.split()], stdout=subprocess.DEVNULL, check=False
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"shardwright plan {arguments} ended with {done.returncode}")
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
