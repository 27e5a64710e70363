"""``--precision`` on the verbs that plan: what a file may say, and a recipe in plans, differences and locks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.core.findings.errors import InputError
from shardwright.core.recipes.presets import PRESETS
from shardwright.locks.lock import moved, read_lock
from tests.cli.test_every_leaf import at, drawn, edited, leaves, place, values_of_a_field
from tests.matrix import rest

FSDP = ("llama3-test", "--layout", "fsdp", "--mesh", "fsdp=4", "--set", "num_layers=1")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """The exit code of a command, and what it printed on both streams."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return call


QUANTIZER = "{dtype: float8_e4m3fn, block: 1 x 128}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: mxfp", "1:9: 'mxfp' is no recipe, and has no 'operands' of its own. Did you mean 'mxfp8'?"),
        ("recipe: 8", "1:9: 'recipe' is 8, and must be a text."),
        ("- mxfp8", "1:1: a recipe is a list, and must be a mapping."),
        (
            "margin: 1",
            "1:1: there is no 'recipe'. Write one of fp8-delayed, fp8-current, fp8-row, fp8-block, mxfp8, nvfp4, or a name of "
            "your own.",
        ),
        (
            "recipe: mxfp8\nenable_2d_quantisation: true",
            "2:1: 'enable_2d_quantisation' is no option of 'mxfp8'. Did you mean 'enable_2d_quantization'?",
        ),
        ("recipe: fp8-delayed\nmargin: -1", "2:9: 'margin' is -1, and must be a whole number from 0 to 1,048,576."),
        ("recipe: fp8-delayed\nmargin: true", "2:9: 'margin' is True, and must be a whole number from 0 to 1,048,576."),
        (
            "recipe: fp8-delayed\namax_history_len: 0",
            "2:19: 'amax_history_len' is 0, and must be a whole number from 1 to 1,048,576.",
        ),
        ("recipe: fp8-delayed\namax_compute_algo: maxx", "2:20: 'amax_compute_algo' is 'maxx'. Did you mean 'max'?"),
        ("recipe: fp8-current\nreduce_amax: 1", "2:14: 'reduce_amax' is 1, and must be true or false."),
        ("recipe: mxfp8\nhigh: '*.q'", "2:7: 'high' is '*.q', and must be a list of patterns, as in ['*.down']."),
        ("recipe: mine\noperands: {}", "2:11: the 'operands' of 'mine' quantize nothing."),
        ("recipe: mine\noperands: {outptu: {}}", "2:12: 'operands' has 'outptu'. Did you mean 'output'?"),
        ("recipe: mine\noperands: {output: {weigth: null}}", "2:21: 'output' has 'weigth'. Did you mean 'weight'?"),
        ("recipe: mine\noperands: {output: {input: 3}}", "2:28: 'input' of 'output' is 3, and must be a mapping."),
        (
            "recipe: mine\noperands: {output: {input: {dtype: float8_e5m2}}}",
            "2:28: 'input' of 'output' has no 'block'.",
        ),
        (
            "recipe: mine\noperands: {output: {input: {dtype: float8_e4m3, block: per row}}}",
            "2:36: 'dtype' is 'float8_e4m3'. Did you mean 'float8_e4m3fn'?",
        ),
        (
            "recipe: mine\noperands: {output: {input: {dtype: float8_e5m2, block: 0 x 8}}}",
            "2:56: '0 x 8' is no block. Write 'per tensor', 'per row', or its size along the other and the contracted dim, as in "
            "'1 x 128'; at most 1,048,576.",
        ),
        (
            "recipe: mine\noperands: {output: {input: {dtype: float8_e5m2, block: 1 x 32, scale_dtype: float8_e8m0fnu}}}",
            "2:28: 'input' of 'output' has scales of float8_e8m0fnu, which are powers of two, by the rule 'exact'. Give 'scale: power "
            "of two up', or another 'scale_dtype'.",
        ),
        (
            "recipe: mine\noperands: {output: {input: {dtype: float8_e5m2, block: 1 x 32, scale: power of two up, of_tensor: true}}}",
            "2:28: 'input' of 'output' has 'of_tensor', beside which scales of blocks are exact and float8_e4m3fn. Give 'scale_dtype: "
            "float8_e4m3fn' and no 'scale'; its are 'power of two up' and float32.",
        ),
        (
            "recipe: mine\noperands: {output: {input: {dtype: float8_e5m2, block: per row, hadamard: 12}}}",
            "2:75: 'hadamard' is 12, and must be 4, 16 or 64.",
        ),
        (
            "recipe: mine\noperands: {output: {input: {dtype: float8_e5m2, block: per row, hadamard: 16}}}",
            "2:11: 'hadamard' of the operands of 'output' is 16 and none. Give both the same: otherwise they have another product.",
        ),
        (
            "recipe: nvfp4\noperands: {weight_gradient: {input: null}}",
            "2:11: 'hadamard' of the operands of 'weight_gradient' is none and 16. Give both the same: otherwise they have "
            "another product.",
        ),
        (
            f"recipe: mine\nmargin: 1\noperands: {{output: {{input: {QUANTIZER}}}}}",
            "2:1: 'margin' is of delayed amaxes, and no operand has one.",
        ),
        (
            "recipe: mxfp8\noperands: {output: {input: {dtype: float8_e5m2, block: per tensor, amax: delayed}}}",
            "2:11: an operand has a delayed amax, and the recipe no history. Begin with 'recipe: fp8-delayed'.",
        ),
        (
            "recipe: fp8-delayed\noperands:\n"
            + "".join(
                f"  {product}: {{{', '.join(f'{one}: null' for one in of)}}}\n"
                for product, of in {
                    "output": ("input", "weight"),
                    "input_gradient": ("output_gradient", "weight"),
                    "weight_gradient": ("input", "output_gradient"),
                }.items()
            ),
            "3:3: no operand has a delayed amax, and the recipe a history. Begin with another recipe.",
        ),
    ],
)
def test_a_file_that_is_no_recipe(run, text: str, message: str) -> None:
    Path("r.yaml").write_text(text, encoding="utf-8")
    assert run("plan", *FSDP, "--precision", "r.yaml") == (2, "", f"shardwright: r.yaml:{message}\n")


