"""`import` and `export` and their options, as data. The help texts are the attribute docstrings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shardwright.cli.arguments.declared import Positional, Repeated, arg
from shardwright.cli.arguments.verbs import subcommand
from shardwright.cli.typed.options import Count, Flag, Schedule, Text
from shardwright.cli.typed.verbs import Verb

File = Annotated[Positional[str], arg(metavar="FILE", help_behavior_hint="")]
Settings = Annotated[
    Repeated,
    arg(metavar="NAME=VALUE ...", help_behavior_hint="(may be given several times)"),
]
Given = Annotated[
    Repeated,
    arg(metavar="KEY=VALUE ...", help_behavior_hint="(may be given several times)"),
]
Out = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: not written)")]
Mesh = Annotated[Text, arg(metavar="AXIS=SIZE,...", help_behavior_hint="(default: the file's)")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportMaxTextVerb:
    """What a list of MaxText rules does, line by line and tensor by tensor, what it decides silently, and the equivalent
    layout in roles."""

    file: File
    """A configuration, a model's file, or a preset of custom_mesh_and_rule."""
    pasted: Annotated[
        Positional[tuple[str, ...]],
        arg(name="KEY=VALUE", metavar="[KEY=VALUE ...]", help_behavior_hint="(default: none)"),
    ] = ()
    """The rest of a MaxText command line, as after --given."""
    base: Annotated[
        Text, arg(metavar="FILE", help_behavior_hint="(default: base.yml of the configs folder, where one is missing)")
    ] = None
    """The configuration that the file is merged into, as base.yml."""
    preset: Annotated[Text, arg(metavar="FILE", help_behavior_hint="(default: what custom_mesh_and_rule names)")] = None
    """A preset, which replaces mesh and rules at the end."""
    eval_preset: Annotated[Text, arg(metavar="FILE", help_behavior_hint="(default: the training's rules)")] = None
    """A preset for evaluation."""
    given: Given = ()
    """A MaxText command line, as ici_expert_parallelism=8; keys that change no layout are listed as not read."""
    model: Annotated[Text, arg(metavar="MODEL", help_behavior_hint="(default: the one that the files set)")] = None
    """The model whose tensors are resolved, as mixtral-8x7b."""
    like: Annotated[Text, arg(metavar="MODEL", help_behavior_hint="(default: none)")] = None
    """A model whose tensors are resolved in place of the files' own, as llama3-8b: for a decoder that no table has."""
    set: Settings = ()
    """Dimensions of the model, as num_layers=2."""
    mesh: Mesh = None
    """Sizes of mesh axes, as fsdp=2,expert=4, instead of the file's."""
    devices: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: the product of the sizes)")] = None
    """Number of devices, for the axis of size -1."""
    slices: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: 1)")] = None
    """Number of slices of those devices."""
    batch: Annotated[Count, arg(metavar="ROWS", help_behavior_hint="(default: the file's or the model's)")] = None
    """Rows of a global step."""
    length: Annotated[Count, arg(metavar="TOKENS", help_behavior_hint="(default: the file's or the model's)")] = None
    """Tokens of a row."""
    dialect: Literal["linen", "nnx", "flax-nnx"] = "linen"
    """How the rules of weights are resolved: as MaxText's Linen path does, as its NNX path does (the same), or as Flax NNX alone does."""
    out: Out = None
    """Write the layout in roles here."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportTorchTitanVerb:
    """TorchTitan's parallel degrees as a layout in roles, on a mesh whose devices are its ranks."""

    file: File
    """TOML, JSON, or the Python that builds a ParallelismConfig (it is parsed and not run)."""
    config: Annotated[Text, arg(metavar="NAME", help_behavior_hint="(default: the only one)")] = None
    """The function of a Python file that builds the configuration."""
    devices: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: the product of the degrees)")] = None
    """Number of ranks."""
    model: Annotated[
        Text, arg(metavar="MODEL", help_behavior_hint="(default: that of the file, where it is one of ours)")
    ] = None
    """A model to plan the layout for, as llama3-8b."""
    set: Settings = ()
    """Dimensions of the model, as num_layers=2."""
    batch: Annotated[Count, arg(metavar="ROWS", help_behavior_hint="(default: the file's or the model's)")] = None
    """Rows of a global step."""
    length: Annotated[Count, arg(metavar="TOKENS", help_behavior_hint="(default: the file's or the model's)")] = None
    """Tokens of a row."""
    out: Out = None
    """Write the layout here."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportHuggingFaceVerb:
    """A config.json as a model of our table, and a tensor-parallel plan as a layout."""

    file: File
    """A config.json, or a JSON object of module patterns and styles."""
    model: Annotated[Text, arg(metavar="MODEL", help_behavior_hint="(default: that of the config)")] = None
    """The model whose weights a plan without a config shards."""
    set: Settings = ()
    """Dimensions of that model, as num_layers=2."""
    devices: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: not planned)")] = None
    """Number of devices to plan the layout for."""
    out: Out = None
    """Write the layout here."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportVerbs:
    """Read what another program declares: its layout in roles, and what it decides silently."""

    verb: (
        Annotated[ImportMaxTextVerb, subcommand("maxtext")]
        | Annotated[ImportTorchTitanVerb, subcommand("torchtitan")]
        | Annotated[ImportHuggingFaceVerb, subcommand("huggingface", "hf")]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportVerb:
    """Write a layout for another program: MaxText's rules or TorchTitan's degrees, which store each weight as the plan does."""

    to: Annotated[
        Positional[Literal["maxtext", "torchtitan"]], arg(metavar="maxtext|torchtitan", help_behavior_hint="")
    ]
    """The program."""
    layout: Annotated[Positional[str], arg(metavar="NAME|FILE", help_behavior_hint="")]
    """A preset, or the path of a layout file."""
    model: Annotated[Text, arg(metavar="MODEL", help_behavior_hint="(required)")] = None
    """The model whose tensors must be sharded as by the layout, as mixtral-8x7b."""
    set: Settings = ()
    """Dimensions of the model, as num_layers=2."""
    mesh: Annotated[Text, arg(metavar="AXIS=SIZE,...", help_behavior_hint="(default: the layout's)")] = None
    """Sizes of mesh axes, as fsdp=2,expert=4."""
    devices: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: the product of the sizes)")] = None
    """Number of devices."""
    batch: Annotated[Count, arg(metavar="ROWS", help_behavior_hint="(default: the model's)")] = None
    """Rows of a global step."""
    length: Annotated[Count, arg(metavar="TOKENS", help_behavior_hint="(default: the model's)")] = None
    """Tokens of a row."""
    microbatches: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: 1)")] = None
    """Microbatches of a step, one after the other."""
    schedule: Annotated[Schedule, arg(help_behavior_hint="(default: the layout's or the engine's)")] = None
    """The order in which the stages of a pipeline compute."""
    stages: Annotated[Text, arg(metavar="UNITS", help_behavior_hint="(default: shared out by their work)")] = None
    """The units of each stage of a pipeline, as Et*3|(tt|)*29L."""
    move: Annotated[Text, arg(metavar="WHAT=HOW,...", help_behavior_hint="(default: the layout's)")] = None
    """How keys and tokens are moved, as moe=weights."""
    remat: Annotated[Text, arg(metavar="POLICY|FILE", help_behavior_hint="(default: full)")] = None
    """What layers keep for the backward pass, as keep=attention.queries,host=residual.stream."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: to stdout)")] = None
    """Write the rules here."""
    json: Flag = False
    """Print one JSON object on stdout."""


ImportVerb = ImportMaxTextVerb | ImportTorchTitanVerb | ImportHuggingFaceVerb
"""Those of `import` that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shardwright:
    """A layout language for distributed training: tensor placements and collectives, declared once, checked, costed, and run
    unchanged."""

    verb: Verb | Annotated[ImportVerbs, subcommand("import")] | Annotated[ExportVerb, subcommand("export")]
