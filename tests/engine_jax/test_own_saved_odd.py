"""Trees with odd names and leaves: they are loaded as they were saved, or refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardwright.checkpoint import CheckpointError, verify
from shardwright.engine_jax import load, save
from shardwright.engine_jax.orbax_folder.exporting import export_folder
from shardwright.engine_jax.orbax_folder.importing import import_folder

MARKED = {
    "$tuple": 3,
    "$": {"$mapping": np.arange(3), "$$": jax.random.key(4)},
    "$float": [{"$x": "a text"}, None, np.float32(1.5)],
}
"""Names like the marks of values that JSON does not have."""


def bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.dtype, jax.random.key_data(leaf).tolist()
    return (leaf.dtype, leaf.tolist()) if hasattr(leaf, "dtype") else leaf


def test_names_may_look_like_marks_of_values(tmp_path: Path) -> None:
    save(tmp_path, MARKED, step=1)
    assert verify(tmp_path)["ok"]
    assert jax.tree.map(bits, load(tmp_path, MARKED).tree) == jax.tree.map(bits, MARKED)


def test_such_names_go_through_a_folder_of_orbax(tmp_path: Path) -> None:
    save(tmp_path / "ours", MARKED, step=1)
    export_folder(tmp_path / "ours", tmp_path / "orbax-1")
    import_folder(tmp_path / "orbax-1", tmp_path / "again", leave_out=[])
    assert jax.tree.map(bits, load(tmp_path / "again", MARKED).tree) == jax.tree.map(bits, MARKED)


@pytest.mark.parametrize(
    ("dtype", "becomes"), [("int64", "int32"), ("uint64", "uint32"), ("float64", "float32")], ids=str
)
def test_64_bits_are_never_made_32_silently(tmp_path: Path, dtype: str, becomes: str) -> None:
    saved = np.array([1 << 40, 3], dtype)
    save(tmp_path, {"n": saved}, step=1)
    with pytest.raises(CheckpointError, match=f"'n': JAX makes {becomes} of {dtype} while jax_enable_x64 is off"):
        load(tmp_path, {"n": jax.ShapeDtypeStruct((2,), saved.dtype)})
    assert load(tmp_path, {"n": saved}).tree["n"].tolist() == saved.tolist()
    with jax.enable_x64(True):
        like = jax.ShapeDtypeStruct((2,), saved.dtype, sharding=SingleDeviceSharding(jax.devices()[0]))
        assert load(tmp_path, {"n": like}).tree["n"].tolist() == saved.tolist()


def test_keys_on_a_mesh_of_one_device_have_the_sharding_that_was_asked_for(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    save(tmp_path, {"keys": keys}, step=1)
    wanted = NamedSharding(Mesh(np.array(jax.devices()[3:4]), ("x",)), PartitionSpec("x"))
    found = load(tmp_path, {"keys": jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=wanted)}).tree["keys"]
    assert (found.sharding, bits(found)) == (wanted, bits(keys))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": np.ma.masked_array([1.0, 2.0], [True, False])}, "'a' is a numpy.ma.MaskedArray"),
        ({"a": 10**5000}, "'a' is an integer of more than 4,300 digits"),
        ({"\ud800": np.zeros(2)}, r"tensor '\\ud800': its name has half of a surrogate pair"),
    ],
    ids=["a mask", "a long integer", "no character"],
)
def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "new", tree, step=1)
    assert not (tmp_path / "new").exists()