def test_a_name_that_is_no_recipe_and_a_pattern_that_matches_nothing(run) -> None:
    code, _, err = run("plan", *FSDP, "--precision", "fp8-delay")
    assert (code, err) == (
        2,
        "shardwright: no recipe is called 'fp8-delay'. Did you mean 'fp8-delayed'? A recipe of your own is given by its path, "
        "as in ./fp8-delay.yaml.\n",
    )
    Path("r.yaml").write_text("recipe: mxfp8\nhigh: ['*.mpl.*']", encoding="utf-8")
    code, _, err = run("plan", *FSDP, "--precision", "r.yaml")
    assert code == 2
    assert err.startswith("shardwright: 'high' of the recipe: the pattern '*.mpl.*' matches no name. ")


def plan_of(run, *options: str) -> dict:
    code, out, err = run("plan", *FSDP, *options, "--json")
    plan = json.loads(out)
    assert (code, err) == (1 if any(found["severity"] == "error" for found in plan["findings"]) else 0, "")
    return plan


@pytest.mark.parametrize("name", PRESETS)
def test_a_plan_has_the_recipe_and_no_error_but_what_the_engine_does_not_run(run, name: str) -> None:
    plan, plain = plan_of(run, "--precision", name), plan_of(run)
    assert "precision" not in plain
    found = plan["precision"]
    assert (found["recipe"], found["options"], found["free"]) == (name, {}, True)
    assert len(found["weights"]) == 7
    assert {len(weight["operands"]) for weight in found["weights"]} == {4 if name == "fp8-row" else 6}
    errors = [finding for finding in plan["findings"] if finding["severity"] == "error"]
    assert {one["code"] for one in errors} <= {"SW415"}
    assert {key: plan[key] for key in ("tensors", "roles")} == {key: plain[key] for key in ("tensors", "roles")}


