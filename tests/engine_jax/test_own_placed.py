"""Where loaded arrays are: as the tree says, on no device that it does not choose, and never all on the first without a word."""

from __future__ import annotations

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.findings.errors import InputError
from shardwright.engine_jax import load, save


def test_a_shape_without_a_sharding_is_refused_where_there_are_several_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, {"w": jnp.arange(8.0), "v": jnp.zeros((2, 2)), "count": jnp.int32(5)}, step=0)
    like = {
        "w": jax.ShapeDtypeStruct((8,), jnp.float32),
        "v": jax.ShapeDtypeStruct((2, 2), jnp.float32),
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    with pytest.raises(InputError) as caught:
        load(tmp_path, like)
    assert str(caught.value) == (
        "'v' and 1 more have no sharding, and there are 8 devices. Give each jax.ShapeDtypeStruct one: of a plan's weights "
        "named_shardings(plan, mesh, tree) has them, of an optimizer's state state_shardings(plan, mesh, tree), and "
        "jax.sharding.SingleDeviceSharding(jax.devices()[0]) is the first device."
    )
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert load(tmp_path, like).tree["w"].tolist() == list(range(8))


def test_a_resumed_optimizer_steps_beside_sharded_weights(tmp_path: Path) -> None:
    """What optax makes for no weight, as a count of steps, is on no device that the program chose; nor is it after a load."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    weights = {"w": jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, PartitionSpec("fsdp")))}
    adam = optax.adam(1e-2)
    state = {"weights": weights, "adam": adam.init(weights), "key": jax.random.key(3)}
    save(tmp_path, state, step=1)
    step = jax.jit(lambda one: (adam.update(one["weights"], one["adam"]), jax.random.normal(one["key"], (8, 4))))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    shapes = {
        **shapes,
        "weights": weights,
        "adam": (shapes["adam"][0]._replace(mu=weights, nu=weights), state["adam"][1]),
    }
    for like in (state, shapes):
        loaded = load(tmp_path, like).tree
        for one, same in zip(jax.tree.leaves(step(loaded)), jax.tree.leaves(step(state)), strict=True):
            np.testing.assert_array_equal(one, same)
    committed = jax.device_put(np.ones(3), jax.devices()[2])
    save(tmp_path, {"w": committed}, step=2)
    loaded = load(tmp_path, {"w": committed}).tree["w"]
    assert loaded.committed
    assert loaded.devices() == {jax.devices()[2]}


def test_the_state_of_flax_and_the_arrays_of_equinox(tmp_path: Path) -> None:
    class Model(nnx.Module):
        def __init__(self, seed: int) -> None:
            rngs = nnx.Rngs(seed)
            self.up, self.drop, self.norm = (
                nnx.Linear(8, 4, rngs=rngs),
                nnx.Dropout(0.1, rngs=rngs),
                nnx.BatchNorm(4, rngs=rngs),
            )

    first, other = Model(0), Model(1)
    save(tmp_path, nnx.state(first), step=1)
    nnx.update(other, load(tmp_path, nnx.state(other)).tree)
    for one, same in zip(jax.tree.leaves(nnx.state(other)), jax.tree.leaves(nnx.state(first)), strict=True):
        assert (one == same).all()

    module = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))
    arrays, rest = eqx.partition(module, eqx.is_array)
    save(tmp_path, arrays, step=2)
    assert eqx.tree_equal(eqx.combine(load(tmp_path, jax.tree.map(jnp.zeros_like, arrays)).tree, rest), module)
    with pytest.raises(InputError, match=r"^'activation' is the function 'relu': a checkpoint holds arrays and values"):
        load(tmp_path, module)
