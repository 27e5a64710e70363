"""The model of a configuration: one of ours, a new table from the dimensions in the files, or none.

| the files set | the model |
|---|---|
| any, and ``--model`` is given | that of ``--model`` |
| a decoder of ours and its dimensions | ours where all weights are the same, else a new table |
| a ``model_name`` of MaxText's, whose file is missing | ours where that model has the same weights, else refused |
| that, and other dimensions | what MaxText, which has the file, makes of both: refused, or a new table |
| a decoder that is not ours, or an option that changes its weights | refused, with the difference |
| none of these | refused: no model is given |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, NoReturn

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.nearest import did_you_mean, nearest
from shardwright.core.layout.faults import shown
from shardwright.core.model.table import ModelTable
from shardwright.interop.hugging_face.command import nearest_of
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.model_files import BASE, FILES, is_deliberate
from shardwright.interop.maxtext.reading.model_vocabulary import (
    CHOICES,
    DECODERS,
    DIMS,
    EXPERTS_ONLY,
    MODEL_NAMES,
    OTHER_DECODERS,
    PLAIN,
    READ_BY,
    UNREAD,
)
from shardwright.interop.maxtext.reading.reading import GIVEN, Scalar
from shardwright.interop.maxtext.reading.vocabulary import MODELS
from shardwright.interop.maxtext.sources import OVERRIDES, refuse_conflict, refuse_weights
from shardwright.models import FAMILIES, build, names
from shardwright.models.deepseek3.sizes import DeepSeek3Config
from shardwright.models.llama3.sizes import Llama3Config
from shardwright.models.mixtral.sizes import MixtralConfig
from shardwright.models.overrides import overridden
from shardwright.models.parts.size import Natural, Size

MODEL_OPTION = "--model NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A table, and why it was chosen where ``--model`` was not given. ``name`` and ``settings``: how a command line names it."""

    table: ModelTable
    name: str
    settings: Mapping[str, str]
    why: str | None = None
    findings: tuple[Finding, ...] = ()


def model_of(
    requested: str | None, settings: Mapping[str, str], configuration: Configuration, like: str | None = None
) -> Model:
    """The model of a configuration; ``settings`` replace dimensions of it. ``like``: a model whose table is used in its place.

    Raises InputError, with name and reason, for a model that no table of ours can represent.
    """
    if like is not None:
        if requested is not None:
            raise InputError(
                f"--like {like} is in place of the files' model, and --model {requested} replaces it. Give one."
            )
        return _in_its_place(like, settings, configuration)
    if requested is not None:
        _refuse_dimensions_beside(requested, configuration)
        return Model(table=build(requested, settings), name=requested, settings=settings)
    name = _named(configuration)
    known = {each: block for block, those in MODEL_NAMES.items() for each in those}
    if configuration.value_of("student_overrides"):
        _refuse(
            configuration,
            "student_overrides",
            "a student and a teacher, each with its own model: import the overrides of each as a file, or give the "
            f"model: {MODEL_OPTION}.",
        )
    if configuration.model_file is None and name in known:
        return _by_name(configuration, name, known[name], settings)
    if not configuration.value_of("decoder_block"):
        if name is not None:
            near = nearest(name, known)
            _refuse(
                configuration,
                "model_name",
                f"MaxText has no model '{name}', and the file has no 'decoder_block' with dimensions. "
                + (f"Did you mean '{near}'?" if near else f"Give the model: {MODEL_OPTION}."),
            )
        raise InputError(
            f"{configuration.sources[-1]}: no model is given for these rules: no 'model_name', and no "
            f"'decoder_block' with dimensions. Give it: {MODEL_OPTION}."
        )
    name = name or Path(configuration.subject).stem
    return _by_dimensions(configuration, name, settings, f"by the dimensions of {configuration.subject}")


def _in_its_place(like: str, settings: Mapping[str, str], configuration: Configuration) -> Model:
    name = _named(configuration) or Path(configuration.subject).stem
    scalar = configuration.settings.get("decoder_block") or configuration.settings.get("model_name")
    finding = Finding(
        code="SW123",
        severity="info",
        where="--like",
        position=None if scalar is None else scalar.position,
        found=f"the tensors of {like}, in place of those of {name}: names that only {name} has are not resolved, and sizes are of {like}",
        needed=f"a table of {name}",
    )
    return Model(table=build(like, settings), name=like, settings=settings, findings=(finding,))


