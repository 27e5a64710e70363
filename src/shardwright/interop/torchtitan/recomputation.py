"""TorchTitan's activation checkpointing as a policy of recomputation, and back.

| mode | policy |
|---|---|
| full | ``full`` |
| selective, per operation | every second product of a layer is kept, the first one first; attention; what all-to-alls return |
| selective, every n-th layer (before March 2026) | ``full`` for layers n - 1, 2n - 1, ...; the others keep all |
| none | all is kept. Weights are gathered again unless ``fsdp_reshard_after_forward`` is ``never`` |
| memory budget | what its compiler decides: 0 is ``full``, and any other is planned with all kept |

Products are counted in the order of the layer. The product of the router is not counted: ``force_recompute_mm_shapes_by_fqns`` names it, and another
list is refused. (pytorch/torchtitan b5bcd76c6, distributed/activation_checkpoint.py.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position
from shardwright.core.model.table import ModelTable
from shardwright.core.policies.policy import BASES, WEIGHTS, Part
from shardwright.core.policies.runs import operations_of, runs_of, stacks_of

FIELD = "activation_checkpoint"
MODES = ("none", "full", "selective", "memory_budget")
CLASSES = {"FullAC.Config": "full", "SelectiveAC.Config": "selective", "MemoryBudgetAC.Config": "memory_budget"}
EARLIER_CLASS = "ActivationCheckpointConfig"
MODE, OPTION, BUDGET = "mode", "selective_ac_option", "memory_budget"
PER_OPERATION = "op"
FORCED = ("force_recompute_mm_shapes_by_fqns", "per_op_sac_force_recompute_mm_shapes_by_fqns")
ROUTER = ["moe.router.gate"]
EARLIER_OPTION = "2"
"""The default of configurations that are sections of a file: every second layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What a configuration sets. ``every``: of ``selective``, each layer with such a number is computed again; None: per operation.
    ``stated`` False: it is the default. ``unknown``: why only running the program gives it."""

    mode: str
    every: int | None = None
    budget: float = 0.5
    position: Position | None = None
    stated: bool = True
    unknown: str = ""

    @property
    def text(self) -> str:
        if self.mode != "selective":
            return f"{self.mode} {self.budget:g}" if self.mode == "memory_budget" else self.mode
        return "selective per operation" if self.every is None else f"selective, every layer of {self.every}"


def of_options(options: Mapping[str, Any], mode: Any, default: str, position: Position) -> Recomputation:
    """From the options of a section or of a class. ``default``: of ``selective_ac_option``. Raises InputError for what is none."""
    if mode not in MODES:
        raise InputError(f"{position}: '{MODE}' of '{FIELD}' is one of {', '.join(MODES)}; found {mode!r}.")
    forced = next((options[name] for name in FORCED if name in options), ROUTER)
    if mode == "selective" and forced not in (ROUTER, []):
        raise InputError(
            f"{position}: products that are forced to be computed again are those of the router, {ROUTER}, or none; found {forced!r}. "
            f"Which others have their shape is known to the program alone. Leave the option out."
        )
    option, budget = options.get(OPTION, default), options.get(BUDGET, 0.5)
    if option != PER_OPERATION and not (str(option).isdecimal() and 1 <= int(option) <= 1 << 20):
        raise InputError(
            f"{position}: '{OPTION}' is '{PER_OPERATION}' or the number of a layer, as '2'; found {option!r}."
        )
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
        raise InputError(f"{position}: '{BUDGET}' is a number from 0 to 1; found {budget!r}.")
    every = None if option == PER_OPERATION or mode != "selective" else int(option)
    return Recomputation(mode=mode, every=every, budget=float(budget), position=position)


def policy_of(found: Recomputation, table: ModelTable, ep: int, *, stay: bool) -> str:
    """The policy of recomputation. ``ep``: ranks that share the experts. ``stay``: weights stay gathered to the backward pass."""
    all_kept = Part(base="none", recompute=() if stay else (WEIGHTS,))
    if found.mode == "full" or (found.mode == "memory_budget" and not found.budget):
        return BASES[0]
    if found.mode != "selective":
        return all_kept.text
    if found.every is None:
        return per_operation(table, ep)
    if found.every > table.num_layers:
        return all_kept.text
    if found.every == 1:
        return BASES[0]
    return f"full@{found.every - 1}::{found.every}+{all_kept.text}"


def per_operation(table: ModelTable, ep: int) -> str:
    """The policy of ``selective`` per operation for a model.

    >>> from shardwright.models import build
    >>> per_operation(build("llama3-8b"), ep=1)
    'keep=attention.queries,attention.values,attention.attended,mlp.gate'
    """
    parts = {stack: Part(keep=tuple(_kept(table, stack, ep))) for stack, _, _ in stacks_of(table)}
    *before, last = parts.items()
    named = [f"{part.text}@{stack}" for stack, part in before if part != last[1]]
    return "+".join([*named, last[1].text])


def _kept(table: ModelTable, stack: str, ep: int) -> Iterator[str]:
    batched = {weight.name_in_layer for weight in table.weights if "experts" in weight.logical_axes}
    number, before = 0, ()
    last = {weight.name_in_layer for weight in table.weights if weight.ends_layer}
    for one in operations_of(table, stack):
        of_tokens = one.weights and not batched & set(one.weights)
        # Keys and values that one product makes count once.
        number += bool(of_tokens and one.weights != before and not one.output.startswith("router."))
        before = one.weights or before
        kept = of_tokens and number % 2 and not one.output.startswith("router.")
        sent = ep > 1 and one.output in ("moe.dispatched", "router.returned")
        if (kept or sent or one.output == "attention.attended") and not last & set(one.weights):
            yield one.output


def findings_of(found: Recomputation, policy: str, table: ModelTable, *, in_stages: bool) -> Iterator[Finding]:
    """What the policy does not say of TorchTitan's. ``in_stages``: the plan has a pipeline."""
    if in_stages and policy not in BASES:
        yield _said(
            found,
            f"'{policy}' beside stages, which the PyTorch engine does not run yet: planned with '{BASES[0]}'",
            f"nothing; {', '.join(BASES)} are run in stages",
        )
    if found.unknown:
        yield _said(
            found,
            f"'{FIELD}' is not known without running the program: {found.unknown}; planned with '{policy}'",
            "a policy that is written in the file, as FullAC.Config()",
        )
    elif found.mode == "memory_budget" and 0 < found.budget < 1:
        yield _said(
            found,
            f"a memory budget of {found.budget:g}: its compiler decides what layers keep; planned with '{policy}', all of it",
            "a policy by layers or operations, or a budget of 0 or 1",
        )
    elif found.mode == "selective" and found.every is None:
        last = [one.output for stack, _, _ in stacks_of(table) for one in operations_of(table, stack) if one.weights][
            -1
        ]
        yield _said(
            found,
            f"'selective' keeps every second product of a layer, here '{policy}'; beside these it holds what has no part in this policy: "
            f"choices of experts, results of reduce-scatters, and '{last}', which no backward pass reads, where its number is odd",
            "nothing; the plan's memory is without these",
        )


