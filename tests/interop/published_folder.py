"""Model folders as transformers writes them, with weights of ours that reveal any mix-up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from shardwright.core.model.table import ModelTable
from shardwright.models import build
from tests.models.published import model_class, published_config
from tests.models.random_weights import random_weights
from tests.models.to_published import to_published

SMALL = {"num_layers": "3", "vocab": "256"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A folder, the model that wrote it, and the weights that it holds under our names."""

    path: Path
    table: ModelTable
    model: transformers.PreTrainedModel
    weights: dict[str, np.ndarray]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


def made_folder(
    path: Path,
    name: str,
    settings: dict[str, str] | None = None,
    *,
    shard: str = "5GB",
    dtype: torch.dtype = torch.float32,
    stacked: bool = False,
) -> Made:
    """A model of ours, with the config of transformers, saved by transformers. ``stacked``: with experts as it holds them."""
    table = build(name, {**SMALL, **(settings or {})})
    weights = random_weights(table)
    config = published_config(table.architecture)
    first = path.parent / f"{path.name}-first"
    first.mkdir()
    published = {
        name: torch.from_numpy(np.ascontiguousarray(array))
        for weight in table.weights
        for name, array in to_published(weight, weights[weight.name])
    }
    config.save_pretrained(first)
    save_file(published, first / "model.safetensors", metadata={"format": "pt"})
    model, loaded = model_class(config).from_pretrained(first, dtype=dtype, output_loading_info=True)
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded
    model.save_pretrained(path, max_shard_size=shard, save_original_format=not stacked)
    return Made(path=path, table=table, model=model, weights=weights)


def loaded_again(path: Path) -> transformers.PreTrainedModel:
    """The model of a folder, by transformers, which must find every tensor and no other."""
    config = transformers.AutoConfig.from_pretrained(path)
    model, loaded = model_class(config).from_pretrained(path, output_loading_info=True, attn_implementation="eager")
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded
    return model
