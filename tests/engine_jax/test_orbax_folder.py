"""`ckpt import orbax` and `ckpt export orbax`, against Orbax's own save and restore."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.checkpoint import open_newest, verify
from shardwright.cli.main import main
from shardwright.core.findings.errors import InputError
from shardwright.engine_jax import load, save
from shardwright.engine_jax.orbax_folder import export_folder, import_folder
from tests.checkpoint.states import save as save_state
from tests.checkpoint.states import small_state

# Orbax says that it takes the shardings of the save where a restore gives none.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2"),
)


def tree_of(seed: int) -> dict[str, Any]:
    """Every dtype, odd sizes, several devices, lists, tuples, keys of generators, empty nodes and Python numbers."""
    generator = np.random.default_rng(seed)
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("x", "y"))

    def some(dtype: str, *shape: int) -> np.ndarray:
        return generator.integers(0, 100, shape).astype(jnp.dtype(dtype))

    sharded = jax.device_put(some("float32", 9, 4, 5), NamedSharding(mesh, PartitionSpec("x", "y")))
    weights = {"w": sharded, "b": jax.device_put(some("bfloat16", 7))}
    return {
        "params": weights,
        "opt": optax.adam(1e-3).init(weights),
        "dtypes": {dtype: jnp.asarray(some(dtype, 3, 5)) for dtype in DTYPES},
        "layers": [{"q": some("float32", 2)}, {"q": some("int32", 3)}],
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        "step": 7,
        "rate": 0.1,
        "nothing": None,
        "empty": {},
        "scalar": jnp.float32(2.5),
    }


def bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.dtype.name, array.shape, array.tobytes()


def require_same(found: Any, needed: Any) -> None:
    found, needed = (dict(jax.tree_util.tree_flatten_with_path(one)[0]) for one in (found, needed))
    named = [
        {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in one.items()}
        for one in (found, needed)
    ]
    assert named[0].keys() == named[1].keys()
    for name, leaf in named[1].items():
        assert bits(named[0][name]) == bits(leaf), name


def abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )


def saved(folder: Path, tree: Any, **options: Any) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))
    return folder


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=str)
def test_there_and_back(options: dict[str, bool], tmp_path: Path) -> None:
    tree = tree_of(0)
    saved(tmp_path / "step-7", tree, **options)
    imported = import_folder(tmp_path / "step-7", tmp_path / "out")
    assert (imported["step"], imported["values"]) == (7, ["rate", "step"])
    assert verify(tmp_path / "out")["ok"]
    # By our own load, on other shardings.
    loaded = load(tmp_path / "out", tree)
    require_same(loaded.tree, tree)

    export_folder(tmp_path / "out", tmp_path / "back")
    # By Orbax's restore, as it is and into the tree.
    with ocp.StandardCheckpointer() as checkpointer:
        require_same(checkpointer.restore(tmp_path / "back", abstract(tree)), tree)
    with ocp.PyTreeCheckpointer() as checkpointer:
        found, needed = (checkpointer.restore(tmp_path / name) for name in ("back", "step-7"))
    assert jax.tree.structure(found) == jax.tree.structure(needed)
    require_same(found, needed)

    import_folder(tmp_path / "back", tmp_path / "again")
    first, again = open_newest(tmp_path / "out"), open_newest(tmp_path / "again")
    assert (again.point, again.tensors) == (first.point, first.tensors)
    for name in first.tensors:
        assert again.read_box(name, raw=True).tobytes() == first.read_box(name, raw=True).tobytes(), name


def test_steps_of_a_manager(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(5.0)}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (3, 12):
            manager.save(step, args=ocp.args.StandardSave(jax.tree.map(lambda leaf, step=step: leaf + step, tree)))
    assert import_folder(tmp_path / "run", tmp_path / "a")["step"] == 12
    assert import_folder(tmp_path / "run", tmp_path / "b", step=3)["step"] == 3
    assert import_folder(tmp_path / "run/3", tmp_path / "c")["step"] == 3
    assert import_folder(tmp_path / "run/3/default", tmp_path / "d")["step"] == 3
    for name in "bcd":
        np.testing.assert_array_equal(open_newest(tmp_path / name).read_box("w"), np.arange(5.0) + 3)
    with pytest.raises(InputError, match=r"it has no step 4\. It has 3, 12\."):
        import_folder(tmp_path / "run", tmp_path / "e", step=4)
    # And one that was exported becomes a step of it.
    (tmp_path / "run/20").mkdir()
    export_folder(tmp_path / "a", tmp_path / "run/20/default")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(20, args=ocp.args.StandardRestore(abstract(tree)))
    np.testing.assert_array_equal(restored["w"], np.arange(5.0) + 12)


def test_texts_and_several_trees(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        tree = {"name": "llama", "w": jnp.ones(2)}
        arguments = {"items": ocp.args.PyTreeSave(tree), "config": ocp.args.JsonSave({"a": 1})}
        manager.save(1, args=ocp.args.Composite(**arguments))
        manager.save(2, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree), other=ocp.args.PyTreeSave(tree)))
    import_folder(tmp_path / "run/1", tmp_path / "out")
    assert load(tmp_path / "out", tree).tree["name"] == "llama"
    with pytest.raises(InputError, match=r"it has several trees: 'items' and 'other'\. Give the folder of one\."):
        import_folder(tmp_path / "run/2", tmp_path / "other")


def test_a_tree_that_we_saved(tmp_path: Path) -> None:
    """Of a pytree, a state dict and a module the folder has the same entries."""
    weights = {"w": jnp.arange(6.0).reshape(2, 3)}
    tree = {
        "layers": [weights],
        "opt": optax.adam(0.1).init(weights),
        "key": jax.random.key(3),
        "next_row": 64,
        "none": None,
    }
    save(tmp_path / "out", tree, step=4)
    export_folder(tmp_path / "out", tmp_path / "to")
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "to", args=ocp.args.PyTreeRestore(abstract(tree)))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    require_same(found, tree)
    import_folder(tmp_path / "to", tmp_path / "again")
    first, again = open_newest(tmp_path / "out"), open_newest(tmp_path / "again")
    assert (again.point, again.tensors) == (first.point, first.tensors)


def test_a_run_of_ours(tmp_path: Path) -> None:
    state = small_state()
    save_state(tmp_path / "out", state)
    export_folder(tmp_path / "out", tmp_path / "to")
    with ocp.PyTreeCheckpointer() as checkpointer:
        require_same(checkpointer.restore(tmp_path / "to"), dict(state.arrays))
    import_folder(tmp_path / "to", tmp_path / "again")
    first, again = open_newest(tmp_path / "out"), open_newest(tmp_path / "again")
    assert (again.point, again.tensors) == (first.point, first.tensors)


Damage = Callable[[Path], object]


def described(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change what a folder says of its tree."""

    def damage(folder: Path) -> None:
        value = json.loads((folder / "_METADATA").read_text())
        change(value)
        (folder / "_METADATA").write_text(json.dumps(value))

    return damage


