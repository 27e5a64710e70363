"""SW125: the chunks of the loss over the tokens of a device; SW415: losses that are not computed in chunks."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import option
from shardwright.core.findings.codes import NOT_RUN
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count, either
from shardwright.core.mesh.divisors import divisors
from shardwright.core.plan.plan import Plan


def loss_chunks(plan: Plan) -> Iterator[Draft]:
    """Chunks that do not divide the tokens for which a device computes logits in a microbatch."""
    request, input_of = plan.request, plan.by_name.get(plan.request.table.names.logits_input)
    if request.loss_chunks == 1 or input_of is None:
        return
    spec, over = input_of.in_use, plan.mesh.size
    rows, rest = divmod(request.batch, request.microbatches * over(spec.axes_of("batch")))
    length, more = divmod(request.length, over(spec.axes_of("length")))
    tokens = rows * length
    # Rows and tokens that axes do not divide are findings of their own.
    if rest or more or not tokens or tokens % request.loss_chunks == 0:
        return
    below = max(number for number in divisors(tokens) if number < request.loss_chunks)
    above = next((number for number in divisors(tokens) if number > request.loss_chunks), None)
    legal = [number for number in (below, above) if number is not None]
    nearest = sorted(legal, key=lambda number: abs(number - request.loss_chunks))
    in_each = " of a microbatch" if request.microbatches > 1 else ""
    yield Draft(
        finding=Finding(
            code="SW125",
            severity="error",
            tensor=input_of.name,
            where="--loss-chunks",
            notation=str(spec),
            found=f"{count(request.loss_chunks, 'chunk')} of the {count(tokens, 'token')}{in_each} for which a device computes logits",
            needed=f"{either(legal)} chunks, which divide {tokens:,}",
        ),
        candidates=tuple(option("loss-chunks", number) for number in nearest),
    )


def without_chunks(plan: Plan) -> Iterator[Draft]:
    """SW415: the loss in chunks, where it is the user's own, and where its product is quantized: amaxes and blocks are of all tokens."""
    request = plan.request
    if request.loss_chunks == 1:
        return
    low = next(
        (one.name for one in plan.quantized if "logits" in (one.component, *request.table.weight(one.name).uses)), None
    )
    if request.table.owner != "ours":
        found = "which shardwright does not compute of your own program"
    elif low is not None:
        found = f"with {low} quantized, which the engine does not do yet"
    else:
        return
    finding = Finding(
        code=NOT_RUN,
        severity="error",
        where="--loss-chunks",
        found=f"a loss in {request.loss_chunks} chunks, {found}",
        needed="a loss of all tokens at one time" + ("" if low is None else ", or logits in high precision"),
    )
    yield Draft(finding=finding, candidates=(option("loss-chunks", 1),))
