"""From the options to a request: the defaults, and that the plan shows them."""

from __future__ import annotations

import pytest

from shardwright import InputError, make_plan
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request


def mesh_of(model: str, layout: str | None, **options) -> dict[str, int]:
    return dict(make_plan(typed_request(model, layout, PlanOptions(**options)).request).mesh.shape)


def test_a_model_alone_has_its_natural_layout_mesh_batch_length_and_dtype():
    question = typed_request("deepseek3-671b", None, PlanOptions())
    request = question.request
    assert (request.layout.name, request.batch, request.length, request.dtype) == ("ep-as-cp", 64, 4096, "bfloat16")
    assert dict(request.mesh_sizes) == {"data": 1, "fsdp": 16, "expert": 8}
    assert question.chosen == {
        "--layout": "ep-as-cp",
        "--mesh": "data=1,fsdp=16,expert=8",
        "--batch": "64",
        "--length": "4096",
        "--engine": "jax",
        "--dtype": "bfloat16",
        "--weights-dtype": "float32",
        "--moments-dtype": "float32",
        "--remat": "full",
        "--microbatches": "1",
    }


def test_given_options_are_not_chosen_by_default():
    given = PlanOptions(
        mesh="fsdp=2",
        engine="torch",
        batch=4,
        length=32,
        weights_dtype="bfloat16",
        moments_dtype="bfloat16",
        dtype="float32",
        remat="dots",
        microbatches=2,
        move="attention=ring,moe=weights",
        load_balance=True,
    )
    question = typed_request("deepseek3-test", "ep", given)
    request = question.request
    assert question.chosen == {}
    assert (request.engine, request.batch, request.length, request.dtype) == ("torch", 4, 32, "float32")
    assert (request.weights_dtype, request.moments_dtype, request.remat) == ("bfloat16", "bfloat16", "dots")
    assert (request.layout.move_attention, request.layout.move_moe, request.microbatches) == ("ring", "weights", 2)
    assert request.load_balanced


def test_the_defaults_written_out_are_the_same_request():
    """The line `by default` can be appended to the command."""
    question = typed_request("mixtral-test", None, PlanOptions())
    options = {option.removeprefix("--").replace("-", "_"): value for option, value in question.chosen.items()}
    layout = options.pop("layout")
    counts = {name: int(options.pop(name)) for name in ("batch", "length", "microbatches")}
    again = typed_request("mixtral-test", layout, PlanOptions(**options, **counts))
    assert again.request == question.request
    assert again.chosen == {}


def test_the_natural_mesh_belongs_to_the_natural_layout():
    assert mesh_of("deepseek3-test", None) == {"data": 1, "fsdp": 2, "expert": 4}
    assert mesh_of("deepseek3-test", None, devices=8) == {"data": 1, "fsdp": 2, "expert": 4}
    assert mesh_of("deepseek3-test", "hsdp") == {"data": 2, "fsdp": 4}


def test_another_number_of_devices_takes_the_natural_mesh_away():
    assert mesh_of("deepseek3-test", None, devices=16) == {"data": 1, "fsdp": 4, "expert": 4}
    assert mesh_of("deepseek3-test", None, mesh="expert=2", devices=8) == {"data": 1, "fsdp": 4, "expert": 2}


def test_chips_give_the_devices_and_the_limit():
    request = typed_request("deepseek3-test", "hsdp", PlanOptions(chips="h100:8x8")).request
    assert request.chip is not None
    assert (request.chip.name, request.devices) == ("H100 SXM", 64)
    assert mesh_of("deepseek3-test", "hsdp", chips="cpu:4") == {"data": 2, "fsdp": 2}


def test_dimensions_are_set_in_the_table():
    question = typed_request("llama3-test", None, PlanOptions(set=(("num_layers=2", "vocab=512"), ("embed=64",))))
    assert question.request.table.num_layers == 2
    assert question.request.table.weight("embedding.tokens").shape == (512, 64)


def test_a_user_s_own_file_is_a_layout(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("mesh: {fsdp: auto}\nroles: {fsdp: fsdp}\n", encoding="utf-8")
    assert typed_request("llama3-test", str(path), PlanOptions()).request.layout.name == "mine"


def test_an_empty_name_is_not_a_layout():
    with pytest.raises(InputError, match=r"^no layout is called ''\."):
        typed_request("llama3-test", "", PlanOptions())


def test_a_mistyped_size_is_refused_at_once():
    """Past any device there is; and as many as are taken are planned, in a time that does not grow with the number."""
    with pytest.raises(
        InputError, match=r"^the size of mesh axis 'fsdp' is above 10\^20, and must be at most 1,048,576\."
    ):
        typed_request("llama3-test", "fsdp", PlanOptions(mesh=f"fsdp={10**26}"))
    assert make_plan(typed_request("llama3-test", "fsdp", PlanOptions(mesh=f"fsdp={1 << 20}")).request).errors


@pytest.mark.parametrize("given", [0.0, -1.0, float("nan"), float("inf")])
def test_a_buffer_of_no_size_is_refused_by_its_option(given: float):
    with pytest.raises(InputError, match=rf"^--expert-buffer is {given:g}, and must be a finite number above 0\.$"):
        typed_request("mixtral-test", None, PlanOptions(expert_buffer=given))


def test_a_buffer_above_the_largest_need_has_that_capacity():
    given = PlanOptions(expert_buffer=1e308, set=(("capacity_factor=1e308",),))
    assert make_plan(typed_request("mixtral-test", None, given).request).sizes["slots"] > 0


def test_a_value_without_a_default_is_required(monkeypatch):
    from dataclasses import replace

    from shardwright.cli.typed import request as module
    from shardwright.models import build

    monkeypatch.setattr(module, "build", lambda *_: replace(build("llama3-test"), natural_batch=None))
    with pytest.raises(InputError, match=r"^llama3-test has no value of its own for --batch\. Give one\.$"):
        typed_request("llama3-test", None, PlanOptions())