def array(**fields: Any) -> Damage:
    """Change what the folder says of the array 'w'."""

    def damage(folder: Path) -> None:
        path = folder / "w/.zarray"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return damage


def renamed(value: dict[str, Any]) -> None:
    entry = value["tree_metadata"].pop("('w',)")
    entry["key_metadata"][0]["key"] = "../../secret"
    value["tree_metadata"]["x"] = entry


CASES: dict[str, tuple[Damage, str]] = {
    "no metadata": (lambda folder: (folder / "_METADATA").unlink(), "there is no tree of Orbax in it: no _METADATA."),
    "no JSON": (lambda folder: (folder / "_METADATA").write_text("{"), "_METADATA: not JSON:"),
    "a list": (lambda folder: (folder / "_METADATA").write_text("[]"), "_METADATA: found [], needed a mapping."),
    "a number of a list": (
        described(lambda value: value["tree_metadata"]["('w',)"]["key_metadata"][0].update(key_type=1)),
        "found 'w', needed the number of an entry of a list.",
    ),
    "another type": (
        described(lambda value: value["tree_metadata"]["('w',)"]["value_metadata"].update(value_type="mine")),
        "these leaves have types of their own, and nothing was written:\n  'w': mine\n",
    ),
    "two of one name": (
        described(lambda value: value["tree_metadata"].update(x=value["tree_metadata"]["('w',)"])),
        "two leaves are called 'w'.",
    ),
    "a path outside": (described(renamed), "'../../secret': its name is a path outside of the folder."),
    "no array": (lambda folder: os.rename(folder / "w", folder / "v"), "'w': cannot be opened: "),
    "no chunk": (lambda folder: (folder / "w/0.0").unlink(), "'w': cannot be read: "),
    "half a chunk": (lambda folder: os.truncate(folder / "w/0.0", 20), "'w': cannot be read: "),
    "no number": (
        described(lambda value: value["tree_metadata"]["('w',)"]["value_metadata"].update(value_type="scalar")),
        "'w' has shape (3, 4), and is said to be one number.",
    ),
    "a huge shape": (
        array(shape=[1 << 40, 4]),
        "'w' of shape (1099511627776, 4) in chunks of (3, 4) has 35,184,372,088,832 bytes,",
    ),
    "a huge chunk": (array(chunks=[1 << 40, 4]), "'w'"),
    "another dtype": (
        array(dtype="<c16"),
        "a checkpoint does not hold these arrays, and nothing was written:\n  'w': dtype complex128\n",
    ),
    "a pipe": (lambda folder: ((folder / "_METADATA").unlink(), os.mkfifo(folder / "_METADATA")), "not a regular file"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_message_and_nothing_written(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "in-4", {"w": np.arange(12.0).reshape(3, 4), "n": 1}, use_ocdbt=False)
    damage, message = CASES[case]
    damage(folder)
    with pytest.raises(InputError) as raised:
        import_folder(folder, tmp_path / "out")
    assert message in str(raised.value), str(raised.value)
    assert not list(tmp_path.glob("out/checkpoints/step-*"))


def test_both_ways_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    saved(Path("step-5").absolute(), {"w": np.ones((3, 4), np.float32), "b": np.ones(2), "epoch": 2})
    assert main(["ckpt", "import", "orbax", "step-5", "--out", "out", "--leave-out", "b"]) == 0
    assert capsys.readouterr().out == (
        "imported to out/checkpoints/step-00000005\n"
        f"  from      {tmp_path}/step-5\n"
        "  as        pytree\n"
        "  tensors   1 tensor in 1 box, 48 B in float32\n"
        "  values    epoch\n"
        "  left out  b\n"
    )
    assert main(["ckpt", "export", "orbax", "out", "--out", "back"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "exported to back\n  from     out/checkpoints/step-00000005\n  step     5\n  tensors  1 tensor, 48 B in "
    )
    assert main(["ckpt", "import", "orbax", "back", "--out", "again", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["directory"] == "again/checkpoints/step-00000005"
    assert main(["ckpt", "export", "orbax", "out", "--out", "back"]) == 2
    assert capsys.readouterr().err.startswith("shardwright: --out back: it exists already")