def _refuse_dimensions_beside(requested: str, configuration: Configuration) -> None:
    """Refuse a key of the command line that sizes a model, beside ``--model``, whose sizes are its own.

    In a file such keys are usual: ``--model`` is given to replace them.
    """
    sized = {**DIMS, **CHOICES, **PLAIN, **UNREAD}
    key = next((key for key in configuration.settings if key in sized and _is_given(configuration, key)), None)
    if key is not None:
        raise InputError(
            f"{GIVEN} {key}: it sizes the model of the files, and --model {requested} replaces that model. Give dimensions of "
            f"{requested} as --set NAME=VALUE, or leave --model out."
        )


def _by_dimensions(configuration: Configuration, name: str, settings: Mapping[str, str], source: str) -> Model:
    """A decoder of ours with its dimensions. ``source``: where these are from."""
    size = _size(configuration, name)
    family = _family(configuration)
    if settings:
        size = replace(size, config=overridden(name, size.config, settings))
    table = FAMILIES[family][1](name, size)
    ours = next((each for each in _names_of(family) if _same(build(each), table)), None)
    if ours is not None:
        same = f"{ours}, which has the weights of {name}" if ours != name else ours
        why, findings = f"{same}, {source}", tuple(_without_effect(configuration))
        return Model(table=build(ours), name=ours, settings={}, why=why, findings=findings)
    if name in names():
        # MaxText's model has the name of a different model of ours.
        table = replace(table, name=f"maxtext-{name}")
    why = f"{table.name}, a {family} {source}"
    named, changes = nearest_of(family, size.config)
    return Model(table=table, name=named, settings=changes, why=why, findings=tuple(_without_effect(configuration)))


def _family(configuration: Configuration) -> str:
    return DECODERS[str(configuration.value_of("decoder_block"))]


def _named(configuration: Configuration) -> str | None:
    name = configuration.value_of("model_name")
    return None if name in (None, "", "default") else str(name).replace("-Instruct", "")


def _by_name(configuration: Configuration, name: str, block: str, settings: Mapping[str, str]) -> Model:
    """A model given only by name: MaxText has its dimensions in a file of that name."""
    replaced = _is_given(configuration, "decoder_block") and configuration.value_of("decoder_block") in DECODERS
    if block in OTHER_DECODERS and not replaced:
        refuse_weights(configuration, "model_name", _not_ours(name, block))
    if name not in MODELS:
        _refuse(
            configuration,
            "model_name",
            f"the dimensions of {name} are in MaxText's models/{name}.yml, which is neither next to this file nor in a "
            "configs folder above it. Import that file, or copy it there.",
        )
    merged = _with_its_file(configuration, name)
    size = _size(merged, name)
    if not _same(build(MODELS[name]), FAMILIES[_family(merged)][1](name, size)):
        return _by_dimensions(merged, name, settings, f"by the dimensions of {name} and {GIVEN}")
    why = f"{MODELS[name]}, for model_name {name}"
    table, findings = build(MODELS[name], settings), tuple(_without_effect(merged))
    return Model(table=table, name=MODELS[name], settings=settings, why=why, findings=findings)


def _with_its_file(configuration: Configuration, name: str) -> Configuration:
    """The configuration merged with MaxText's own file of a model, as MaxText merges it: after all files.

    Raises InputError for a value of a file that it would replace, since the user does not have that file; and for one of the
    command line, which MaxText takes only with ``override_model_config``.
    """
    settings = configuration.settings
    place = settings["model_name"].position
    settled = dict(settings)
    for key, theirs in FILES[name].items():
        scalar = settings.get(key)
        if (
            scalar is None
            or scalar.value == theirs
            or not (_is_given(configuration, key) or is_deliberate(key, scalar.value, settings))
        ):
            settled[key] = Scalar(value=theirs, position=place)
        elif not _is_given(configuration, key):
            raise InputError(
                f"{scalar.position}: '{key}' is {shown(scalar.value)}, and {name} has {shown(theirs)}: MaxText reads its "
                f"models/{name}.yml after this file, and takes that. Leave '{key}' out, copy models/{name}.yml there, or "
                f"set it on the command line: {GIVEN} {OVERRIDES}=true {key}={shown(scalar.value, quote=False)}."
            )
        elif configuration.value_of(OVERRIDES) is not True:
            refuse_conflict(key, f"{shown(scalar.value, quote=False)}, and {name} has {shown(theirs, quote=False)}")
    return replace(configuration, settings=settled)