def test_a_file_changes_operands_of_a_preset(run) -> None:
    Path("r.yaml").write_text(
        f"recipe: mxfp8\nscale_calculation_mode: floor\nhigh: ['*.attention.*']\noperands:\n  output:\n    input: {QUANTIZER}\n"
        "  weight_gradient: {input: null}\n",
        encoding="utf-8",
    )
    found = plan_of(run, "--precision", "r.yaml")["precision"]
    assert (found["options"], len(found["weights"])) == ({"scale_calculation_mode": "floor"}, 3)
    assert [(one["product"], one["operand"], one["block"]) for one in found["operands"]] == [
        ("output", "input", "1 x 128"),
        ("output", "weight", "1 x 32"),
        ("input_gradient", "output_gradient", "1 x 32"),
        ("input_gradient", "weight", "1 x 32"),
        ("weight_gradient", "output_gradient", "1 x 32"),
    ]


def test_a_difference_shows_another_recipe(run) -> None:
    """Also where no tensor and no collective differs."""
    for name, options in (("none", ()), ("mx", ("--precision", "mxfp8")), ("floor", ("--precision", "r.yaml"))):
        Path("r.yaml").write_text("recipe: mxfp8\nscale_calculation_mode: floor", encoding="utf-8")
        Path(f"{name}.json").write_text(json.dumps(plan_of(run, *options)), encoding="utf-8")
    for before, after, where in (
        ("none", "mx", "precision"),
        ("mx", "floor", "precision.options.scale_calculation_mode"),
    ):
        code, out, _ = run("diff", f"{before}.json", f"{after}.json", "--json")
        found = json.loads(out)
        assert code == 0
        assert found["moved"]
        assert where in [change["where"] for change in found["fields"]]
    assert not json.loads(run("diff", "mx.json", "mx.json", "--json")[1])["moved"]


def test_a_lock_has_the_recipe_and_check_finds_a_changed_file(run) -> None:
    Path("recipes").mkdir()
    file = Path("recipes/r.yaml")
    file.write_text("recipe: fp8-delayed\namax_history_len: 16", encoding="utf-8")
    assert run("lock", *FSDP, "--precision", "recipes/r.yaml", "--out", "a.lock.json")[0] == 0
    lock = json.loads(Path("a.lock.json").read_text(encoding="utf-8"))
    assert lock["request"]["precision"] == "./recipes/r.yaml"
    assert lock["precision"]["history"]["amax_history_len"] == 16
    assert run("check", "a.lock.json")[0] == 0
    file.write_text("recipe: fp8-delayed\namax_history_len: 16\nfp8_format: E4M3", encoding="utf-8")
    code, out, _ = run("check", "a.lock.json")
    assert code == 1
    assert "fp8_format" in out
    assert run("check", "--update", "a.lock.json")[0] == 0
    assert run("check", "a.lock.json")[0] == 0
    file.unlink()
    code, out, err = run("check", "a.lock.json")
    assert code in (1, 2)
    assert "recipes/r.yaml" in out + err
    assert run("lock", *FSDP, "--precision", "nvfp4", "--out", "b.lock.json")[0] == 0
    assert json.loads(Path("b.lock.json").read_text(encoding="utf-8"))["request"]["precision"] == "nvfp4"
    assert run("check", "b.lock.json")[0] == 0


