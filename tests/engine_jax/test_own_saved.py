"""A user's own pytree, saved under one sharding and loaded under another, bit for bit; and what is refused."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.checkpoint import CheckpointError, DamagedError, verify
from shardwright.checkpoint.writing.copies import HostCopies
from shardwright.core.findings.errors import InputError
from shardwright.engine_jax import Saver, load, save
from shardwright.runs import background
from tests.engine_jax.commands import directory_of, flip

MESHES = {
    "4 x 2": Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")),
    "2 x 4": Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y")),
    "reversed": Mesh(np.array(jax.devices())[::-1].reshape(2, 2, 2), ("x", "y", "z")),
}
SPECS = [(), ("x",), (None, "y"), ("y", "x"), (("x", "y"),), (("y", "x"),), (("y",), ("x",))]
PLACES = [(mesh, PartitionSpec(*spec)) for mesh in MESHES for spec in SPECS]


def sharding(place: tuple[str, PartitionSpec]) -> NamedSharding:
    return NamedSharding(MESHES[place[0]], place[1])


def numbers(seed: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Random bits, NaNs among them."""
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize)
    return np.frombuffer(bits, dtype).reshape(shape)


def state() -> dict[str, Any]:
    weights = {
        "layers": [{"q": numbers(n, (8, 16), jnp.bfloat16), "scale": numbers(n, (16,), np.float32)} for n in range(2)],
        "bytes": numbers(4, (8, 8), jnp.float8_e4m3fn),
        "ids": np.arange(-32, 32, dtype=np.int32).reshape(8, 8),
    }
    weights = jax.tree.map(jnp.asarray, weights)
    floats = {"w": jnp.linspace(0.0, 1.0, 64).reshape(8, 8)}
    return {
        "weights": weights,
        "optimizer": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(floats),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 8),
        "host": numbers(5, (3, 5), np.float64),
        "one": np.float16(1.5),
        "step": 12,
        "loss": 0.1,
        "name": "a run",
        "done": False,
        "nothing": None,
        "scalar": jnp.asarray(3, jnp.int8),
    }


def placed(tree: Any, place: tuple[str, PartitionSpec]) -> Any:
    """The tree with every matrix sharded, and of the vectors of 8 keys the first dim."""

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
            return leaf
        spec = PartitionSpec(*place[1][:1]) if leaf.ndim == 1 else place[1]
        # From the host: a program that reshards may change the bits of a NaN.
        return jax.device_put(leaf if is_key(leaf) else np.asarray(leaf), NamedSharding(MESHES[place[0]], spec))

    return jax.tree.map(put, tree)


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def bits(leaf: Any) -> Any:
    if is_key(leaf):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return type(leaf).__name__, str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()
    return type(leaf), leaf


