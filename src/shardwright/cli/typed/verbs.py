"""Every verb with its arguments and options, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from shardwright.cli.arguments.declared import Positional, Repeated, arg
from shardwright.cli.arguments.verbs import subcommand
from shardwright.cli.typed.folder_verbs import ExportDcpVerb, ExportOrbaxVerb, ImportDcpVerb, ImportOrbaxVerb, NewFolder
from shardwright.cli.typed.options import (
    Annotations,
    Count,
    Dtype,
    Duration,
    Engine,
    Flag,
    Layout,
    Local,
    LocalOut,
    MaybeWhere,
    Number,
    PlanOptions,
    Text,
    TrainOptions,
    Where,
    Whole,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerb:
    """Answer whether a model fits under a layout and how long a step takes, with findings; and show every placement and collective."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A model by name, as deepseek3-671b, or a model folder of Hugging Face."""
    layout: Layout = None
    """A preset, or the path of a layout file."""
    show: Annotated[Text, arg(metavar="SECTION,...", help_behavior_hint="(default: roles,stages,memory)")] = None
    """The sections to show, of roles, weights, activations, collectives, stages, memory, step and choices."""
    full: Flag = False
    """Show every section."""
    plan: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileVerb:
    """Compile the train step for chips that need not be present, and compare the program with the plan."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A model by name, as mixtral-8x7b, or a model folder of Hugging Face."""
    layout: Layout = None
    """A preset, or the path of a layout file."""
    hlo: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """Write the compiled program's text here."""
    xla: Annotated[
        Repeated,
        arg(metavar="NAME=VALUE ...", help_behavior_hint="(may be given several times)"),
    ] = ()
    """Options of the target's compiler, as xla_tpu_enable_latency_hiding_scheduler=false. XLA_FLAGS and LIBTPU_INIT_ARGS hold too."""
    plan: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffVerb:
    """Show what moves between two layouts, tensor by tensor, with bytes.

    A and B are each a preset, the path of a layout file, a lock, or a plan that `plan --json` wrote to a .json file.
    Layouts need --model and share the options below; --mesh sets the axes that a layout has. A layout that is compared
    with a lock takes the lock's model and options where none are given. NAME:AXIS=SIZE,... sets axis sizes for one side
    only, as in ep:expert=8.
    """

    a: Annotated[Positional[str], arg(metavar="A", help_behavior_hint="")]
    """Before."""
    b: Annotated[Positional[str], arg(metavar="B", help_behavior_hint="")]
    """After."""
    model: Annotated[Text, arg(metavar="MODEL", help_behavior_hint="(needed for layouts)")] = None
    """A model by name, as deepseek3-test, or a model folder of Hugging Face."""
    plan: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareVerb:
    """Show layouts side by side, a column each: memory, step time, tokens a second, bytes, and which is the fastest that fits.

    Each is a preset, the path of a layout file, a lock, or a plan that `plan --json` wrote to a .json file, as for `diff`.
    """

    sides: Annotated[Positional[tuple[str, ...]], arg(metavar="A B ...", help_behavior_hint="")] = ()
    """What is compared."""
    model: Annotated[Text, arg(metavar="MODEL", help_behavior_hint="(needed for layouts)")] = None
    """A model by name, as deepseek3-test, or a model folder of Hugging Face."""
    plan: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchVerb:
    """Find the layouts under which a model trains the fastest on its chips: sizes of the mesh, roles, movements, stages and their schedules,
    recomputation and microbatches. What is typed of a plan's options stays."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A model by name, as deepseek3-671b, or a model folder of Hugging Face."""
    like: Annotated[Text, arg(metavar="NAME|FILE", help_behavior_hint="(default: all layouts are tried)")] = None
    """Begin with this layout, its --mesh and step, and say which single change gains the most."""
    budget: Annotated[Duration, arg(help_behavior_hint="(default: 2m)")] = 120.0
    """The longest time to search, as 30s or 10m."""
    within: Annotated[Number, arg(metavar="PERCENT", help_behavior_hint="(default: 2)")] = 2.0
    """End when no layout that is left can be faster than the first answer by more than this share of its step; 0: when none can."""
    keep: Annotated[Whole, arg(metavar="N", help_behavior_hint="(default: 10)")] = 10
    """Answers to show, each of another layout or mesh."""
    out: Annotated[Path | None, arg(metavar="FILE.json", help_behavior_hint="(default: not written)")] = None
    """Write the answers here, with the files of their layouts in a folder beside it. The same search goes on from it."""
    compile: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: nothing is compiled)")] = None
    """Compile the best N answers for their chips, which need not be present, and rank them by what their programs hold and move."""
    compile_budget: Annotated[Duration, arg(help_behavior_hint="(default: 20m)")] = 1200.0
    """The longest time to compile, as 5m or 1h."""
    plan: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockVerb:
    """Write the plan of a model under a layout to a file to commit, which `check` compares later."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A model by name, as deepseek3-671b, or a model folder of Hugging Face."""
    layout: Layout = None
    """A preset, or the path of a layout file."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: MODEL.LAYOUT.lock.json)")] = None
    """The file, or a folder for it."""
    compiled: Flag = False
    """Compile the step for its --chips, as `compile` does, and lock the compiled program too."""
    plan: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckVerb:
    """Plan the requests in locks again, and fail where a tensor or a collective differs from the lock."""

    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="[FILE ...]", help_behavior_hint="")] = ()
    """Locks, or folders of *.lock.json files. Without any, the working directory."""
    update: Flag = False
    """Write again the locks that are out of date."""
    annotations: Annotated[
        Annotations, arg(help_behavior_hint="(default: github where GITHUB_ACTIONS is true, else none)")
    ] = None
    """Print findings also as annotations, which GitHub Actions shows next to the lines of a change."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListVerb:
    """List the names that options take: models, layouts, chips, recipes, optimizers or findings."""

    of: Annotated[
        Positional[Literal["models", "layouts", "chips", "recipes", "optimizers", "findings"]],
        arg(metavar="{models,layouts,chips,recipes,optimizers,findings}", help_behavior_hint=""),
    ]
    """Which names."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainVerb:
    """Print the page of a finding: what its code means, an example with its fix, and why. Or, of a model's tensor under a layout, which axes
    shard it and what decided that."""

    model: Annotated[Positional[str], arg(metavar="CODE|MODEL", help_behavior_hint="")]
    """A code, as SW312; or a model, as llama3-8b."""
    tensor: Annotated[Positional[Text], arg(metavar="[TENSOR]", help_behavior_hint="")] = None
    """The tensor of the model, as layers.attention.q."""
    layout: Layout = None
    """A preset, or the path of a layout file."""
    plan: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainVerb:
    """Train a model under a layout. The plan comes first; an error in it stops the run before anything is allocated."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A model by name, as deepseek3-test, or a model folder of Hugging Face."""
    run: TrainOptions
    layout: Layout = None
    """A preset, or the path of a layout file."""
    plan: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateVerb:
    """Measure products, attention, copies and collectives at a plan's sizes, and steps of a few layers, on the devices that are there."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A model by name, as llama3-8b, or a model folder of Hugging Face."""
    out: Annotated[LocalOut, arg(metavar="FILE")]
    """The file that --chips takes after a plus sign."""
    layout: Layout = None
    """A preset, or the path of a layout file."""
    repeats: Annotated[Whole, arg(metavar="N")] = 9
    """How often each is measured."""
    plan: PlanOptions = field(default_factory=PlanOptions)


