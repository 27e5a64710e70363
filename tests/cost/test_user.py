"""Numbers of a user's own chips: ``--chips KIND:SHAPE+FILE``, and every file that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.cost import price, read_machine
from tests.cost.plans import plan_of

MINE = """
kind = "own"
name = "Our own"
network = "switch"

[numbers]
usable_bytes = 1e11
devices_per_chip = 1
bf16_flops_per_s = 1e14
float32_share_of_bf16 = 0.5
hbm_bytes_per_s = 1e12
domain_devices = 4
scale_up_bytes_per_s = 1e11
base_latency_s = 1e-5
"""


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refused(text: str) -> str:
    with pytest.raises(InputError) as error:
        read_machine(text)
    return str(error.value)


def test_a_file_replaces_numbers_of_the_table_and_keeps_the_others(file):
    path = file('kind = "h100"\nprogram = "compiled"\n[numbers]\nscale_out_bytes_per_s = 25e9\n')
    numbers = read_machine(f"h100:2x8+{path}").numbers
    assert numbers is not None
    assert (numbers.read("scale_out_bytes_per_s"), numbers.read("scale_up_bytes_per_s")) == (25e9, 370e9)
    assert numbers.program == "compiled"
    assert numbers.numbers["scale_out_bytes_per_s"].used.source == "file mine.toml"


def test_a_compiled_program_of_pytorch_is_faster_than_an_eager_one(file):
    path = file('kind = "h100"\nprogram = "compiled"\n')
    plan = plan_of("llama3-8b", "fsdp", devices=8, batch=8, engine="torch")
    eager, compiled = (price(plan, read_machine(text)).step for text in ("h100:8", f"h100:8+{path}"))
    assert eager is not None
    assert compiled is not None
    assert compiled.seconds < 0.95 * eager.seconds


def test_a_chip_that_the_table_lacks(file):
    machine = read_machine(f"own:2x4+{file(MINE + 'scale_out_bytes_per_s = 1e10')}")
    assert (machine.num_devices, machine.domain_devices) == (8, 4)
    step = price(plan_of("llama3-8b", "fsdp", devices=8, batch=8, chip=machine.chip), machine).step
    assert step is not None
    # Nothing is known of its kernels: products take the full rate, and the range is that of the numbers alone.
    assert step.flops_per_device is not None
    assert step.compute_seconds > step.flops_per_device / 1e14 * 0.9
    assert step.low_seconds == step.seconds == step.high_seconds


def test_what_is_missing_or_wrong_is_said_with_the_file(file, tmp_path):
    path = file('kind = "v5p"\n')
    assert refused(f"h100:8+{path}") == (
        f"--chips: {path} has numbers of 'v5p', and the chips are 'h100'. Give the file of these chips, or leave it out."
    )
    path = file('kind = "h100"\n[numbers]\nscale_out_bytes_per_second = 1e9\n')
    assert refused(f"h100:8+{path}") == (
        f"--chips: {path} has a number 'scale_out_bytes_per_second'. Did you mean 'scale_out_bytes_per_s'?"
    )
    path = file('kind = "h100"\n[numbers]\nkernels_share = -1\n')
    assert (
        refused(f"h100:8+{path}") == f"--chips: 'kernels_share' in {path} is -1, and must be a finite number above 0."
    )
    path = file('kind = "h100"\nprogram = "fast"\n')
    assert refused(f"h100:8+{path}") == (f"--chips: 'program' in {path} is 'fast', and must be one of eager, compiled.")
    path = file('kind = "h100"\nprogramm = "eager"\n')
    assert refused(f"h100:8+{path}") == f"--chips: {path} has 'programm'. Did you mean 'program'?"
    path = file("kind = h100\n")
    assert refused(f"h100:8+{path}").startswith(f"--chips: {path} cannot be read as TOML: Invalid value")
    missing = tmp_path / "none.toml"
    assert refused(f"h100:8+{missing}") == f"--chips: {missing} cannot be read as TOML: No such file or directory."
    path = file('kind = "own"\n')
    assert refused(f"own:8+{path}") == (
        f"--chips: no chip is called 'own', and {path} does not say what it is: it needs 'name', and 'network' as one of "
        "torus, switch."
    )
    path = file(MINE.replace("base_latency_s = 1e-5", "").replace("hbm_bytes_per_s = 1e12", ""))
    assert refused(f"own:4+{path}") == f"--chips: {path} lacks numbers of 'own': hbm_bytes_per_s, base_latency_s."


def test_chips_whose_numbers_were_not_checked_are_refused_with_the_reason():
    assert refused("trn2:16").startswith("--chips: 'trn2' has no numbers here: Trainium2 has 667 TF/s")
    assert read_machine("mi300x:2x8").num_devices == 16
