"""Policies of recomputation that a search tries: few, from all kept to all recomputed, by what the operations of the model's layers are."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.model.table import ModelTable
from shardwright.core.policies.policy import INPUT, WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPolicy:
    """A policy as ``--remat`` gives it. ``less``: those of the others that recompute less, and nothing that it does not: where one of them fits
    in as few microbatches, this one is no faster. ``in_stages``: every engine runs it in stages."""

    text: str
    less: tuple[str, ...] = ()
    in_stages: bool = True


def policies_of(table: ModelTable, *, to_host: bool) -> tuple[TriedPolicy, ...]:
    """The policies for a model, those that keep the most first, the smallest last. ``to_host``: the chip's link to the memory of its host is
    known."""
    between = [operation.output for operation in table.operations if not operation.weights and operation.reads]
    attended = [operation.output for operation in table.operations if operation.output in operation.reads]
    products: dict[str, list[str]] = {}
    for operation in table.operations:
        if operation.weights:
            products.setdefault(operation.output.partition(".")[0], []).append(operation.output)
    kept, elementwise, weights = "none", f"none,recompute={','.join(between)}", f"none,recompute={WEIGHTS}"
    of_layers = ("full@::4+none", "full@::2+none", "none@::4+full")
    tried = [
        TriedPolicy(text=kept),
        *([TriedPolicy(text=elementwise, less=(kept,))] if between else []),
        TriedPolicy(text=weights, less=(kept,), in_stages=False),
        *(
            TriedPolicy(text=text, less=(kept, *of_layers[:place]), in_stages=False)
            for place, text in enumerate(of_layers)
        ),
    ]
    more = (kept, elementwise, weights)
    tried.append(TriedPolicy(text="dots", less=more))
    more = (*more, "dots")
    # Attention comes first, whose products are the smaller part.
    some = [f"dots,recompute={','.join(names)}" for names in list(products.values())[1:] if len(names) > 1]
    tried += [TriedPolicy(text=text, less=more) for text in some]
    if attended:
        tried.append(TriedPolicy(text=f"keep={','.join(attended)}", less=more))
        more = (*more, f"keep={','.join(attended)}")
    tried.append(TriedPolicy(text="full", less=(*more, *some, *of_layers)))
    if to_host:
        tried.append(TriedPolicy(text=f"host={INPUT}", less=(*more, *some, *of_layers, "full"), in_stages=False))
    return tuple(tried)