def assert_same(found: Any, needed: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(needed)
    for (path, one), other in zip(jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(needed), strict=True):
        assert bits(one) == bits(other), path
        if isinstance(one, jax.Array):
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim), path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The state saved under a place of each kind."""
    made = {}
    for number in range(0, len(PLACES), 3):
        made[number] = tmp_path_factory.mktemp("saved")
        save(made[number], placed(state(), PLACES[number]), step=2)
    return made


@pytest.mark.parametrize("number", range(len(PLACES)), ids=[f"{mesh} {spec}" for mesh, spec in PLACES])
def test_what_any_place_has_saved_is_loaded_in_any_other(folders: dict[int, Path], number: int) -> None:
    like = placed(state(), PLACES[number])
    for folder in folders.values():
        loaded = load(folder, like)
        assert (loaded.step, loaded.kept) == (2, ())
        assert_same(loaded.tree, like)


def test_arrays_may_be_donated_while_they_are_written(tmp_path: Path) -> None:
    place = sharding(PLACES[2])
    double = jax.jit(lambda array: array * 2, donate_argnums=0)
    array = jax.device_put(np.arange(128, dtype=np.float32).reshape(8, 16), place)
    with Saver(tmp_path, keep=2) as saver:
        for step in (1, 2, 3):
            saver.save({"w": array, "step": step}, step=step)
            before, array = array, double(array)
            assert before.is_deleted()
    like = {"w": jax.ShapeDtypeStruct((8, 16), np.float32, sharding=place), "step": 0}
    assert verify(tmp_path)["ok"]
    for step, factor in ((2, 2), (3, 4)):
        tree = load(tmp_path, like, step=step).tree
        assert tree["step"] == step
        np.testing.assert_array_equal(tree["w"], np.arange(128, dtype=np.float32).reshape(8, 16) * factor)
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2


def test_arrays_that_are_not_donated_need_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, written = sharding(PLACES[2]), threading.Event()
    write = background.write_part

    def late(*arguments: Any, **named: Any) -> None:
        written.wait()
        write(*arguments, **named)

    monkeypatch.setattr(background, "write_part", late)
    monkeypatch.delattr(HostCopies, "_copy")
    array = jax.device_put(np.arange(128, dtype=np.float32).reshape(8, 16), place)
    with Saver(tmp_path, copy=False) as saver:
        saver.save({"w": array, "key": jax.random.key(7)}, step=1)
        array = array + 1
        written.set()
    monkeypatch.undo()
    tree = load(tmp_path, {"w": array, "key": jax.random.key(0)}).tree
    np.testing.assert_array_equal(tree["w"], array - 1)
    assert tree["key"] == jax.random.key(7)
    # Of an array that is donated all the same, nothing is saved.
    monkeypatch.setattr(background, "write_part", late)
    written.clear()
    saver = Saver(tmp_path, copy=False)
    saver.save({"w": array}, step=2)
    jax.jit(lambda one: one * 2, donate_argnums=0)(array)
    written.set()
    with pytest.raises(
        CheckpointError, match=r"^'w' was deleted or donated to a jitted function before it was written\. Leave copy=F"
    ):
        saver.wait()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]


def test_an_array_of_another_byte_order(tmp_path: Path) -> None:
    array = np.array([1, 2, 3], ">i4")
    save(tmp_path, {"w": array}, step=jnp.int32(1))
    np.testing.assert_array_equal(load(tmp_path, {"w": array}, step=np.int64(1)).tree["w"], array)


def test_each_element_is_stored_once(folders: dict[int, Path]) -> None:
    needed = sum(
        leaf.nbytes for leaf in jax.tree.leaves(state()) if isinstance(leaf, jax.Array | np.ndarray | np.generic)
    )
    for folder in folders.values():
        found = verify(folder)["checkpoints"][0]
        assert found["ok"]
        assert found["bytes"] - needed < 64 << 10, (found, needed)


def test_a_tree_of_shapes_says_what_is_loaded(folders: dict[int, Path]) -> None:
    needed = placed(state(), PLACES[4])
    like = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        needed,
    )
    assert_same(load(folders[0], like).tree, needed)


SAVED = {
    "w": jnp.arange(32.0).reshape(8, 4),
    "count": jnp.asarray(16_777_217, jnp.int32),
    "step": 3,
    "key": jax.random.key(0),
}


@pytest.mark.parametrize(
    ("like", "lines"),
    [
        ({**SAVED, "w": jnp.zeros((4, 8))}, ["'w': shape: found (8, 4), needed (4, 8)"]),
        (
            {**SAVED, "w": jnp.zeros((8, 4), jnp.bfloat16)},
            ["'w': dtype: found float32, needed bfloat16", "On request: cast=True casts floating dtypes."],
        ),
        (
            {**SAVED, "count": jnp.asarray(0.0)},
            ["'count': dtype: found int32, needed float32", "On request: cast=True casts floating dtypes."],
        ),
        (
            {("v" if name == "w" else name): leaf for name, leaf in SAVED.items()},
            [
                "'v': missing",
                "'w': extra, float32 (8, 4), which is not asked for",
                "On request: only=[patterns] loads some of the names.",
            ],
        ),
        ({**SAVED, "step": 3.0}, ["'step': found 3, needed a float"]),
        ({**SAVED, "step": jnp.int32(3)}, ["'step': found the value 3, needed an array, int32 ()"]),
        ({**SAVED, "w": 3}, ["'w': found float32 (8, 4), needed an int"]),
        ({**SAVED, "last": 3}, ["'last': missing", "On request: only=[patterns] loads some of the names."]),
        (
            {name: leaf for name, leaf in SAVED.items() if name != "step"},
            ["'step': extra, 3, which is not asked for", "On request: only=[patterns] loads some of the names."],
        ),
        ({**SAVED, "key": jnp.zeros(2, jnp.uint32)}, ["'key': found a key of a generator, needed an array"]),
    ],
    ids=[
        "shape",
        "dtype",
        "no silent cast of integers",
        "missing and extra",
        "type",
        "array for a value",
        "value for an array",
        "no value",
        "extra value",
        "key",
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, like: Any, lines: list[str]) -> None:
    where = save(tmp_path, SAVED, step=1)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, like)
    found = str(caught.value).split("\n")
    assert found[0] == f"{where}: the checkpoint does not fit, and nothing of it was loaded:"
    assert [line.strip() for line in found[1:]] == lines


def test_a_cast_on_request(tmp_path: Path) -> None:
    save(tmp_path, SAVED, step=1)
    like = {**SAVED, "w": jnp.zeros((8, 4), jnp.bfloat16)}
    loaded = load(tmp_path, like, cast=True).tree
    assert bits(loaded["w"]) == bits(SAVED["w"].astype(jnp.bfloat16))
    # Integers are not cast, also on request: 16,777,217 is no float32.
    with pytest.raises(CheckpointError, match="'count': dtype: found int32, needed float32"):
        load(tmp_path, {**like, "count": jnp.asarray(0.0)}, cast=True)


def test_a_part_on_request(tmp_path: Path) -> None:
    save(tmp_path, SAVED, step=1)
    like = {"w": jnp.zeros((8, 4)), "new": jnp.ones(3)}
    loaded = load(tmp_path, like, only=["w"])
    assert bits(loaded.tree["w"]) == bits(SAVED["w"])
    assert (loaded.tree["new"].tolist(), loaded.kept) == ([1, 1, 1], ("new",))
    with pytest.raises(InputError, match=r"^only: the pattern 'v\*' matches no name\. There are 'new' and 'w'\.$"):
        load(tmp_path, like, only=["v*"])
    with pytest.raises(
        InputError, match=r"^only: 'new' is not loaded, and has no value to keep: give an array, or load it too\.$"
    ):
        load(tmp_path, {"w": jnp.zeros((8, 4)), "new": jax.ShapeDtypeStruct((3,), jnp.float32)}, only=["w"])


def test_keys_of_another_generator(tmp_path: Path) -> None:
    save(tmp_path, {"key": jax.random.key(0, impl="unsafe_rbg")}, step=1)
    with pytest.raises(
        InputError, match=re.escape("'key': the checkpoint has keys of key<urbg> (unsafe_rbg), needed key<rbg>.")
    ):
        load(tmp_path, {"key": jax.random.key(0, impl="rbg")})


def test_an_uneven_sharding_is_refused_as_jax_refuses_it(tmp_path: Path) -> None:
    save(tmp_path, {"w": np.arange(7, dtype=np.int32)}, step=1)
    like = {"w": jax.ShapeDtypeStruct((7,), np.int32, sharding=sharding(("4 x 2", PartitionSpec("x"))))}
    with pytest.raises(InputError, match=r"^'w': .*axis 0 is partitioned"):
        load(tmp_path, like)


def test_replicas_that_differ_are_not_saved(tmp_path: Path) -> None:
    where = sharding(("4 x 2", PartitionSpec("x")))
    shards = [
        jax.device_put(np.full((2, 4), number % 2 if number < 2 else 0, np.float32), device)
        for number, device in enumerate(MESHES["4 x 2"].devices.flat)
    ]
    array = jax.make_array_from_single_device_arrays((8, 4), where, shards)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, {"w": array}, step=1)
    assert caught.value.code == "SW502"
    assert str(caught.value).split("\n")[:2] == [
        "equal names with other values, of which a checkpoint would keep one; nothing was saved:",
        "  'w', box [0:2,0:4]: devices of process 0 hold other values than each other",
    ]
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"f": len},
            "'f' is the function 'len': a checkpoint holds arrays and values. Take the arrays of the tree, as eqx.partition(model, "
            "eqx.is_array) of equinox does, and put them back after a load, as eqx.combine does.",
        ),
        ({"a/b": jnp.zeros(2), "a": {"b": jnp.zeros(2)}}, "two leaves are called 'a/b'"),
        ({"z": np.zeros(2, np.complex128)}, "tensor 'z': a checkpoint does not hold dtype 'complex128'."),
    ],
)
def test_leaves_that_a_checkpoint_does_not_hold(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        save(tmp_path, tree, step=1)
    assert not list(tmp_path.rglob("manifest.json"))


def test_an_array_that_was_donated(tmp_path: Path) -> None:
    array = jnp.arange(4.0)
    array.delete()
    with pytest.raises(
        InputError, match=r"^'w' was deleted or donated to a jitted function: save what the function returned\.$"
    ):
        save(tmp_path, {"w": array}, step=1)


def test_an_array_that_is_traced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^'w' is traced: call save outside of jax\.jit\."):
        jax.jit(lambda array: save(tmp_path, {"w": array}, step=1))(jnp.zeros(2))


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    save(tmp_path, SAVED, step=1)
    flip(directory_of(tmp_path, 1))
    with pytest.raises(DamagedError, match="do not match their digest"):
        load(tmp_path, SAVED)


def test_a_step_and_a_folder_of_one_step(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        directory = save(tmp_path, {"w": jnp.full(2, step)}, step=step, keep=2)
    like = {"w": jnp.zeros(2, jnp.int32)}
    assert load(tmp_path, like).tree["w"].tolist() == [3, 3]
    assert load(tmp_path, like, step=2).tree["w"].tolist() == [2, 2]
    assert load(directory, like).step == 3
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 1\. Those there, the newest first: 3, 2\.$"):
        load(tmp_path, like, step=1)
    with pytest.raises(CheckpointError, match="this step was saved before"):
        save(tmp_path, like, step=3)
