"""Modules whose weights rest as codes, in one process: beside high precision, under any optimizer, loaded from either, published, refused."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.checkpoint import CheckpointError, DamagedError
from shardwright.core.recipes.presets import preset
from shardwright.engine_torch import load, save
from shardwright.engine_torch.modules import (
    Embedding,
    LayerNormMLP,
    Linear,
    TransformerLayer,
    keep_main_weights,
    load_published_weights,
    published_weights,
    quantized_model_init,
    update_scales,
)
from tests.conftest import ROOT
from tests.engine_torch.refused_modules import refusal


def resting(recipe: object, *, main: bool = True, width: int = 128, **options: Any) -> LayerNormMLP:
    torch.manual_seed(3)
    module = LayerNormMLP(width, width, activation="swiglu", recipe=recipe, primary_weights="codes", **options)
    module.reset_parameters()
    if main:
        keep_main_weights(module)
    return module


def high(recipe: object, width: int = 128) -> LayerNormMLP:
    torch.manual_seed(3)
    return LayerNormMLP(width, width, activation="swiglu", recipe=recipe)


def bits(module: nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-row"])
def test_a_module_multiplies_what_the_same_in_high_precision_quantizes(recipe: str) -> None:
    ours, theirs = resting(recipe, main=False), high(recipe)
    x = torch.randn(4, 32, 128)
    tokens_of_codes, tokens_of_values = x.clone().requires_grad_(), x.clone().requires_grad_()
    cotangent = torch.randn_like(x)
    for module, tokens in ((ours, tokens_of_codes), (theirs, tokens_of_values)):
        module(tokens).backward(cotangent)
    assert tokens_of_codes.grad is not None
    assert tokens_of_values.grad is not None
    assert torch.equal(tokens_of_codes.grad, tokens_of_values.grad)
    for name, parameter in theirs.named_parameters():
        gradient = ours.get_parameter(name).grad
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad), name


OPTIMIZERS: Sequence[tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = (
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adafactor, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adagrad, {}),
)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_any_optimizer_updates_main_weights(kind: Callable[..., torch.optim.Optimizer], options: Any) -> None:
    ours, theirs = resting("fp8-block", width=64), high("fp8-block", 64)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x, optimizers = torch.randn(8, 64), [kind(module.parameters(), lr=1e-2, **options) for module in (ours, theirs)]
    keep_main_weights(ours, optimizers[0])
    for _ in range(3):
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            module(x).square().sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    bits_of_codes = bits(ours)
    assert all(bits_of_codes[name] == array for name, array in bits(theirs).items())
    assert torch.equal(ours(x), theirs(x))


def test_main_weights_that_something_else_changes_are_quantized_before_they_are_used() -> None:
    ours, x = resting("mxfp8"), torch.randn(4, 128)
    before = ours(x)
    with torch.no_grad():
        ours.fc2_weight.mul_(2)
    assert not torch.equal(ours(x), before)
    ours.state_dict()["fc2_weight"].div_(2)
    assert torch.equal(ours(x), before)


def test_initial_values_are_preserved_until_main_weights_take_them() -> None:
    ours, theirs = resting("fp8-current", preserve_high_precision_init_val=True), high("fp8-current")
    assert torch.equal(ours.state_dict()["fc1_weight"], theirs.fc1_weight)
    assert not torch.equal(resting("fp8-current").state_dict()["fc1_weight"], theirs.fc1_weight)


def test_a_context_constructs_modules_of_codes() -> None:
    with quantized_model_init(recipe="mxfp8"):
        inside = [Linear(32, 32), Linear(32, 32, recipe="fp8-row"), Embedding(8, 8)]
        with quantized_model_init(enabled=False):
            outside = Linear(32, 32, recipe="mxfp8")
    assert [getattr(module, "primary_weights", None) for module in (*inside, outside)] == ["codes", "codes", None, None]
    assert [module.recipe and module.recipe.name for module in inside] == ["mxfp8", "fp8-row", None]


def test_a_layer_of_a_transformer_passes_it_on() -> None:
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "recipe": "mxfp8"}
    layers = []
    for primary in ("codes", None):
        torch.manual_seed(2)
        layers.append(TransformerLayer(64, 128, 4, primary_weights=primary, **options))
        layers[-1].reset_parameters()
    x = torch.randn(8, 2, 64)
    assert torch.equal(layers[0](x), layers[1](x))
    assert sum(name.endswith("weight_codes") for name in layers[0].state_dict()) == 6


def test_a_recipe_may_say_that_weights_rest_as_codes() -> None:
    assert Linear(32, 32, recipe=replace(preset("mxfp8"), rest_quantized=True)).primary_weights == "codes"


@pytest.mark.parametrize(
    ("name", "tensor", "needed"),
    [
        (
            "resting.weight_codes",
            torch.ones(64, 64),
            r"\(64, 64\) in torch.float32, and must be \(64, 64\) in torch.float8_e4m3fn",
        ),
        (
            "resting.weight_scales",
            torch.ones(64, 3, dtype=torch.uint8),
            r"\(64, 3\) in torch.uint8, and must be \(64, 2\)",
        ),
        ("weight", torch.ones(64, 32), r"\(64, 32\) in torch.float32, and must be \(64, 64\)"),
    ],
)
def test_arrays_that_are_no_codes_of_a_weight_are_not_loaded(name: str, tensor: torch.Tensor, needed: str) -> None:
    module = Linear(64, 64, recipe="mxfp8", primary_weights="codes")
    module.reset_parameters()
    keep_main_weights(module)
    before = bits(module)
    with pytest.raises(RuntimeError, match=needed):
        module.load_state_dict({**module.state_dict(), name: tensor})
    assert bits(module) == before


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_inference_mode_has_the_same_output(recipe: str) -> None:
    ours, x = resting(recipe), torch.randn(4, 128)
    with torch.inference_mode():
        output = ours(x)
    assert torch.equal(output, ours(x))


def test_a_copy_has_weights_of_its_own() -> None:
    ours, x = resting("nvfp4"), torch.randn(4, 128)
    other, before = copy.deepcopy(ours), ours(x)
    with torch.no_grad():
        other.fc1_weight.zero_()
    assert torch.equal(ours(x), before)
    assert not torch.equal(other(x), before)


@pytest.mark.parametrize("door", ["ours", "state dict"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-current"])
def test_high_precision_and_codes_are_loaded_from_each_other(recipe: str, door: str, tmp_path: Path) -> None:
    """The value of a weight, by what is saved and what loads it."""
    kinds: Mapping[str, Callable[[], LayerNormMLP]] = {
        "main": lambda: resting(recipe),
        "codes": lambda: resting(recipe, main=False),
        "high": lambda: high(recipe),
    }
    for number, (saved, wanted) in enumerate((kind, wanted_kind) for kind in kinds for wanted_kind in kinds):
        source, target = kinds[saved](), kinds[wanted]()
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.requires_grad_(False)
            if saved != "codes":
                source.fc1_weight.mul_(1.5)
                source.load_state_dict(
                    {key: tensor for key, tensor in source.state_dict().items() if "resting" not in key}
                )
            else:
                source.load_state_dict({**high(recipe).state_dict(), "fc1_weight": high(recipe).fc1_weight * 1.5})
        if door == "ours":
            save(tmp_path / str(number), source, step=1)
            load(tmp_path / str(number), target)
        else:
            target.load_state_dict(source.state_dict())
        x = torch.randn(2, 128)
        if (saved, wanted) != ("codes", "high"):
            assert torch.equal(source(x), target(x)), (saved, wanted)
        values = target.state_dict().get("fc1_weight")
        codes = source.resting.copies[0].values(codes_of(source), (128, 128)) if saved == "codes" else None
        needed = source.state_dict()["fc1_weight"] if codes is None else codes
        assert values is None or torch.equal(values, needed), (saved, wanted)


def codes_of(module: LayerNormMLP) -> Sequence[torch.Tensor]:
    held = module.resting.held("fc1_weight")
    assert held is not None
    return held.arrays[0]


def test_a_checkpoint_of_another_recipe_is_refused_and_its_main_weights_are_taken(tmp_path: Path) -> None:
    source = resting("mxfp8")
    save(tmp_path, source, step=1)
    target = resting(preset("mxfp8", scale_calculation_mode="floor"))
    before = bits(target)
    with pytest.raises(
        CheckpointError, match="weights that rest as the codes of 'mxfp8', and this module's are those of 'mxfp8 sc"
    ):
        load(tmp_path, target)
    with pytest.raises(RuntimeError, match="weights that rest as the codes of 'mxfp8'"):
        target.load_state_dict(source.state_dict())
    assert bits(target) == before
    load(tmp_path, target, only=["*weight", "*bias"])
    x = torch.randn(2, 128)
    assert torch.equal(target.state_dict()["fc2_weight"], source.state_dict()["fc2_weight"])
    assert not torch.equal(target(x), source(x))


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_of_codes_is_found(seed: int, tmp_path: Path) -> None:
    save(tmp_path, resting("mxfp8"), step=1)
    (data,) = tmp_path.rglob("*.safetensors")
    damaged, draw = bytearray(data.read_bytes()), random.Random(seed)
    tensors = json.loads(damaged[8 : 8 + int.from_bytes(damaged[:8], "little")])
    name = draw.choice(sorted(entry for entry in tensors if "resting." in entry))
    start, stop = tensors[name]["data_offsets"]
    damaged[
        -max(entry["data_offsets"][1] for key, entry in tensors.items() if key != "__metadata__")
        + draw.randrange(start, stop)
    ] ^= 1 << draw.randrange(8)
    data.write_bytes(bytes(damaged))
    with pytest.raises(DamagedError, match="resting"):
        load(tmp_path, resting("mxfp8"))


def test_delayed_amaxes_of_main_weights_are_those_of_high_precision() -> None:
    ours, theirs = resting("fp8-delayed"), high("fp8-delayed")
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    keep_main_weights(ours, optimizers[0])
    for number in range(4):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(number))
        for module in (ours, theirs):
            module(x).square().mean().backward()
            update_scales(module)
        # Codes are made again by the new factors, in the step or in a pass without one.
        assert torch.equal(ours.eval()(x), theirs.eval()(x)), number
        for module in (ours, theirs):
            module.train()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    bits_of_codes = bits(ours)
    assert all(bits_of_codes[name] == array for name, array in bits(theirs).items())


def test_the_published_form_goes_in_and_out() -> None:
    ours, other = resting("fp8-block", width=256), resting("fp8-block", width=256)
    ours.load_state_dict({**ours.state_dict(), **{k: v * 3 for k, v in ours.state_dict().items() if k == "fc2_weight"}})
    tensors = {name: tensor.clone() for name, tensor in published_weights(ours).items()}
    assert sorted(tensors) == [
        f"{name}_weight{end}" for name in ("fc1_gate", "fc1", "fc2") for end in ("", "_scale_inv")
    ]
    tensors["fc2_weight_scale_inv"] *= 1.7  # As others publish them, no power of two.
    load_published_weights(other, tensors)
    scales = tensors["fc2_weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(other.state_dict()["fc2_weight"], tensors["fc2_weight"].float() * scales)
    assert all(
        torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8))
        for name, tensor in published_weights(other).items()
    )
    del tensors["fc1_weight"]
    assert refusal(lambda: load_published_weights(other, tensors)) == (
        "'fc1_weight' is missing; it must be (256, 256) in torch.float8_e4m3fn."
    )
    assert refusal(lambda: published_weights(resting("mxfp8"))).startswith(
        "LayerNormMLP: 'fc1_weight' rests as codes of float8_e4m3fn in "
    )


def untouched() -> Linear:
    return Linear(32, 32, recipe="mxfp8", primary_weights="codes", name="up")


REFUSED: Sequence[tuple[Callable[[], object], str]] = (
    (
        lambda: untouched()(torch.ones(2, 32)),
        "Linear 'up': 'weight' is to rest as codes, and is in high precision still. Call reset_parameters(defer_init=False) after "
        "fully_shard; then load.",
    ),
    (lambda: Linear(8, 8, primary_weights="fp8"), "Linear: primary_weights is 'fp8'; it must be 'codes' or None."),
    (
        lambda: Linear(32, 32, recipe="mxfp8", primary_weights="codes", params_dtype=torch.bfloat16),
        "Linear: 'weight' is torch.bfloat16, and main weights of codes are float32, as their gradients must be. Leave out params_dtype; "
        "for a computation in bfloat16 give fully_shard MixedPrecisionPolicy(param_dtype=torch.bfloat16), or use torch.autocast.",
    ),
    (
        lambda: resting("mxfp8", main=False).fc1_weight.add_(1),
        "LayerNormMLP: 'fc1_weight' rests as codes, and only its module may read it: aten.add_.Tensor needs elements. "
        "set_device_mesh and fully_shard come before reset_parameters; an optimizer needs keep_main_weights(module, optimizer) first; a "
        "weight that another module shares, as a tied embedding, needs primary_weights=None.",
    ),
    (
        lambda: resting("mxfp8").to(torch.bfloat16),
        "LayerNormMLP: 'fc1_weight' rests as codes, and its main weight is torch.float32: it cannot become torch.bfloat16. For a narrower "
        "computation give fully_shard a MixedPrecisionPolicy, or use torch.autocast.",
    ),
    (
        lambda: keep_main_weights(untouched()),
        "Linear 'up': 'weight' is to rest as codes, and is in high precision still. "
        "Call reset_parameters(defer_init=False) after fully_shard; then load.",
    ),
)


@pytest.mark.parametrize(("do", "text"), REFUSED)
def test_what_codes_cannot_do_is_refused(do: Callable[[], object], text: str) -> None:
    with torch.no_grad():
        assert refusal(do) == text


SAVING = """
import sys
from shardwright.engine_torch import save
from tests.engine_torch.test_resting_modules import resting
module = resting("mxfp8")
for step in range(1, 200):
    module.load_state_dict({name: tensor * 1.01 for name, tensor in module.state_dict().items() if name == "fc1_weight"}, strict=False)
    save(sys.argv[1], module, step=step)
    print(step, flush=True)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(4))
def test_a_save_that_is_killed_leaves_the_one_before(seed: int, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SAVING, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(random.Random(seed).random())
    process.kill()
    done = 1 + len(process.communicate()[0].splitlines())
    target = resting("mxfp8")
    step = load(tmp_path, target).step
    assert step in (done, done + 1)
    needed = resting("mxfp8")
    for _ in range(step):
        scaled = needed.state_dict()["fc1_weight"] * 1.01
        needed.load_state_dict({"fc1_weight": scaled}, strict=False)
    assert bits(target) == bits(needed)
