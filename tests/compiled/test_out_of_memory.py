"""libtpu's error for a program that does not fit becomes a finding with its sizes and the plan's figures."""

from __future__ import annotations

import pytest

from shardwright.compiled.out_of_memory import OutOfMemory, out_of_memory_findings, read_out_of_memory
from shardwright.core.layout.wording import bytes_text
from tests.golden.compiled_case import planned
from tests.golden.compiled_cases import FSDP
from tests.golden.compiled_programs import V5P

GIB = 1 << 30
# Printed by libtpu 0.0.42.1 for arguments alone, for temporaries alone, and for a program a little too large.
MEASURED = {
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (192.00G) exceeds "
    "available HBM (95.74G).": (192 * GIB, round(95.74 * GIB)),
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (4.08T) exceeds "
    "available HBM (15.75G).": (round(4.08 * 1024 * GIB), round(15.75 * GIB)),
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.00G) exceeds "
    "available HBM (15.75G).": (16 * GIB, round(15.75 * GIB)),
}
OLDER = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33.27G of 30.75G hbm. Exceeds hbm capacity by 2.52G."


@pytest.mark.parametrize(("text", "sizes"), MEASURED.items())
def test_sizes_in_the_errors_of_libtpu(text, sizes):
    assert read_out_of_memory(text) == OutOfMemory(needed_bytes=sizes[0], usable_bytes=sizes[1])


def test_sizes_of_the_older_sentence():
    found = read_out_of_memory(OLDER)
    assert found == OutOfMemory(needed_bytes=round(33.27 * GIB), usable_bytes=round(30.75 * GIB))


def test_other_errors_are_left_alone():
    assert read_out_of_memory("RESOURCE_EXHAUSTED: too many open files") is None
    plan = planned("llama3-8b", FSDP, V5P, (("batch", 16), ("length", 4096)))
    assert out_of_memory_findings(plan, "INTERNAL: no") == ()


def test_the_whole_text():
    plan = planned("llama3-8b", FSDP, V5P, (("batch", 32), ("length", 4096)))
    (found,) = out_of_memory_findings(plan, next(iter(MEASURED)))
    memory = plan.memory
    total = bytes_text(memory.total_bytes_per_device)
    assert found.text() == (
        "error SW312: What a device must hold fits in what the chip lets a program use.\n"
        "  where  the compiled step of llama3-8b under layout 'mine'\n"
        f"  found  192 GiB at its peak, 201% of what a TPU v5p lets a program use; the plan expects {total}\n"
        f"         weights, predicted      {bytes_text(memory.weights_bytes)}\n"
        f"         gradients, predicted    {bytes_text(memory.gradients_bytes)}\n"
        f"         optimizer, predicted    {bytes_text(memory.optimizer_bytes)}\n"
        f"         activations, predicted  {bytes_text(memory.activations_bytes)}\n"
        "  needed 95.7 GiB at most (limit of libtpu 0.0.42.1, measured 2026-11-20)\n"
        "  cost   96.3 GiB a device too much"
    )