def _said(found: Recomputation, what: str, needed: str) -> Finding:
    return Finding(
        code="SW123", severity="info", where=f"'{FIELD}'", position=found.position, found=what, needed=needed
    )


def class_for(remat: str, table: ModelTable, ep: int, *, stay: bool) -> str | None:
    """The class that keeps what a policy keeps; None for ``None``, which keeps all. Raises InputError where TorchTitan cannot say it."""
    selective = per_operation(table, ep)
    known = {
        BASES[0]: "FullAC",
        selective: "SelectiveAC",
        Part(base="none", recompute=() if stay else (WEIGHTS,)).text: None,
    }
    same = [name for policy, name in known.items() if same_policy(table, policy, remat)]
    if not same:
        others = " or ".join(f"'{policy}'" for policy in known)
        raise InputError(
            f"--remat is '{remat}', and TorchTitan has policies for all layers: full, none, and selective per operation. "
            f"Give {others}."
        )
    return same[0]


def same_policy(table: ModelTable, one: str, other: str) -> bool:
    """Whether all layers keep the same under both."""
    return _runs(table, one) == _runs(table, other)


def _runs(table: ModelTable, policy: str) -> Sequence[object]:
    # Of two runs that keep the same, the names that nothing reads may differ.
    return [
        (run.stack, run.layers, run.saved, run.hosted, run.again, run.gathers_again) for run in runs_of(table, policy)
    ]
