"""One process of a program that is not ours: `python -m tests.engine_jax.own_member PORT INDEX FOLDER`, which prints what it found.

Two processes with two devices each save and load a tree, and some trees that are refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.checkpoint.reading import streams
from shardwright.core.findings.errors import InputError
from shardwright.engine_jax import load, save
from shardwright.storage.files import open_regular
from tests.checkpoint.reads import Counted, refused

WEIGHT = np.arange(64, dtype=np.float32).reshape(8, 8)


def placed(mesh: Mesh, array: np.ndarray, *spec: Any) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def tree(mesh: Mesh, *spec: Any) -> dict[str, Any]:
    return {
        "w": placed(mesh, WEIGHT, *spec),
        "same": placed(mesh, WEIGHT[0]),
        "host": np.arange(3),
        "key": jax.random.wrap_key_data(placed(mesh, np.asarray([1, 2], np.uint32))),
        "step": 4,
    }


def message(do: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    try:
        do(*arguments, **named)
    except InputError as error:
        return str(error)
    return ""


def run(folder: str, index: int) -> dict[str, Any]:
    """What this process found: local shards that are wrong after a load, and the messages of refusals."""
    mesh = Mesh(np.array(jax.devices()).reshape(4), ("x",))
    save(f"{folder}/good", tree(mesh, "x"), step=1)
    like = tree(mesh, None, "x")
    with patch.object(streams, "open_regular", Counted):
        loaded = load(f"{folder}/good", like).tree
    with patch.object(streams, "open_regular", refused if index else open_regular):
        one_cannot_read = message(load, f"{folder}/good", like).replace(folder, "FOLDER")
    wrong = [
        name
        for name, leaf in loaded.items()
        if isinstance(leaf, jax.Array) and name != "key"
        for shard in leaf.addressable_shards
        if not np.array_equal(shard.data, (WEIGHT if name == "w" else WEIGHT[0])[shard.index])
    ]
    if jax.random.key_data(loaded["key"]).addressable_shards[0].data.tolist() != [1, 2]:
        wrong.append("key")
    if loaded["host"].tolist() != [0, 1, 2] or loaded["step"] != 4:
        wrong.append("values")
    bad = f"{folder}/bad"
    return {
        "wrong": wrong,
        "bytes read": Counted.total,
        "one cannot read": one_cannot_read,
        "host arrays": message(save, bad, {"w": np.full(2, index)}, step=1),
        "values": message(save, bad, {"lr": 0.5 * (index + 1)}, step=1),
        "one fails": message(save, bad, {"w": len if index else jnp.zeros(2)}, step=1),
        "load of one": message(load, f"{folder}/good", {**like, "w": placed(mesh, WEIGHT[:, : 4 * (2 - index)])}),
        "no such step": message(load, f"{folder}/good", like, step=7).replace(folder, "FOLDER"),
    }


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
    print(json.dumps(run(sys.argv[3], int(sys.argv[2]))))
    jax.distributed.shutdown()