def _is_given(configuration: Configuration, key: str) -> bool:
    """Whether the command line sets it."""
    scalar = configuration.settings.get(key)
    return scalar is not None and scalar.position.source == GIVEN


def _without_effect(configuration: Configuration) -> Iterator[Finding]:
    """SW111: options that change the weights of other decoders and that this one does not read."""
    block, family = str(configuration.value_of("decoder_block")), _family(configuration)
    of_others = {key: "a dimension of other decoders" for key in DIMS if key not in READ_BY[family]}
    plain = {**{key: DIMS[key] for key in of_others}, **{key: value for key, (_, value, _) in UNREAD.items()}}
    plain.update(dict.fromkeys(EXPERTS_ONLY, False))
    makes = {**of_others, **{key: what for key, (_, _, what) in UNREAD.items()}, **EXPERTS_ONLY}
    for key, value in plain.items():
        scalar = configuration.settings.get(key)
        if scalar is None or value is None or key == "mtp_num_layers" or scalar.value in (value, BASE.get(key, value)):
            continue
        if family == "deepseek3" and key == "routed_bias":
            continue
        yield Finding(
            code="SW111",
            severity="warning",
            where=f"'{key}'",
            position=scalar.position,
            found=f"{shown(scalar.value)} ({makes[key]}), which MaxText's decoder '{block}' does not read: it changes no "
            "weight",
            needed="a key that this decoder reads",
            fix=f"Take '{key}' out.",
        )


def _names_of(family: str) -> tuple[str, ...]:
    return tuple(f"{family}-{size}" for size in FAMILIES[family][0])


def _same(one: ModelTable, other: ModelTable) -> bool:
    """Whether two tables have the same weights and the same number of experts per token."""
    weights = ([(w.name, w.shape, w.num) for w in table.weights] for table in (one, other))
    return next(weights) == next(weights) and one.top_k == other.top_k


def _size(configuration: Configuration, name: str) -> Size[Any]:
    block = str(configuration.value_of("decoder_block"))
    if block not in DECODERS:
        if block not in OTHER_DECODERS:
            known = [*DECODERS, *OTHER_DECODERS]
            _refuse(configuration, "decoder_block", f"MaxText has no decoder '{block}'. {did_you_mean(block, known)}")
        refuse_weights(configuration, "decoder_block", _not_ours(name, block))
    family = DECODERS[block]
    for key, (_, plain, what) in PLAIN.items():
        value = configuration.value_of(key)
        if value is not None and value != plain and not (key == "trainable_position_size" and int(value) <= 0):
            refuse_weights(
                configuration, key, f"{name}: '{key}' is {shown(value)}: {what}, which no table of ours has."
            )
    for key, what in EXPERTS_ONLY.items():
        own = family == "llama3" or (family == "deepseek3" and key == "routed_bias")
        if configuration.value_of(key) is True and not own:
            refuse_weights(configuration, key, f"{name}: '{key}' is true: {what}, which no {family} of ours has.")
    latent = configuration.value_of("attention_type") == "mla"
    if latent != (family == "deepseek3"):
        kind = shown(_choice(configuration, "attention_type"))
        needed = "'mla'" if family == "deepseek3" else "another than 'mla'"
        refuse_weights(
            configuration,
            "attention_type",
            f"{name}: 'attention_type' is {kind}, where decoder '{block}' of ours has {needed}.",
        )
    experts, dense = configuration.value_of("base_moe_mlp_dim"), configuration.value_of("base_mlp_dim")
    if family == "llama3" and _dim(configuration, "num_experts") > 1:
        _refuse(
            configuration,
            "num_experts",
            f"{name}: 'num_experts' is {configuration.value_of('num_experts')}, and decoder '{block}' has no experts. Leave it "
            "out, or name a decoder that has them, as mixtral.",
        )
    if family == "mixtral" and experts is not None and int(experts) > 0 and experts != dense:
        _refuse(
            configuration,
            "base_moe_mlp_dim",
            f"{name}: 'base_moe_mlp_dim' is {experts} and 'base_mlp_dim' is {dense}: MaxText ends with an error where all "
            "layers have experts and the two differ. Give both the same.",
        )
    if family != "llama3" and _choice(configuration, "logits_via_embedding"):
        refuse_weights(
            configuration,
            "logits_via_embedding",
            f"{name}: 'logits_via_embedding' is true, and {family} has a separate output head.",
        )
    try:
        config = {"llama3": _llama, "mixtral": _mixtral, "deepseek3": _deepseek}[family](configuration)
    except InputError as error:
        raise InputError(f"{configuration.subject}: {name}: {error}") from None
    return Size(config=config, natural=_natural(configuration, config))