def test_every_leaf_of_a_locked_recipe(run) -> None:
    options = (
        "--layout",
        "fsdp-tp",
        "--mesh",
        "fsdp=2,tensor=2",
        "--precision",
        "fp8-current",
        "--set",
        "num_layers=1",
    )
    assert run("lock", "llama3-test", *options, "--out", "a.lock.json")[0] == 0
    lock = json.loads(Path("a.lock.json").read_text(encoding="utf-8"))
    now = read_lock(lock, "a.lock.json")
    dice, likes = random.Random(3), values_of_a_field(lock)
    paths = [path for path in leaves(lock) if path[0] == "precision"]
    for path in dice.sample(paths, 120):
        value = drawn(at(lock, path), likes[place(path)], dice)
        try:
            before = read_lock(edited(lock, path, value), "a.lock.json")
        except InputError:
            continue
        assert moved(before, now).moved, (path, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": 3}, "'precision' of the plan is not an object"),
        ({"precision": {"recipe": "mxfp8"}}, "'operands' is not a list"),
        ({"precision": {"recipe": "mxfp8", "operands": [3]}}, "'operands' 0 of 'precision' is not an object"),
        (
            {"precision": {"recipe": "mxfp8", "operands": [], "weights": [{}]}},
            "'weights' 0 of 'precision' has no 'name'",
        ),
        (
            {"precision": {"recipe": "mxfp8", "operands": [], "weights": [{"name": "w", "operands": [{}]}]}},
            "'operands' 0 has no 'product' in 'weights' 0 of 'precision'",
        ),
    ],
)
def test_a_plan_in_a_file_whose_recipe_is_none(run, change: dict, message: str) -> None:
    Path("a.json").write_text(json.dumps({**plan_of(run), **change}), encoding="utf-8")
    code, out, err = run("diff", "a.json", "a.json")
    assert (code, out) == (2, "")
    assert err.startswith("shardwright: a.json: this is not a plan: "), err
    assert message in err


TENSORS = ("--precision", "fp8-current", "--batch", "4", "--length", "32")
DENSE = ("llama3-test", "--layout", "fsdp-tp", "--mesh", "fsdp=2,tensor=2", *TENSORS)
EXPERTS = ("mixtral-test", "--layout", "ep", "--mesh", "fsdp=2,expert=2", *TENSORS)
AS_EXPERTS = (
    "mixtral-test",
    "--layout",
    "tp-as-ep",
    "--mesh",
    "fsdp=2,tensor=2",
    "--precision",
    "fp8-row",
    *TENSORS[2:],
)
WIDTHS = ("num_layers=1", "embed=64", "num_heads=4", "num_kv_heads=4", "mlp=128", "vocab=64")


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("torch", (*DENSE, "--set", *WIDTHS)),
        rest("torch", (*DENSE, "--remat", "none", "--microbatches", "2", "--set", *WIDTHS)),
        rest("torch", (*EXPERTS, "--set", *WIDTHS, "num_experts=4")),
        rest("jax", (*DENSE, "--chips", "cpu:4", "--set", "num_layers=2", *WIDTHS[1:])),
        rest("jax", (*DENSE, "--chips", "cpu:4", "--remat", "none", "--set", *WIDTHS)),
        rest("jax", (*EXPERTS, "--chips", "cpu:4", "--set", *WIDTHS, "num_experts=4")),
        rest("jax", (*DENSE, "--chips", "cpu:4", "--remat", "dots", "--set", "num_layers=2", *WIDTHS[1:])),
        rest("jax", (*DENSE, "--chips", "cpu:4", "--set", *WIDTHS)),
        rest("jax", (*AS_EXPERTS, "--chips", "cpu:4", "--set", *WIDTHS, "num_experts=4")),
    ],
)
def test_a_program_reduces_the_amaxes_that_its_plan_has(run, engine: str, arguments: tuple[str, ...]) -> None:
    """The collectives of a dry run, or of a compiled program."""
    code, out, err = run("compile", *arguments, "--engine", engine, "--json")
    assert code == 0, err
    assert [found for found in json.loads(out)["findings"] if found["code"] == "SW302"] == []
    reduced = [one for one in json.loads(out)["collectives"] if one["kind"] == "all-reduce"]
    assert any(one["bytes_per_device"] <= 16 for one in reduced) or "fp8-row" in arguments
