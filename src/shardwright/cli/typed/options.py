"""The options of a plan and of a run, as data. The help texts are the attribute docstrings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from shardwright.cli.arguments.declared import Hidden, Repeated, ValueType, arg, one_of
from shardwright.core.engines.engines import ENGINES
from shardwright.core.findings.bounds import integer_of
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.roles import SCHEDULES
from shardwright.core.mesh.hops import AUTO, WAYS
from shardwright.core.model.precision import TRAINED_IN, UNTRAINED
from shardwright.core.model.training_only import TrainingOnly
from shardwright.storage.url import Place, local_path, parsed_place
from shardwright.training.cluster import JOIN_TIMEOUT_S, STALL_TIMEOUT_S
from shardwright.training.options import CLIP, LEARNING_RATE, SAVED_METRICS, STDLIB, WEIGHT_DECAY


def _whole(text: str) -> int:
    try:
        return integer_of(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a whole number.") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a number.") from None


_WHOLE, _NUMBER = ValueType("N", _whole), ValueType("F", _number)


def _dtype(text: str) -> str:
    if text == "float16":
        raise ValueError(UNTRAINED)
    return _DTYPE_NAMES.read(text)


_DTYPE_NAMES = one_of(*TRAINED_IN)
_DTYPE = ValueType(_DTYPE_NAMES.metavar, _dtype)


def _dtypes(text: str) -> str:
    names = [_dtype(name) for name in text.split(",")]
    return names[0] if len(set(names)) == 1 else ",".join(names)


def _chips(text: str) -> str:
    # Loaded only when chips are given.
    from shardwright.cost.hardware.written import kind_and_shape

    return kind_and_shape(text)


def _local(text: str) -> Path:
    place = parsed_place(text)
    if (path := local_path(place)) is None:
        raise InputError(f"{place}: a folder of this machine is needed here.")
    return path


def _local_out(text: str) -> Path:
    place = parsed_place(text)
    if (path := local_path(place)) is None:
        raise InputError(
            f"--out {place}: the metrics and the lock of a run need a folder of this machine. For its checkpoints give "
            f"--checkpoints {place}, and a local --out."
        )
    return path


_PLACE = ValueType("DIR|URL", parsed_place)


SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""Of a number of tokens."""


def _tokens(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,19})(?:\.([0-9]{1,12}))?([KMBT]?)", text.upper())
    tokens = None if match is None else Fraction(f"{match[1]}.{match[2] or 0}") * SUFFIXES[match[3]]
    if tokens is None or tokens.denominator != 1:
        raise ValueError(f"'{text}' is not a number of tokens, as 300B or 15T.")
    return int(tokens)


_TOKENS = ValueType("N", _tokens)


UNITS_OF_TIME = {"s": 1, "m": 60, "h": 3600}


def _duration(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,6})(?:\.([0-9]{1,3}))?([smh])", text)
    if match is None or not (seconds := float(f"{match[1]}.{match[2] or 0}") * UNITS_OF_TIME[match[3]]):
        raise ValueError(f"'{text}' is not a time, as 30s, 2m or 1h.")
    return seconds