Settings = Annotated[
    Repeated,
    arg(metavar="NAME=VALUE ...", help_behavior_hint="(may be given several times)"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """The devices that read or save a checkpoint."""

    mesh: Annotated[Text, arg(metavar="AXIS=SIZE,...", help_behavior_hint="(default: the layout's)")] = None
    """Sizes of mesh axes, as fsdp=2,expert=4."""
    devices: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: what the mesh sizes multiply to)")] = None
    """Number of devices."""
    engine: Annotated[Engine, arg(help_behavior_hint="(default: jax)")] = None
    """The engine whose storage rule applies."""
    stages: Annotated[Text, arg(metavar="UNITS", help_behavior_hint="(default: shared out by their work)")] = None
    """The units of each stage of a pipeline, as 'Et*3|tttL'."""
    model: Annotated[Text, arg(metavar="MODEL", help_behavior_hint="(default: that of the checkpoint)")] = None
    """The model, as llama3-8b."""
    set: Settings = ()
    """Dimensions of that model, as num_layers=2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowVerb:
    """Show what is in a checkpoint, and what a load onto a layout reads of it."""

    directory: Annotated[Positional[Where], arg(metavar="DIR|URL", help_behavior_hint="")]
    """One step's directory, or a folder of them; or their URL, as s3://bucket/run."""
    layout: Annotated[Text, arg(name="for", metavar="NAME|FILE", help_behavior_hint="(default: none)")] = None
    """A layout. The bytes that its devices read are shown too."""
    on: Annotated[LayoutOptions, arg(name="layout")] = field(default_factory=LayoutOptions)
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardVerb:
    """Write a checkpoint again in the boxes of another layout, so that its devices read only what is theirs."""

    directory: Annotated[Positional[Where], arg(metavar="DIR|URL", help_behavior_hint="")]
    """One step's directory, or a folder of them, whose newest step is taken; or their URL."""
    layout: Annotated[str, arg(metavar="NAME|FILE")]
    """A preset, or the path of a layout file."""
    out: Annotated[Where, arg(metavar="DIR|URL")]
    """Where the checkpoint goes, as a run's --out."""
    on: Annotated[LayoutOptions, arg(name="layout")] = field(default_factory=LayoutOptions)
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyVerb:
    """Check every byte of a checkpoint against its digests, and that nothing is missing."""

    directory: Annotated[Positional[Where], arg(metavar="DIR|URL", help_behavior_hint="")]
    """One step's directory, or a folder of them; or their URL, as s3://bucket/run."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportWeightsVerb:
    """Make a checkpoint at step 0 of the weights in a model folder of Hugging Face. Nothing is written unless every tensor fits."""

    folder: Annotated[Positional[Local], arg(metavar="FOLDER", help_behavior_hint="")]
    """A folder with config.json and safetensors files."""
    out: Annotated[Where, arg(metavar="DIR|URL")]
    """Where the checkpoint goes, as a run's --out."""
    model: Annotated[Text, arg(metavar="MODEL", help_behavior_hint="(default: that of config.json)")] = None
    """The model whose weights they must be, as llama3-8b."""
    set: Settings = ()
    """Dimensions of that model, as num_layers=2."""
    dtype: Annotated[Dtype, arg(help_behavior_hint="(default: as in the folder)")] = None
    """Dtype in which the weights are stored. A run reads them in its --weights-dtype."""
    keep_prediction_layers: Flag = False
    """Keep layers for multi-token prediction (num_nextn_predict_layers) beside the weights. A run does not train them."""
    keep_fp8: Flag = False
    """Keep the codes and scales of weights in FP8 beside their values, for an export with --fp8. A run does not read them."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportWeightsVerb:
    """Write the weights of a checkpoint as a model folder of Hugging Face, which transformers loads."""

    directory: Annotated[Positional[Where], arg(metavar="DIR|URL", help_behavior_hint="")]
    """One step's directory, or a folder of them, whose newest step is taken; or their URL."""
    out: NewFolder
    """The folder to write. It must not exist, or be empty. Formerly --to."""
    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: the one that was imported)")] = (
        None
    )
    """The config.json of the model. It is copied to the folder."""
    model: Annotated[Text, arg(metavar="MODEL", help_behavior_hint="(default: that of the checkpoint)")] = None
    """The model, where there is no configuration, as llama3-8b."""
    set: Settings = ()
    """Dimensions of that model, as num_layers=2."""
    dtype: Annotated[Dtype, arg(help_behavior_hint="(default: as in the checkpoint)")] = None
    """Dtype in which the weights are written."""
    fp8: Flag = False
    """Write the matrices of attention, feed-forward layers and experts in FP8 with a scale for each block (weight_scale_inv): those that
    an import kept, where the values are theirs, and new ones elsewhere. --dtype is that of all others."""
    average: Flag = False
    """Export the exponential average of the weights, which a run with --average keeps."""
    prediction_layers: Annotated[
        MaybeWhere, arg(metavar="DIR|URL", help_behavior_hint="(default: those that the checkpoint keeps)")
    ] = None
    """A checkpoint that keeps layers for multi-token prediction: they are written beside the weights, as they were published."""
    max_file_bytes: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: 5000000000)")] = None
    """Bytes of tensors from which on another file is begun."""
    json: Flag = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFolderVerbs:
    """Make a checkpoint of a folder of another program."""

    verb: (
        Annotated[ImportWeightsVerb, subcommand("huggingface")]
        | Annotated[ImportDcpVerb, subcommand("dcp")]
        | Annotated[ImportOrbaxVerb, subcommand("orbax")]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFolderVerbs:
    """Write a checkpoint as a folder of another program."""

    verb: (
        Annotated[ExportWeightsVerb, subcommand("huggingface")]
        | Annotated[ExportDcpVerb, subcommand("dcp")]
        | Annotated[ExportOrbaxVerb, subcommand("orbax")]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CkptVerbs:
    """Show a checkpoint, verify it, write it for another layout, or exchange it with another program."""

    verb: (
        Annotated[ShowVerb, subcommand("show")]
        | Annotated[VerifyVerb, subcommand("verify")]
        | Annotated[ReshardVerb, subcommand("reshard")]
        | Annotated[ImportFolderVerbs, subcommand("import")]
        | Annotated[ExportFolderVerbs, subcommand("export")]
    )


Verb = (
    Annotated[PlanVerb, subcommand("plan")]
    | Annotated[CompileVerb, subcommand("compile")]
    | Annotated[DiffVerb, subcommand("diff")]
    | Annotated[CompareVerb, subcommand("compare")]
    | Annotated[SearchVerb, subcommand("search")]
    | Annotated[LockVerb, subcommand("lock")]
    | Annotated[CheckVerb, subcommand("check")]
    | Annotated[ListVerb, subcommand("list")]
    | Annotated[ExplainVerb, subcommand("explain")]
    | Annotated[TrainVerb, subcommand("train")]
    | Annotated[CalibrateVerb, subcommand("calibrate")]
    | Annotated[CkptVerbs, subcommand("ckpt")]
)

CkptVerb = (
    ShowVerb
    | VerifyVerb
    | ReshardVerb
    | ImportWeightsVerb
    | ImportDcpVerb
    | ImportOrbaxVerb
    | ExportWeightsVerb
    | ExportDcpVerb
    | ExportOrbaxVerb
)
"""Those of `ckpt` that run."""
