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
show train "$model" --layout ep-as-cp --mesh fsdp=2,expert=4 --devices 8 --data stdlib --steps 120 --stop-after 60 --out "$out"
show train "$model" --layout hsdp --mesh data=4,fsdp=2 --devices 8 --data stdlib --steps 120 --out "$out" --resume

printf '\n step    loss   layout\n'
.venv/bin/python - "$out/metrics.jsonl" <<'EOF'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    for row in map(json.loads, file):
        if row["step"] % 10 == 0 or row["step"] in (1, 59, 61):
            print(f"{row['step']:5d} {row['loss']:7.4f}   {'ep-as-cp' if row['step'] <= 60 else 'hsdp'}")
EOF
