#!/bin/sh
# What `make demo` shows: a plan, a run on 8 simulated devices, and the same run resumed on another layout.
set -eu
cd "$(dirname "$0")/.."

model=deepseek3-test
out=runs/demo
rm -rf "$out"

show() {
    printf '\n$ shardwright %s\n' "$*"
    .venv/bin/shardwright "$@"
}

show plan "$model" --layout ep-as-cp --mesh fsdp=2,expert=4
show train "$model" --layout ep-as-cp --mesh fsdp=2,expert=4 --devices 8 --data stdlib --steps 40 --stop-after 20 --out "$out"
show train "$model" --layout hsdp --mesh data=4,fsdp=2 --devices 8 --data stdlib --steps 40 --out "$out" --resume

printf '\nmean loss of four steps\n'
.venv/bin/python - "$out/metrics.jsonl" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    losses = [json.loads(line)["loss"] for line in file]
for first in range(0, len(losses), 4):
    four = losses[first : first + 4]
    layout = "ep-as-cp" if first < 20 else "hsdp"
    mean = sum(four) / len(four)
    print(f"  steps {first + 1:>3} to {first + len(four):>3}  {mean:6.3f}  {layout:<8}  {'#' * round(mean * 5)}")
PYTHON
