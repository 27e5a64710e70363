"""`ckpt import` and `ckpt export` of folders that other programs' checkpoints are in, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shardwright.cli.arguments.declared import Positional, Repeated, arg
from shardwright.cli.typed.options import Count, Flag, Local, Text, Where

Out = Annotated[Where, arg(metavar="DIR|URL")]
Step = Annotated[Count, arg(metavar="N", help_behavior_hint="(default: the number at the end of the folder's name)")]
Patterns = Annotated[
    Repeated,
    arg(metavar="PATTERN ...", help_behavior_hint="(may be given several times)"),
]
Directory = Annotated[Positional[Where], arg(metavar="DIR|URL", help_behavior_hint="")]
NewFolder = Annotated[Local, arg(metavar="FOLDER", former=("--to",))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportDcpVerb:
    """Make a checkpoint of a folder that torch.distributed.checkpoint has saved. Its pickle is read as data, and never executed."""

    folder: Annotated[Positional[Local], arg(metavar="FOLDER", help_behavior_hint="")]
    """The folder of one save, with .metadata and *.distcp files."""
    out: Out
    """Where the checkpoint goes, as a run's --out."""
    step: Step = None
    """The step of the checkpoint."""
    module: Annotated[Text, arg(metavar="KEY", help_behavior_hint="(default: a state dict is imported as it is)")] = (
        None
    )
    """The key of the module's state dict, as model, or . without one: engine_torch.load then loads it into the module."""
    optimizer: Annotated[Text, arg(metavar="KEY", help_behavior_hint="(default: none)")] = None
    """The key of the optimizer's state dict that get_state_dict has made, as optim."""
    leave_out: Patterns = ()
    """Names that are not imported, as 'dataloader.*'."""
    trust_pickle: Flag = False
    """Read pickles by Python's own unpickler, which runs what they say. Only for folders of someone that you trust."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportDcpVerb:
    """Write a checkpoint as a folder that torch.distributed.checkpoint loads, on any sharding."""

    directory: Directory
    """One step's directory, or a folder of them, whose newest step is taken."""
    out: NewFolder
    """The folder to write. It must not exist, or be empty. Formerly --to."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOrbaxVerb:
    """Make a checkpoint of a tree that Orbax has saved, with the names that engine_jax.load gives its leaves."""

    folder: Annotated[Positional[Local], arg(metavar="FOLDER", help_behavior_hint="")]
    """The folder of a tree, of a step, or of a CheckpointManager's steps."""
    out: Out
    """Where the checkpoint goes, as a run's --out."""
    step: Annotated[
        Count, arg(metavar="N", help_behavior_hint="(default: the newest, or the number in the folder's path)")
    ] = None
    """The step of a CheckpointManager, or of the checkpoint."""
    leave_out: Patterns = ()
    """Names that are not imported, as 'opt_state/*'."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOrbaxVerb:
    """Write a checkpoint as a tree that Orbax restores, on any sharding."""

    directory: Directory
    """One step's directory, or a folder of them, whose newest step is taken."""
    out: NewFolder
    """The folder to write. It must not exist, or be empty. Formerly --to."""
    json: Flag = False
    """Print one JSON object on stdout."""
