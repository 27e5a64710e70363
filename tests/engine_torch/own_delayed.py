"""What ranks do with a module under delayed scaling: the amaxes that they agree on, and what they are refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from shardwright.core.recipes.presets import preset
from shardwright.engine_torch import load, save
from shardwright.engine_torch.modules import LayerNormMLP, Linear, update_scales
from tests.engine_torch.refused_modules import refusal


def layer(**options: int) -> Linear:
    torch.manual_seed(1)
    return Linear(16, 8, recipe=preset("fp8-delayed", amax_history_len=4, **options), name="up")


def steps(module: Linear, xs: list[torch.Tensor]) -> None:
    """A step for each batch, of two microbatches."""
    for x in xs:
        for half in x.chunk(2):
            module(half).square().sum().backward()
        with warnings.catch_warnings():
            # Batches differ eightfold.
            warnings.filterwarnings("ignore", message=".* times what its factor holds")
            update_scales(module)
        with torch.no_grad():
            for one in module.parameters():
                assert one.grad is not None
                if dist.is_initialized():
                    dist.all_reduce(one.grad)
                one -= 1e-3 * one.grad
                one.grad = None


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(16, 16, generator=generator) * 2.0**number for number in (0, 3, -2)]


def agreed() -> list[list[float]]:
    """The histories of inputs after steps in which each rank has tokens of its own: of all ranks, and of pairs of ranks."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "within"))
    found = []
    for group in (None, pairs.get_group("within")):
        module = layer()
        if group is not None:
            module.set_device_mesh(amax_group=group)
        steps(module, [x.chunk(4)[dist.get_rank()] for x in batches()])
        assert module.delayed is not None
        found.append(module.delayed.kept("weight", "input").history.tolist())
    return found


def unequal() -> tuple[str, str]:
    """What each rank reads where one has another factor, and where one has another amax."""
    module = layer()
    assert module.delayed is not None
    kept = module.delayed.kept("weight", "weight")
    if dist.get_rank() == 2:
        kept.factor.fill_(2.0)
    first = refusal(lambda: update_scales(module))
    kept.factor.fill_(1.0)
    if dist.get_rank() == 1:
        kept.history[3] = 0.5
    return first, refusal(lambda: update_scales(module))


def of_another_recipe(folder: Path) -> list[str]:
    """What is read where a module loads the state of another recipe: by us, by ``load_state_dict``, and by DCP in place."""
    save(folder / "ours", layer(), step=1)
    save_by_dcp(layer().state_dict(), checkpoint_id=folder / "dcp")
    found = []

    def loaded_in_place() -> None:
        other = layer(margin=2)
        load_by_dcp(other.state_dict(), checkpoint_id=folder / "dcp")
        update_scales(other)

    def loaded_by_dcp() -> None:
        other = layer(margin=2)
        state = other.state_dict()
        load_by_dcp(state, checkpoint_id=folder / "dcp")
        other.load_state_dict(state)

    for do in (
        lambda: load(folder / "ours", layer(margin=2)),
        loaded_in_place,
        lambda: layer(margin=2).load_state_dict(layer().state_dict()),
        loaded_by_dcp,
    ):
        try:
            do()
        except Exception as error:
            found.append(str(error))
    return found


ROWS = 48
"""Of the global batch: a multiple of every number of ranks."""


def network(name: str = "fp8-delayed") -> nn.Sequential:
    torch.manual_seed(3)
    recipe = preset(name, amax_history_len=4) if name == "fp8-delayed" else preset(name)
    return nn.Sequential(LayerNormMLP(32, 64, activation="swiglu", recipe=recipe), Linear(32, 32, recipe=recipe))


def mean_step(module: nn.Module, number: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """A step whose loss is the mean over a rank's own rows; the averaged gradient."""
    generator = torch.Generator().manual_seed(number)
    inputs, targets = torch.randn(2, ROWS, 32, generator=generator)
    index, num = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = module(inputs.chunk(num)[index])
    functional.mse_loss(found, targets.chunk(num)[index]).backward()
    update_scales(module)
    gradients = []
    for one in module.parameters():
        assert one.grad is not None
        if dist.is_initialized():
            dist.all_reduce(one.grad)
            one.grad /= num
        gradients.append(one.grad.flatten().clone())
    if optimizer is not None:
        optimizer.step()
    module.zero_grad()
    return torch.cat(gradients).tolist()


def saved_after_steps(folder: Path) -> list[float]:
    """The gradient of the step after a save."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number in range(3):
        mean_step(module, number, optimizer)
    save(folder / "ours", module, step=3)
    if dist.is_initialized():
        save_by_dcp(module.state_dict(), checkpoint_id=folder / "dcp")
    return mean_step(module, 3)


def next_gradients(folder: Path) -> list[list[float]]:
    """The gradient of the next step after a load by us, and by DCP in place."""
    module = network()
    load(folder / "ours", module)
    found = [mean_step(module, 3)]
    if (folder / "dcp").exists() and dist.is_initialized():
        module = network()
        load_by_dcp(module.state_dict(), checkpoint_id=folder / "dcp")
        found.append(mean_step(module, 3))
    return found


def sources() -> tuple[int, int]:
    """How many groups of four ranks have tokens of their own, without tp and with pairs of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    torch.manual_seed(0)
    layers = [Linear(32, 32, parallel_mode="row", recipe="fp8-delayed") for _ in range(2)]
    layers[1].set_device_mesh(mesh["model"])
    return layers[0].num_sources, layers[1].num_sources
