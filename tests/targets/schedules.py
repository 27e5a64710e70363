"""What compiled schedules do with collectives: over entire slices by each way of `--hops`, and under published flags of compilers.

python -m tests.targets.schedules compile [TEXT]    compiles the cases that are not compiled yet (with TEXT in their names), stores each, and writes the page
python -m tests.targets.schedules page              writes docs/schedules.md from what is stored

Needs the compilers of ``make test-targets``. The cases of 671B take minutes each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STORED = Path(__file__).parent / "schedules.json"
PAGE = Path(__file__).parent.parent.parent / "docs" / "schedules.md"

V5P = "deepseek3-671b --layout ep-as-cp --mesh fsdp=16,expert=8 --batch 128 --length 4096 --chips v5p:4x4x8 --move moe=ring"
TPU7X = "deepseek3-671b --layout fsdp --mesh fsdp=256 --batch 512 --length 4096 --chips tpu7x:4x4x8"
OF_671B = "--dtype bfloat16 --weights-dtype bfloat16 --moments-dtype bfloat16"
SMALL_TPU7X = "llama3-8b --set num_layers=4 --layout fsdp --mesh fsdp=64 --batch 64 --length 4096 --chips tpu7x:4x4x2"
WAYS = ("one", "two", "chunks")

LLAMA = "llama3-8b --set num_layers=4 --batch 16 --length 4096"
TARGETS = {
    "h100": f"{LLAMA} --layout fsdp --mesh fsdp=8 --chips h100:8",
    "v5p": f"{LLAMA} --layout fsdp --mesh fsdp=8 --chips v5p:2x2x2",
    "v6e": f"{LLAMA} --layout fsdp --mesh fsdp=8 --chips v6e:2x4",
}
MAXTEXT, TOOLBOX = "MaxText, benchmarks/xla_flags_library.py", "JAX-Toolbox, rosetta/docs/GPU_performance.md"
FLAGS: Mapping[str, tuple[str, str, str]] = {
    "h100 no latency hiding": ("h100", "xla_gpu_enable_latency_hiding_scheduler=false", f"{TOOLBOX}, as true"),
    "h100 combined 1 GiB": (
        "h100",
        "xla_gpu_all_gather_combine_threshold_bytes=1073741824 xla_gpu_reduce_scatter_combine_threshold_bytes=1073741824",
        TOOLBOX,
    ),
    "h100 pipelined": (
        "h100",
        "xla_gpu_enable_pipelined_all_gather=true xla_gpu_enable_pipelined_reduce_scatter=true xla_gpu_enable_pipelined_all_reduce=true",
        TOOLBOX,
    ),
    "h100 double buffering": ("h100", "xla_gpu_enable_while_loop_double_buffering=true", TOOLBOX),
    "v5p no async all-gather": ("v5p", "xla_enable_async_all_gather=false", MAXTEXT),
    "v5p no fused collectives": ("v5p", "xla_tpu_enable_async_collective_fusion=false", MAXTEXT),
    "v5p async all-reduce": (
        "v5p",
        "xla_enable_async_all_reduce=true xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
        MAXTEXT,
    ),
    "v5p SparseCore": (
        "v5p",
        "xla_sc_disable_megacore_partitioning=true xla_tpu_enable_async_collective_fusion_fuse_all_gather=false "
        "xla_tpu_enable_all_gather_offload_tracing=true xla_tpu_use_tc_device_shape_on_sc=true "
        "xla_tpu_enable_sparse_core_collective_offload_all_gather=true",
        MAXTEXT,
    ),
    "v6e SparseCore": (
        "v6e",
        "xla_sc_disable_megacore_partitioning=true xla_tpu_enable_async_collective_fusion_fuse_all_gather=false "
        "xla_tpu_enable_all_gather_offload_tracing=true xla_tpu_use_tc_device_shape_on_sc=true "
        "xla_tpu_enable_sparse_core_collective_offload_all_gather=true",
        MAXTEXT,
    ),
    "v6e no fused collectives": ("v6e", "xla_tpu_enable_async_collective_fusion=false", MAXTEXT),
    "v6e layout of reduce-scatters": (
        "v6e",
        "xla_tpu_use_minor_sharding_for_major_trivial_input=true xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 "
        "xla_tpu_assign_all_reduce_scatter_layout=true",
        MAXTEXT,
    ),
}
"""Of each case its target, its flags, and who publishes them."""


def cases() -> Iterator[tuple[str, list[str]]]:
    """Each case with the arguments of ``shardwright compile``."""
    for target, arguments in TARGETS.items():
        yield f"{target} as it is", arguments.split()
    for name, (target, flags, _) in FLAGS.items():
        yield name, [*TARGETS[target].split(), "--xla", *flags.split()]
    for name, arguments in (
        ("small tpu7x", SMALL_TPU7X),
        ("671b v5p", f"{V5P} {OF_671B}"),
        ("671b tpu7x", f"{TPU7X} {OF_671B}"),
    ):
        for way in WAYS:
            yield f"{name} {way}", [*arguments.split(), "--hops", way]


def compiled(arguments: list[str]) -> dict[str, Any]:
    """What is kept of a compiled case; ``error``: why there is none."""
    words = [sys.executable, "-c", "import sys; from shardwright.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    done = subprocess.run(
        [*words, "compile", *arguments, "--json"], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    if done.returncode < 0:
        # Ended from outside, as for memory: no word of the compiler, which a later command may hear.
        raise SystemExit(f"the compiler was ended by signal {-done.returncode}; nothing is stored")
    if not done.stdout:
        return {"error": done.stderr.strip().splitlines()[-1]}
    read = json.loads(done.stdout)
    if read["compiled"] is None:
        return {"error": read["findings"][0]["found"].splitlines()[0]}
    return of_program(read)


def of_program(read: Mapping[str, Any]) -> dict[str, Any]:
    """Of each kind its executions, bytes and those without a product between start and done; bytes and exposed bytes of
    each component; the peak; and the plan's prices."""
    kinds: dict[str, dict[str, int]] = {}
    for one in read["compiled"]["collectives"]:
        size = one["bytes_per_device"] * one["count_per_step"]
        if size < 1 << 20:
            continue
        row = kinds.setdefault(one["kind"], {"times": 0, "bytes": 0, "exposed": 0})
        row["times"] += one["count_per_step"]
        row["bytes"] += size
        row["exposed"] += 0 if one["overlapped"] else size
    hops = [one for one in read["choices"] if one["what"] == "hops"]
    step = read["step"]
    return {
        "kinds": kinds,
        "components": {
            str(one["component"]): [one["moved_bytes"], one["exposed_bytes"]]
            for one in read["compiled"].get("exposed", ())
        },
        "peak_bytes": read["compiled"]["memory"]["peak_bytes"],
        "unmatched": read["agreement"]["collectives_unmatched"],
        "seconds": round(read["compiled"]["compile_seconds"]),
        "priced": None
        if not hops or step is None
        else {
            "way": hops[0]["chosen"],
            "step": step["seconds"],
            "communication": step["communication_seconds"],
            "exposed": step["exposed_seconds"],
        },
    }


def compile_cases(some: str) -> None:
    """Compile each case in a process of its own."""
    for name, arguments in cases():
        if name not in stored() and some in name:
            one = compiled(arguments)
            print(f"{name}: {one.get('error') or one['kinds']}", flush=True)
            # Another command may have stored others meanwhile.
            found = {**stored(), name: one}
            STORED.write_text(json.dumps({case: found[case] for case, _ in cases() if case in found}, indent=1) + "\n")
            write_page()


def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}


def write_page() -> None:
    PAGE.write_text(text_of_page(), encoding="utf-8")


def text_of_page() -> str:
    """The page of what is stored."""
    from tests.targets.schedules_page import text

    return text(stored())


if __name__ == "__main__":
    {"compile": lambda: compile_cases(" ".join(sys.argv[2:])), "page": write_page}[sys.argv[1]]()