Duration = Annotated[float, ValueType("TIME", _duration)]
Count = Annotated[int | None, _WHOLE]
Tokens = Annotated[int | None, _TOKENS]
Whole = Annotated[int, _WHOLE]
Number = Annotated[float, _NUMBER]
Factor = Annotated[float | None, _NUMBER]
Text = Annotated[str | None, ValueType("TEXT")]
Chips = Annotated[str | None, ValueType("KIND:SHAPE", _chips)]
Where = Annotated[Place, _PLACE]
MaybeWhere = Annotated[Place | None, _PLACE]
Local = Annotated[Path, ValueType("DIR", _local)]
LocalOut = Annotated[Path, ValueType("DIR", _local_out)]
Flag = bool
Dtype = Annotated[str | None, _DTYPE]
Dtypes = Annotated[str | None, ValueType("DTYPE[,DTYPE...]", _dtypes)]
Engine = Annotated[str | None, one_of(*ENGINES)]
Hops = Annotated[str | None, one_of(*WAYS, AUTO)]
Schedule = Annotated[str | None, one_of(*SCHEDULES)]
Patterns = Annotated[
    Repeated,
    arg(metavar="PATTERN ...", help_behavior_hint="(may be given several times)"),
]
Metric = Annotated[str | None, one_of(*SAVED_METRICS)]
Annotations = Annotated[str | None, one_of("github", "none")]
Layout = Annotated[
    Text,
    arg(
        metavar="NAME|FILE",
        help_behavior_hint="(default: the model's natural one; with --chips the fastest of a few that fit)",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of a plan, in addition to model and layout. The plan shows every value, given or default."""

    mesh: Annotated[Text, arg(metavar="AXIS=SIZE,...", help_behavior_hint="(default: the layout's)")] = None
    """Sizes of mesh axes, as fsdp=2,expert=4."""
    move: Annotated[Text, arg(metavar="WHAT=HOW,...", help_behavior_hint="(default: the layout's)")] = None
    """How keys and tokens move, as attention=ring,moe=all-to-all."""
    engine: Annotated[Engine, arg(help_behavior_hint="(default: jax)")] = None
    """The engine whose storage rule applies."""
    batch: Annotated[
        Count,
        arg(
            metavar="ROWS", help_behavior_hint="(default: the model's natural one; with --chips enough for all devices)"
        ),
    ] = None
    """Rows of a global step."""
    length: Annotated[Count, arg(metavar="TOKENS", help_behavior_hint="(default: the model's natural one)")] = None
    """Tokens of a row."""
    chips: Annotated[Chips, arg(metavar="KIND:SHAPE", help_behavior_hint="(default: none)")] = None
    """Accelerators to check the plan against, as v5p:4x4x4 or h100:8x8; or as they are sold, as v5p-128 or h100:64."""
    devices: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: what the mesh sizes multiply to)")] = None
    """Number of devices. `train` on CPU simulates as many."""
    set: Annotated[
        Repeated,
        arg(metavar="NAME=VALUE ...", help_behavior_hint="(may be given several times)"),
    ] = ()
    """Dimensions of the model, as num_layers=2."""
    weights_dtype: Annotated[Dtype, arg(help_behavior_hint="(default: float32)")] = None
    """Dtype in which weights are stored."""
    master_dtype: Annotated[Dtype, arg(help_behavior_hint="(default: none are kept)")] = None
    """Keep each weight in this wider dtype too, with the moments: a step updates that, and the weight is its rounding."""
    gradients_dtype: Annotated[Dtype, arg(help_behavior_hint="(default: that of the weights)")] = None
    """Dtype in which gradients are summed and stored."""
    moments_dtype: Annotated[Dtypes, arg(help_behavior_hint="(default: float32)")] = None
    """Dtype in which the optimizer's moments, or what else it keeps for a weight, are stored; or of each, as bfloat16,float32."""
    dtype: Annotated[Dtype, arg(help_behavior_hint="(default: the model's own)")] = None
    """Dtype of the computation."""
    remat: Annotated[Text, arg(metavar="POLICY|FILE", help_behavior_hint="(default: full)")] = None
    """What the backward pass recomputes: full layers, all but matrix products (dots), nothing (none); or names of activations to keep,
    as keep=attention.output,mlp.gate or dots,host=residual.stream; some layers only: full@0:16+none."""
    microbatches: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: 1)", former=("--micro-steps",))] = (
        None
    )
    """Number of microbatches per step, computed one after the other with their gradients summed. Formerly --micro-steps."""
    loss_chunks: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: 1)")] = None
    """Compute logits and loss for this many chunks of a device's tokens, one after the other: no array has all logits."""
    schedule: Annotated[Schedule, arg(help_behavior_hint="(default: the layout's, or the engine's own)")] = None
    """The order in which the stages of a pipeline compute."""
    stages: Annotated[Text, arg(metavar="UNITS", help_behavior_hint="(default: shared out by their work)")] = None
    """The units of each stage, as 'Et*3|(tt|)*29L': E the embedding, t a layer, L the logits."""
    hops: Annotated[Hops, arg(help_behavior_hint="(default: auto)")] = None
    """How weights are gathered over an entire TPU slice: in one collective, in two hops, in chunks, or in the fastest of these ways."""
    expert_buffer: Annotated[Factor, arg(metavar="F", help_behavior_hint="(default: 1.25, and it grows)")] = None
    """Capacity of a device's expert buffer, as a multiple of an even split of the tokens. A run stops on overflow of one that is set."""
    optimizer: Annotated[Text, arg(metavar="NAME", help_behavior_hint="(default: adamw)")] = None
    """The optimizer: adadelta, adagrad, adamax, adamw, lion, rmsprop or sgd; or one of an engine, as optax:lamb or torch:RAdam."""
    optimizer_set: Annotated[
        Repeated,
        arg(metavar="NAME=VALUE ...", help_behavior_hint="(may be given several times)"),
    ] = ()
    """Constants of the optimizer, as b2=0.99."""
    average: Annotated[Factor, arg(metavar="F", help_behavior_hint="(default: none is kept)")] = None
    """Keep the exponential average of the weights too, of which a step leaves this share, as 0.999."""
    precision: Annotated[Text, arg(metavar="NAME|FILE", help_behavior_hint="(default: nothing is quantized)")] = None
    """The recipe of low precision: fp8-delayed, fp8-current, fp8-row, fp8-block, mxfp8, nvfp4, or the path of a file."""
    tokens: Annotated[Tokens, arg(metavar="N", help_behavior_hint="(default: not said)")] = None
    """Tokens of the entire training, as 15T: with --chips the plan says its days and device-hours."""
    price: Annotated[Factor, arg(metavar="F", help_behavior_hint="(default: not said)")] = None
    """The price of a device for an hour: the plan says what --tokens cost."""
    load_balance: Flag = False
    """Give each device a slice from both ends of a sharded row, so that causal attention is equal work for all."""
    json: Flag = False
    """Print one JSON object on stdout."""
    besides: Hidden[tuple[Finding, ...]] = ()
    """What the configuration of the model has besides its table: no option, and a part of every plan."""
    training_only: Hidden[tuple[TrainingOnly, ...] | None] = None
    """What the configuration says of training alone; None: as the model by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of a run, in addition to those of its plan."""

    steps: Annotated[Whole, arg(metavar="N")]
    """Length of the schedule, in steps."""
    out: Annotated[LocalOut, arg(metavar="DIR")]
    """Where metrics.jsonl and the checkpoints go."""
    data: Annotated[str, arg(metavar="PATH|stdlib")] = STDLIB
    """A text file, a JSONL file, a folder, or the source text of Python's standard library."""
    tokenizer: Annotated[Text, arg(metavar="FILE", help_behavior_hint="(default: that of the weights, else bytes)")] = (
        None
    )
    """A tokenizer.json."""
    stop_after: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: --steps)")] = None
    """Save and end after this step of the schedule."""
    lr: Annotated[Number, arg(metavar="F")] = LEARNING_RATE
    """The highest learning rate."""
    warmup: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: a tenth of --steps)")] = None
    """Steps in which the learning rate rises."""
    weight_decay: Annotated[Number, arg(metavar="F")] = WEIGHT_DECAY
    """Weight decay of matrices, decoupled: times the learning rate."""
    clip: Annotated[Number, arg(metavar="F")] = CLIP
    """The largest global norm of the gradient."""
    seed: Annotated[Whole, arg(metavar="S")] = 0
    """Seed of the initial weights and of the order of the data."""
    checkpoint_every: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: at the end only)")] = None
    """Save every N steps."""
    keep: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: all)")] = None
    """Keep the N newest checkpoints, and those that another --keep option keeps. The others are deleted after a save."""
    keep_every: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: none)")] = None
    """Keep the steps that are multiples of N, for ever."""
    keep_every_hours: Annotated[Count, arg(metavar="H", help_behavior_hint="(default: none)")] = None
    """Keep the first checkpoint of each H hours (UTC), for ever."""
    keep_best: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: none)")] = None
    """Keep the N checkpoints with the lowest --best-of."""
    best_of: Annotated[Metric, arg(help_behavior_hint="(default: loss)")] = None
    """The metric that --keep-best compares: that of the checkpoint's own step."""
    async_checkpoints: Flag = False
    """Write checkpoints in the background: a step waits only for a copy of the state in host memory."""
    checkpoints: Annotated[MaybeWhere, arg(metavar="DIR|URL", help_behavior_hint="(default: --out)")] = None
    """Where the checkpoints go instead, as s3://bucket/run. Metrics and the lock of the run stay under --out."""
    weights: Annotated[MaybeWhere, arg(metavar="DIR|URL", help_behavior_hint="(default: initial values)")] = None
    """Begin with the weights of this checkpoint or model folder of Hugging Face, with new optimizer state, at step 0."""
    weights_new: Patterns = ()
    """Weights of the model that begin from initial values: names with * for any text, as 'embedding*'."""
    weights_skip: Patterns = ()
    """Tensors of --weights that are left out, by their names there."""
    weights_cast: Flag = False
    """Cast the floating dtypes of a checkpoint's weights to --weights-dtype. Those of a model folder always are."""
    resume: Flag = False
    """Go on from the newest intact checkpoint in --out or --checkpoints, on any layout."""
    resume_from: Annotated[Count, arg(metavar="STEP", help_behavior_hint="(default: the newest)")] = None
    """Go on from the checkpoint of this step. Later ones are kept under another name."""
    change: Annotated[Text, arg(metavar="NAME,...", help_behavior_hint="(default: none)")] = None
    """Options that may differ after --resume, of lr, warmup, steps, weight-decay, clip, average, batch, length, data, seed."""
    tensorboard: Flag = False
    """Write TensorBoard events to --out too."""
    log_every: Annotated[
        Count, arg(metavar="N", help_behavior_hint="(default: ten lines a run, one a minute at least)")
    ] = None
    """Without a terminal, print a line every N steps."""
    coordinator: Annotated[Text, arg(metavar="HOST:PORT", help_behavior_hint="(default: from the cluster)")] = None
    """Address at which process 0 of several listens."""
    processes: Annotated[Count, arg(metavar="N", help_behavior_hint="(default: from the cluster, else 1)")] = None
    """Number of processes of the run."""
    process: Annotated[Count, arg(metavar="I", help_behavior_hint="(default: from the cluster)")] = None
    """Index of this process, from 0."""
    join_timeout: Annotated[Whole, arg(metavar="SECONDS")] = JOIN_TIMEOUT_S
    """How long the processes wait for each other to start."""
    stall_timeout: Annotated[Whole, arg(metavar="SECONDS")] = STALL_TIMEOUT_S
    """How much longer than the longest step a process may be silent before the others end."""
