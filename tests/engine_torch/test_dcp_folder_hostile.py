"""Folders of `torch.distributed.checkpoint` that are damaged, forged or hold more than tensors: one message each, nothing executed."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save

from shardwright.checkpoint import open_newest
from shardwright.cli.main import main
from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.dcp_folder import import_folder
from tests.matrix import rest

# PyTorch says that it saves in one process, and into a folder that has files.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

Damage = Callable[[Path], object]


class Calls:
    """A pickle that makes a folder when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.int32), "epoch": 3, "names": ["a"]}
    save(state, checkpoint_id="in-4", no_dist=True)
    return Path("in-4")


def metadata(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the metadata of a folder, as PyTorch has it in memory."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    changed = change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found if changed is None else changed))


def info(found: Metadata, name: str) -> Any:
    return next(one for index, one in found.storage_data.items() if index.fqn == name)


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def tensor(found: Metadata, **fields: Any) -> None:
    for key, value in fields.items():
        setattr(found.state_dict_metadata["w"], key, value)


def place(name: str, **fields: Any) -> Damage:
    return lambda folder: metadata(
        folder, lambda found: [setattr(info(found, name), *one) for one in fields.items()] and None
    )


def data(folder: Path) -> Path:
    return folder / "__0_0.distcp"


def flipped(folder: Path) -> None:
    """One bit of the elements of 'w'."""
    content = bytearray(data(folder).read_bytes())
    at = bytes(content).index(torch.arange(12.0).numpy().tobytes())
    content[at + 17] ^= 4
    data(folder).write_bytes(content)


def compressed(folder: Path) -> None:
    """'b' in an archive that is a thousand times smaller than what is in it."""
    path = folder / "bomb.distcp"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"")
        archive.writestr("archive/data/0", bytes(10_000_000))
    place("b", relative_path="bomb.distcp", offset=0, length=path.stat().st_size)(folder)


def other_tensor(value: Any) -> Damage:
    """Other bytes in the place of 'w', of which the metadata says nothing."""

    def damage(folder: Path) -> None:
        torch.save(value, folder / "other.distcp")
        place("w", relative_path="other.distcp", offset=0, length=(folder / "other.distcp").stat().st_size)(folder)

    return damage