def _not_ours(name: str, block: str) -> str:
    return f"{name}: decoder '{block}' has {OTHER_DECODERS[block]}, which no table of ours has."


def _llama(configuration: Configuration) -> Llama3Config:
    return Llama3Config(**_decoder(configuration), tied=bool(_choice(configuration, "logits_via_embedding")))


def _mixtral(configuration: Configuration) -> MixtralConfig:
    return MixtralConfig(
        **_decoder(configuration),
        num_experts=_dim(configuration, "num_experts"),
        top_k=_dim(configuration, "num_experts_per_tok"),
    )


def _decoder(configuration: Configuration) -> dict[str, Any]:
    """The dims of a decoder whose heads all have the same size, by our names."""
    return {
        "num_layers": _dim(configuration, "base_num_decoder_layers"),
        "embed": _dim(configuration, "base_emb_dim"),
        "num_heads": _dim(configuration, "base_num_query_heads"),
        "num_kv_heads": _dim(configuration, "base_num_kv_heads"),
        "head_dim": _dim(configuration, "head_dim"),
        "mlp": _dim(configuration, "base_mlp_dim"),
        "vocab": _dim(configuration, "vocab_size"),
    }


def _deepseek(configuration: Configuration) -> DeepSeek3Config:
    scoring = _choice(configuration, "routed_score_func") or "softmax"
    if scoring not in ("sigmoid", "softmax"):
        raise InputError(f"'routed_score_func' is {shown(scoring)}, where ours are sigmoid and softmax.")
    return DeepSeek3Config(
        num_layers=_dim(configuration, "base_num_decoder_layers"),
        num_dense_layers=_dim(configuration, "first_num_dense_layers"),
        embed=_dim(configuration, "base_emb_dim"),
        num_heads=_dim(configuration, "base_num_query_heads"),
        q_lora=_dim(configuration, "q_lora_rank") or None,
        kv_lora=_dim(configuration, "kv_lora_rank"),
        nope_dim=_dim(configuration, "qk_nope_head_dim"),
        rope_dim=_dim(configuration, "qk_rope_head_dim"),
        value_dim=_dim(configuration, "v_head_dim"),
        mlp=_dim(configuration, "base_mlp_dim"),
        expert_mlp=_dim(configuration, "base_moe_mlp_dim"),
        num_experts=_dim(configuration, "num_experts"),
        num_groups=max(1, _dim(configuration, "n_routing_groups")),
        num_chosen_groups=max(1, _dim(configuration, "topk_routing_group")),
        top_k=_dim(configuration, "num_experts_per_tok"),
        num_shared_experts=_dim(configuration, "shared_experts"),
        scoring=scoring,  # pyright: ignore[reportArgumentType]
        routing_bias=bool(_choice(configuration, "routed_bias")),
        normalized_weights=bool(_choice(configuration, "norm_topk_prob")),
        vocab=_dim(configuration, "vocab_size"),
    )


def _dim(configuration: Configuration, key: str) -> int:
    found = configuration.value_of(key)
    value = DIMS[key] if found is None else found
    if value is None:
        raise InputError(f"no '{key}', which a model needs. Give the file that has it: --base base.yml.")
    return int(value)


def _choice(configuration: Configuration, key: str) -> str | int | float | bool:
    found = configuration.value_of(key)
    return CHOICES[key][1] if found is None else found


def _refuse(configuration: Configuration, key: str, message: str) -> NoReturn:
    scalar = configuration.settings.get(key)
    raise InputError(f"{configuration.subject if scalar is None else scalar.position}: {message}")


def _natural(configuration: Configuration, config: Any) -> Natural:
    """Eight devices with one row each: `ep` over gcd(8, experts) of them, or `fsdp` without experts."""
    length = int(configuration.value_of("max_target_length") or 4096)
    experts = getattr(config, "num_experts", None)
    if not experts:
        return Natural(layout="fsdp", mesh={"fsdp": 8}, batch=8, length=length)
    ep = gcd(8, experts)
    return Natural(layout="ep", mesh={"data": 1, "fsdp": 8 // ep, "expert": ep}, batch=8, length=length)
