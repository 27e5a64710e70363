"""Numbers of a user's own chips: ``--chips KIND:SHAPE+FILE``, and every file that is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.cost import price, read_machine
from shardwright.cost.hardware.user import OVERLAPS
from tests.cost.plans import plan_of, priced

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


def test_collectives_of_tensor_parallelism_run_inside_of_products_where_a_file_says_so(file):
    """What products take longer than is hidden: gathers and scatters, and nothing else."""
    plan = plan_of("llama3-8b", "tp", devices=8, batch=8, engine="torch", mesh_sizes={"data": 1, "tensor": 8})
    path = file('kind = "h100"\noverlap = ["tensor"]\n')
    apart, inside = (price(plan, read_machine(text)).step for text in ("h100:8", f"h100:8+{path}"))
    assert apart is not None
    assert inside is not None
    assert apart.communication_seconds == inside.communication_seconds
    assert inside.exposed_seconds < 0.2 * apart.exposed_seconds
    assert apart.seconds - inside.seconds == pytest.approx(apart.exposed_seconds - inside.exposed_seconds)


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
    assert refused(f"h100:8+{path}") == (
        f"--chips: 'program' in {path} is 'fast', and must be one of eager, compiled, fused."
    )
    for wrong in ('["tensor", "stage"]', '"tensor"', "[1]"):
        path = file(f'kind = "h100"\noverlap = {wrong}\n')
        found = tomllib.loads(f"overlap = {wrong}")["overlap"]
        assert (
            refused(f"h100:8+{path}")
            == f"--chips: 'overlap' in {path} is {found!r}, and must be a list of {', '.join(OVERLAPS)}."
        )
    path = file('kind = "h100"\ngraphs = ["mlp"]\n')
    assert refused(f"h100:8+{path}") == (
        f"--chips: 'graphs' in {path} is ['mlp'], and must be a list of attention, router, step."
    )
    path = file('kind = "h100"\ntokens_once = 1\n')
    assert refused(f"h100:8+{path}") == f"--chips: 'tokens_once' in {path} is 1, and must be true or false."
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("multiprocessors = 0.4", "'multiprocessors' in FILE is 0.4, and must be a whole number."),
        ("domain_devices = 3.7", "'domain_devices' in FILE is 3.7, and must be a whole number."),
        ("usable_bytes = 0.001", "'usable_bytes' in FILE is 0.001, and must be at least 1."),
        ("kernels_share = nan", "'kernels_share' in FILE is nan, and must be a finite number above 0."),
        ("kernels_share = inf", "'kernels_share' in FILE is inf, and must be a finite number above 0."),
        ("kernels_share = '0.7'", "'kernels_share' in FILE is '0.7', and must be a finite number above 0."),
        ("kernels_share = true", "'kernels_share' in FILE is True, and must be a finite number above 0."),
        ("kernels_share = {valu = 1}", "'kernels_share' in FILE has 'valu'. Did you mean 'value'?"),
        (
            "kernels_share = {value = 1, others = 2}",
            "'others' of 'kernels_share' in FILE must be a list of numbers with their sources.",
        ),
        (
            "kernels_share = {value = 1, others = [{value = 0}]}",
            "'kernels_share' in FILE is 0, and must be a finite number above 0.",
        ),
    ],
)
def test_a_number_that_is_none_is_refused(file, line: str, message: str):
    path = file(f'kind = "h100"\n[numbers]\n{line}\n')
    assert refused(f"h100:8+{path}") == f"--chips: {message.replace('FILE', path)}"


def test_numbers_of_other_sources_in_a_file_widen_the_range(file):
    plan = plan_of("llama3-8b", "fsdp", devices=8, batch=8)
    text = 'kind = "h100"\n[numbers]\nkernels_share = {value = 0.8, others = [OTHERS]}\n'
    narrow, wide = (
        price(plan, read_machine(f"h100:8+{file(text.replace('OTHERS', others))}")).step
        for others in ("", '{value = 0.4, source = "a slower day"}')
    )
    assert narrow is not None
    assert wide is not None
    assert (narrow.seconds, narrow.low_seconds) == (wide.seconds, wide.low_seconds)
    assert narrow.high_seconds is not None
    assert wide.high_seconds is not None
    assert wide.high_seconds > 1.5 * narrow.high_seconds


def test_chips_whose_numbers_were_not_checked_are_refused_with_the_reason():
    assert refused("trn2:16").startswith("--chips: 'trn2' has no numbers here: Trainium2 has 667 TF/s")
    assert read_machine("mi300x:2x8").num_devices == 16


def test_sums_over_replicas_run_beside_the_passes_where_a_file_says_so(file) -> None:
    path = file('kind = "h100"\noverlap = ["data"]\n')
    waits, beside = (
        priced("llama3-8b", "ddp", f"h100:4x8{own}", mesh_sizes={"data": 32}, batch=64, length=4096).step
        for own in ("", f"+{path}")
    )
    assert waits is not None
    assert beside is not None
    assert beside.communication_seconds == waits.communication_seconds
    # Of the layers' sums nothing is left; the ends have their own.
    assert beside.exposed_seconds < 0.3 * waits.exposed_seconds
    assert beside.compute_seconds == waits.compute_seconds


def test_a_rate_that_is_missing_is_a_finding_that_names_it(file) -> None:
    """Both kinds of numbers: of a link out of a node, and of products of codes."""
    plan = priced("llama3-8b", "fsdp", "mi325x:2x8", mesh_sizes={"fsdp": 16}, batch=16, length=4096)
    (finding,) = [one for one in plan.findings if one.code == "SW207"]
    assert plan.step is None
    assert "scale_out_bytes_per_s" in finding.needed
    path = file('kind = "mi325x"\n[numbers]\nscale_out_bytes_per_s = 50e9\n')
    plan = priced("llama3-8b", "fsdp", f"mi325x:2x8+{path}", mesh_sizes={"fsdp": 16}, batch=16, length=4096)
    assert plan.step is not None
    assert not [one for one in plan.findings if one.code == "SW207"]