CASES: dict[str, tuple[Damage, str]] = {
    "calls": (
        lambda folder: metadata(folder, lambda _: Calls()),
        "in-4/.metadata: it is a pickle that names 'posix.mkdir', which is no class of DCP's metadata.",
    ),
    "calls inside": (
        lambda folder: metadata(folder, lambda found: setattr(found, "planner_data", {"x": Calls()})),
        "in-4/.metadata: it is a pickle that names 'posix.mkdir'",
    ),
    "a value that calls": (
        lambda folder: save({"w": torch.ones(2), "bad": Calls()}, checkpoint_id=folder, no_dist=True),
        "in-4/__0_0.distcp: 'bad' is a pickle of more than tensors and plain values, and was not read:",
    ),
    "no pickle": (
        lambda folder: (folder / ".metadata").write_bytes(b"hello"),
        "in-4/.metadata: it is damaged, or no pickle of values:",
    ),
    "half a pickle": (
        lambda folder: (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:300]),
        "in-4/.metadata: it is damaged, or no pickle of values:",
    ),
    "a place in memory of its own": (
        lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04]r\xff\xff\xff\xff."),
        "in-4/.metadata: found a list, needed DCP's Metadata.",
    ),
    "nested keys": (
        lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04})" + b"\x85" * 100_000 + b"Ns."),
        "in-4/.metadata: it is damaged, or no pickle of values: TypeError: a tuple is no key.",
    ),
    "a list": (
        lambda folder: metadata(folder, lambda _: []),
        "in-4/.metadata: found a list, needed DCP's Metadata.",
    ),
    "no metadata": (
        lambda folder: (folder / ".metadata").unlink(),
        "in-4: there is no .metadata in it, so it is no complete folder of torch.distributed.checkpoint. Give the folder",
    ),
    "unfinished": (
        lambda folder: (folder / ".metadata").rename(folder / ".metadata.tmp"),
        "in-4: there is no .metadata in it, so it is no complete folder of torch.distributed.checkpoint. .metadata.tmp is there:",
    ),
    "ranks for themselves": (
        lambda folder: (folder / ".metadata").rename(folder / "__0.metadata"),
        "in-4: its ranks have saved without collectives, each its own metadata",
    ),
    "no file": (
        lambda folder: data(folder).unlink(),
        "in-4/__0_0.distcp: it has 'w', and cannot be read: No such file or directory.",
    ),
    "a truncated file": (
        lambda folder: os.truncate(data(folder), 900),
        "in-4/__0_0.distcp: ",
    ),
    "a flipped bit": (
        flipped,
        "in-4/__0_0.distcp: 'w': its bytes are not those that torch.save has written: they do not match their CRC-32.",
    ),
    "zeros": (
        lambda folder: data(folder).write_bytes(bytes(data(folder).stat().st_size)),
        "in-4/__0_0.distcp: 'epoch' is nothing that torch.save has written: File is not a zip file.",
    ),
    "a compressed archive": (
        compressed,
        "in-4/bomb.distcp: 'b': its archive is compressed, which torch.save never does.",
    ),
    "a file outside": (
        place("w", relative_path="../secret"),
        "in-4/.metadata: 'w' is in the file '../secret', which is not in this folder.",
    ),
    "an absolute file": (
        place("w", relative_path="/etc/passwd"),
        "in-4/.metadata: 'w' is in the file '/etc/passwd', which is not in this folder.",
    ),
    "a place after the end": (
        place("w", offset=10**30),
        "in-4/__0_0.distcp: 'w' ends at byte above 10^20, and the file has ",
    ),
    "a place before the start": (
        place("w", offset=-5),
        "in-4/.metadata: 'w': its place is not a file with two numbers of bytes.",
    ),
    "transformed": (
        place("w", transform_descriptors=["zstd"]),
        "in-4/.metadata: 'w' was transformed when it was saved (['zstd']).",
    ),
    "no place": (
        lambda folder: metadata(folder, lambda found: found.storage_data.clear()),
        "in-4/.metadata: 'w' is in no file: its bytes are missing.",
    ),
    "a huge shape": (
        lambda folder: metadata(folder, lambda found: tensor(found, size=torch.Size((1 << 40, 1 << 10)))),
        "in-4/.metadata: tensor 'w' of shape (1099511627776, 1024) is not covered exactly once by its boxes: no box covers",
    ),
    "a huge chunk": (
        lambda folder: metadata(
            folder, lambda found: tensor(found, size=torch.Size((1 << 40,)), chunks=[chunk((0,), (1 << 40,))])
        ),
        "in-4/.metadata: 'w'",
    ),
    "a chunk too few": (
        lambda folder: metadata(folder, lambda found: tensor(found, chunks=[chunk((0, 0), (2, 4))])),
        "in-4/.metadata: tensor 'w' of shape (3, 4) is not covered exactly once by its boxes: no box covers [2:3,0:4].",
    ),
    "chunks over each other": (
        lambda folder: metadata(
            folder,
            lambda found: tensor(found, chunks=[chunk((0, 0), (3, 4)), chunk((0, 0), (2, 4))]),
        ),
        "in-4/.metadata: tensor 'w' of shape (3, 4) is not covered exactly once by its boxes: the boxes [0:3,0:4] and",
    ),
    "a chunk outside": (
        lambda folder: metadata(folder, lambda found: tensor(found, chunks=[chunk((1, 0), (3, 4))])),
        "in-4/.metadata: 'w' of shape (3, 4): its chunk of shape [3, 4] at [1, 0] is not within it.",
    ),
    "other dims": (
        lambda folder: metadata(folder, lambda found: tensor(found, chunks=[chunk((0,), (3,))])),
        "in-4/.metadata: 'w' of shape (3, 4): its chunk of shape [3] at [0] is not within it.",
    ),
    "another dtype": (
        lambda folder: metadata(folder, lambda found: tensor(found, properties=TensorProperties(torch.int32))),
        "in-4/__0_0.distcp: 'w': found float32 (3, 4), needed int32 (3, 4), which the metadata says.",
    ),
    "another shape": (
        other_tensor(torch.ones(4, 3)),
        "in-4/other.distcp: 'w': found float32 (4, 3), needed float32 (3, 4), which the metadata says.",
    ),
    "no tensor": (other_tensor({"w": 1}), "in-4/other.distcp: "),
    "a sparse tensor": (other_tensor(torch.ones(3, 4).to_sparse()), "in-4/other.distcp: "),
    "a dtype that no checkpoint has": (
        lambda folder: save({"w": torch.ones(2, dtype=torch.complex128)}, checkpoint_id=folder, no_dist=True),
        "in-4: a checkpoint does not hold these tensors, and nothing was written:\n  'w': dtype complex128\n"
        "Leave them out with --leave-out NAME.",
    ),
    "values that are no JSON": (
        lambda folder: save({"w": torch.ones(2), "raw": b"x", "when": {1, 2}}, checkpoint_id=folder, no_dist=True),
        "in-4: a checkpoint holds tensors, and values that JSON has, and nothing was written:\n  'raw' is a builtins.bytes\n"
        "  'when' is a builtins.set\n",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_message_and_nothing_written(case: str, folder: Path) -> None:
    damage, message = CASES[case]
    damage(folder)
    with pytest.raises(InputError) as raised:
        import_folder(folder, Path("out"))
    assert str(raised.value).startswith(message), str(raised.value)
    assert not Path("executed").exists()
    assert not list(Path().glob("out/checkpoints/step-*"))


def test_a_pickle_is_executed_when_it_is_trusted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def calling(found: Any) -> None:
        found.planner_data = {**found.planner_data, "x": Calls()}

    metadata(folder, calling)
    assert main(["ckpt", "import", "dcp", str(folder), "--out", "out", "--trust-pickle"]) == 0
    assert "pickles" in capsys.readouterr().out
    assert Path("executed").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "import dcp none --out out": "none: no such folder.",
        "import dcp in-4 --out out --step -1": "--step is -1, and must be from 0 to",
        "import dcp in-4 --out out --leave-out v": "--leave-out: the pattern 'v' matches no name. There are 'w', 'b', ",
        "import dcp in-4 --out out --leave-out epochs": "--leave-out: the pattern 'epochs' matches no name. Did you mean 'epoch'?",
        "import dcp in-4 --out out --module model": "--module model: there is no tensor under this key. There are 'w', 'b', ",
        "import dcp in-4 --out out --optimizer optim": "--optimizer is for a module, which --module gives.",
        "import dcp in-4 --out out --module . --optimizer optim": "--optimizer optim: there are no param_groups under this key.",
        "export dcp none --out back": "none: there is no checkpoint here.",
        "export dcp in-4 --out in-4": "--out in-4: it exists already, and is never overwritten.",
    }.items(),
)
def test_what_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"shardwright: {message}")
    Path("in-4").rename("unnumbered")
    assert main(["ckpt", "import", "dcp", "unnumbered", "--out", "out"]) == 2
    assert "its name does not end in the number of a step. Give it with --step." in capsys.readouterr().err


