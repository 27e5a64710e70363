"""What ranks do with PyTorch's own folders of ``torch.distributed.checkpoint``, without any part of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.engine_torch.own_saved import cleared, locals_of, sharded, stepped


def save_plainly(kind: str, sizes: tuple[int, ...], folder: str) -> None:
    module = sharded(kind, sizes)
    model, optimizer = get_state_dict(module, stepped(module))
    save({"model": model, "optim": optimizer, "next_row": 8, "seen": {"files": ["a", "b"]}}, checkpoint_id=folder)


def load_plainly(kind: str, sizes: tuple[int, ...], folder: str) -> tuple[list[str], Any]:
    """The names of what a rank does not hold after PyTorch's own load; and a value."""
    right = sharded(kind, sizes)
    needed = locals_of(right, stepped(right))
    module = cleared(sharded(kind, sizes))
    optimizer = stepped(module)
    model, state = get_state_dict(module, optimizer)
    everything = {"model": model, "optim": state, "next_row": 0}
    load(everything, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=state)
    found = locals_of(module, optimizer)
    wrong = [name for name, array in found.items() if array.tobytes() != needed[name].tobytes()]
    return wrong, everything["next_row"]


def plain_state(seed: int) -> dict[str, Any]:
    """A state dict with every dtype, 0-d tensors, empty dims and values."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, (*shape, 8), generator=generator, dtype=torch.uint8)

    dtypes = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    dtypes += [torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64]
    shapes = [(3, 5), (7,), (1,), (2, 3, 4)]
    state: dict[str, Any] = {
        str(dtype).removeprefix("torch."): some(*shapes[number % 4]).view(dtype) for number, dtype in enumerate(dtypes)
    }
    state["flags"] = torch.tensor([True, False])
    state["nested"] = {"count": torch.tensor(7), "inner": [{"w": torch.ones(3, dtype=torch.bfloat16)}, {"w": some(2)}]}
    state["empty"], state["turned"] = torch.zeros(4, 0, 2), torch.arange(12.0).view(3, 4).t()
    state["values"] = {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", "b"], "none": None, "inf": float("inf")}
    state["step"] = 7
    return state
