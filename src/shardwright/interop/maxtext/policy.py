"""MaxText's ``remat_policy``, read into a policy of recomputation and written for one.

Its policies by name, and those of ``custom``, are lists of the names that its layers give to activations (``NAMED`` and ``NAMES``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.model.table import ModelTable
from shardwright.core.policies.policy import INPUT, Part, Policy, read_policy
from shardwright.core.policies.runs import names_that_are_kept, stacks_of
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.vocabulary import REMAT, REMAT_TENSORS

QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
WI = ("mlpwi", "mlpwi_0", "mlpwi_1")
NAMED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "full": ("device", ()),
    "save_qkv_proj": ("device", QKV),
    "save_out_proj": ("device", ("out_proj",)),
    "save_dot_except_mlp": ("device", (*QKV, "out_proj")),
    "save_dot_except_mlpwi": ("device", (*QKV, "out_proj", "mlpwo")),
    "save_dot_with_context_except_mlp": ("device", (*QKV, "context", "out_proj")),
    "minimal": ("device", (*QKV, "out_proj", *WI, "mlpwo")),
    "minimal_with_context": ("device", (*QKV, "context", "out_proj", *WI, "mlpwo")),
    "minimal_flash": ("device", (*QKV, "context", "out_proj", *WI, "mlpwo")),
    "minimal_offloaded": ("offload", (*QKV, "out_proj", *WI, "mlpwo")),
    "qkv_proj_offloaded": ("offload", QKV),
}
"""Where each policy puts what it keeps, and the names."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "decoder_layer_input": (INPUT,),
    "context": ("attention.attended",),
    "query_proj": ("attention.queries",),
    "key_proj": ("attention.keys",),
    "value_proj": ("attention.values",),
    "qkv_proj": ("attention.queries", "attention.keys", "attention.values"),
    "query_wa_proj": ("attention.query_latent",),
    "kv_wa_proj": ("attention.latent",),
    "mla_q": ("attention.queries",),
    "mla_kv": ("attention.latent_attended",),
    "out_proj": ("attention.projected",),
    "mlpwi": ("mlp.gate", "mlp.up", "shared.gate", "shared.up"),
    "mlpwi_0": ("mlp.gate", "shared.gate"),
    "mlpwi_1": ("mlp.up", "shared.up"),
    "mlpwo": ("mlp.projected", "shared.projected"),
    "moe_mlpwi_0": ("moe.gate",),
    "moe_mlpwi_1": ("moe.up",),
    "moe_mlpwo": ("moe.output",),
}
"""MaxText's name of an activation, and ours."""

ATTENDED = {"attention.keys": "attention.keys_attended", "attention.values": "attention.values_attended"}
"""Keys and values of latent attention, which are made where they are attended to."""

WHERE = ("remat", "device", "offload")


def policy_of(configuration: Configuration, table: ModelTable) -> str | Finding | None:
    """The policy of a configuration; None where it names none; a finding for a policy that MaxText does not have."""
    named = configuration.settings.get(REMAT)
    if named is None:
        return None
    kept: dict[str, tuple[str, ...]] = {}
    if named.value == "custom":
        for name in REMAT_TENSORS:
            scalar = configuration.settings.get(name)
            if scalar is None:
                continue
            if scalar.value not in WHERE:
                return _unknown(configuration, name, str(scalar.value), WHERE)
            kept[str(scalar.value)] = (*kept.get(str(scalar.value), ()), name)
    elif named.value in NAMED:
        where, names = NAMED[str(named.value)]
        kept[where] = names
    else:
        return _unknown(configuration, REMAT, str(named.value), (*NAMED, "custom"))
    host = tuple(_ours(kept.get("offload", ()), table))
    keep = tuple(name for name in _ours(kept.get("device", ()), table) if name not in (*host, INPUT))
    return Policy(parts=(Part(keep=keep, host=host),)).text


def policy_lines(remat: str, table: ModelTable) -> list[str]:
    """The settings that keep what a policy keeps, a line each; none for ``full``, which is MaxText's own. Raises as ``settings_for``."""
    return [] if remat == "full" else [f"{key}: {value}" for key, value in settings_for(remat, table).items()]


def settings_for(remat: str, table: ModelTable) -> dict[str, str]:
    """The settings of MaxText that keep what a policy keeps. Raises InputError where they cannot say it."""
    policy = read_policy(remat)
    part = policy.parts[0]
    if len(policy.parts) > 1 or part.layers is not None:
        raise InputError(f"MaxText has one policy for all layers, and --remat is '{remat}'. Give one for all.")
    if part == Part():
        return {REMAT: "full"}
    if part.base != "full" or part.recompute:
        raise InputError(
            f"MaxText's custom policy is a list of what is kept, and --remat is '{remat}'. Give keep= and host= alone."
        )
    found = {REMAT: "custom"}
    for names, where in ((part.keep, "device"), (part.host, "offload")):
        left = set(names)
        for theirs in NAMES:
            here = set(_ours((theirs,), table))
            if here and here <= left and theirs not in ("mla_q", "qkv_proj", "mlpwi"):
                found[theirs] = where
                left -= here
        if left:
            raise InputError(
                f"MaxText has no name for '{sorted(left)[0]}', so that no policy of it can keep that alone."
            )
    return found


def _ours(names: Iterable[str], table: ModelTable) -> Iterator[str]:
    known = names_that_are_kept(table, [stack for stack, _, _ in stacks_of(table)])
    named = (ours if ours in known else ATTENDED.get(ours, ours) for name in names for ours in NAMES[name])
    yield from dict.fromkeys(name for name in named if name in known)


def _unknown(configuration: Configuration, key: str, value: str, known: tuple[str, ...]) -> Finding:
    return Finding(
        code="SW111",
        severity="error",
        where=f"'{key}'",
        position=configuration.settings[key].position,
        found=f"'{value}'",
        needed=f"one of {', '.join(known)}",
        fix=did_you_mean(value, known) if len(known) > 3 else f"Write one of {', '.join(known)}.",
    )