@pytest.mark.parametrize(("seed", "cases"), [(0, 60), rest(1, 2000)])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_random_damage_is_refused_or_harmless(file: str, seed: int, cases: int, folder: Path) -> None:
    """Flipped bits, bytes that are gone or were put in, and lost ends: one message, or the elements that were saved."""
    draw = random.Random(seed)
    original = (folder / file).read_bytes()
    for number in range(cases):
        content = bytearray(original)
        at = draw.randrange(len(content))
        kind = draw.choice(("flip", "gone", "end", "more"))
        if kind == "flip":
            content[at] ^= 1 << draw.randrange(8)
        elif kind == "gone":
            content[at : at + draw.randrange(1, 64)] = b""
        elif kind == "end":
            del content[at:]
        else:
            content[at:at] = draw.randbytes(draw.randrange(1, 9))
        (folder / file).write_bytes(content)
        try:
            import_folder(folder, Path(f"out-{number}"))
        except InputError:
            continue
        if file != ".metadata":
            checkpoint = open_newest(Path(f"out-{number}"))
            assert checkpoint.read_box("w").tobytes() == torch.arange(12.0).numpy().tobytes(), (kind, at)
            assert checkpoint.read_box("b").tobytes() == torch.ones(2, dtype=torch.int32).numpy().tobytes(), (kind, at)
