"""Handmade programs in which a compiler did not do what was requested, each for a plan for eight chips."""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiled.agreement.widths import width
from shardwright.compiled.reading.program import CompiledCollective, CompiledProduct, CompiledProgram, Temporary, Tool
from shardwright.core.plan.plan import Phase, Plan
from shardwright.cost.steps.flops import step_flops
from tests.compiled.programs import as_planned, changed, remembered, where, with_more

V5P = "v5p:2x2x2"
EXPERTS = ("layers.moe.gate", "layers.moe.up", "layers.moe.down")
SOURCE = "shardwright/engine_jax/experts/experts.py:128"


def planned(plan: Plan) -> CompiledProgram:
    return as_planned(plan, V5P)


def weights_gathered(plan: Plan) -> CompiledProgram:
    """As in batch-major dispatch: every expert's weights are gathered on every device, and their gradients are all-reduced."""
    program = changed(planned(plan), where({"kind": "all-to-all"}, lambda _: None))
    return with_more(program, [one for name in EXPERTS for one in _whole(plan, name)])


def _whole(plan: Plan, name: str) -> list[CompiledCollective]:
    weight = plan.by_name[name]
    gather = CompiledCollective(
        kind="all-gather",
        axes=("expert",),
        bytes_per_device=weight.bytes_per_device * 8,
        count_per_step=2 * weight.num,
        dtypes=("bfloat16",),
        component="moe",
        tensors=(name,),
        source=SOURCE,
        in_loop=True,
    )
    return [gather, replace(gather, kind="all-reduce", count_per_step=weight.num, phase="backward")]


def tokens_gathered(plan: Plan) -> CompiledProgram:
    """All tokens of the group are gathered on each of its devices, and the experts' outputs are reduce-scattered."""

    def gathered(one: CompiledCollective) -> CompiledCollective:
        kind = "all-gather" if "router.dispatched" in one.tensors else "reduce-scatter"
        return replace(one, kind=kind, bytes_per_device=2 * one.bytes_per_device, ragged=False, source=SOURCE)

    return changed(planned(plan), where({"kind": "all-to-all"}, gathered))


def tokens_exchanged(plan: Plan) -> CompiledProgram:
    program = changed(planned(plan), where({"component": "moe", "axes": ("expert",)}, lambda _: None))
    exchange = CompiledCollective(
        kind="all-to-all",
        axes=("expert",),
        bytes_per_device=plan.by_name["router.grouped"].bytes_per_device * 2,
        count_per_step=6 * 32,
        dtypes=("bfloat16",),
        component="moe",
        tensors=("router.grouped",),
        source=SOURCE,
    )
    return with_more(program, [exchange])


def gathered_again(plan: Plan) -> CompiledProgram:
    """The feed-forward weights are gathered once more in each layer."""
    wanted = {"component": "mlp", "kind": "all-gather", "phase": "recompute"}
    return changed(planned(plan), where(wanted, lambda one: replace(one, count_per_step=2 * one.count_per_step)))


def without_replica_sums(plan: Plan) -> CompiledProgram:
    return changed(planned(plan), where({"kind": "all-reduce", "component": "attention"}, lambda _: None))


def replicas_in_the_loop(plan: Plan) -> CompiledProgram:
    def in_each(one: CompiledCollective) -> CompiledCollective:
        return replace(one, count_per_step=4 * one.count_per_step, in_loop=True, phase="backward")

    return changed(planned(plan), where({"kind": "all-reduce", "component": "mlp"}, in_each))


def same_in_each_iteration(plan: Plan) -> CompiledProgram:
    wanted = {"kind": "all-gather", "component": "logits"}
    return changed(planned(plan), where(wanted, lambda one: replace(one, in_loop=True, loop_invariant=True)))


def gathered_and_sliced(plan: Plan) -> CompiledProgram:
    """The residual stream of all devices is gathered, and each device slices its shard."""
    stream = plan.by_name["residual.stream"]
    gather = CompiledCollective(
        kind="all-gather",
        axes=("fsdp",),
        bytes_per_device=stream.bytes_per_device * 8,
        count_per_step=2 * stream.num,
        dtypes=("bfloat16",),
        component="residual",
        tensors=("residual.stream",),
        source="shardwright/engine_jax/model/forward.py:64",
        users=("dynamic-slice",),
    )
    return with_more(planned(plan), [gather])


def reported_as_replicated(plan: Plan) -> CompiledProgram:
    line = (
        "Involuntary full rematerialization. The compiler cannot go from sharding {devices=[8,1]<=[8]} to "
        "{devices=[1,8]<=[8]} efficiently for HLO operation %add.7"
    )
    return replace(planned(plan), notes=(line,))


def keys_gathered(plan: Plan) -> CompiledProgram:
    """Keys and values of all tokens are gathered, where the latent that they are computed from would suffice."""
    latent = plan.by_name["attention.latent_attended"]
    keys = plan.by_name["attention.keys_attended"]

    def expanded(one: CompiledCollective) -> CompiledCollective:
        return replace(
            one,
            bytes_per_device=keys.bytes_per_device,
            tensors=(keys.name,),
            made_from_bytes=latent.bytes_per_device // 8,
            source="shardwright/engine_jax/attention/attend.py:88",
        )

    wanted = {"component": "attention", "kind": "all-gather", "tensors": ("attention.latent_attended",)}
    return changed(planned(plan), where(wanted, expanded))


def keys_gathered_unnamed(plan: Plan) -> CompiledProgram:
    """The same from a reader that does not know which values are computed from which."""
    return changed(keys_gathered(plan), lambda one: replace(one, made_from_bytes=None))


def all_reduced(plan: Plan) -> CompiledProgram:
    def whole(one: CompiledCollective) -> CompiledCollective:
        return replace(one, kind="all-reduce", users=("dynamic-slice",))

    return changed(planned(plan), where({"kind": "reduce-scatter", "component": "mlp"}, whole))


def repeated_products(plan: Plan) -> CompiledProgram:
    """Attention is computed on every device of an axis that should shard it."""
    work: dict[str, int] = {}
    for (component, _), flops in step_flops(plan).items():
        work[component] = work.get(component, 0) + int(flops)
    work["attention"] *= 8
    return replace(planned(plan), flops_per_device=sum(work.values()), component_flops=work)


def with_products(plan: Plan, dtype: str) -> CompiledProgram:
    """The products with the feed-forward weights multiply this dtype; all others codes."""
    phases: tuple[Phase, ...] = ("forward", "recompute", "backward")
    found = [
        CompiledProduct(
            component=weight.component,
            phase=phase,
            tensors=(weight.name,),
            dtypes=(dtype, dtype) if weight.component == "mlp" else ("float8_e4m3fn", "float8_e4m3fn"),
            source="shardwright/engine_jax/precision/kernels.py:88",
            num_ops=2 if phase == "backward" else 1,
        )
        for weight in plan.quantized
        for phase in phases
    ]
    return replace(planned(plan), target="h100:1x8", products=tuple(found))


def dequantized(plan: Plan) -> CompiledProgram:
    """A compiler multiplies codes and scales before the product, as XLA does of block scales for an H100."""
    return with_products(plan, "float32")


def of_codes(plan: Plan) -> CompiledProgram:
    return with_products(plan, "float8_e4m3fn")


def as_many_products(plan: Plan) -> CompiledProgram:
    return replace(planned(plan), flops_per_device=int(sum(step_flops(plan).values()) * 1.05))


def wider(plan: Plan) -> CompiledProgram:
    """Weights are cast where they are used, not before they are gathered."""

    def wide(one: CompiledCollective) -> CompiledCollective:
        factor = 4 // width(one.dtypes[0])
        return replace(one, dtypes=("float32",), bytes_per_device=factor * one.bytes_per_device)

    return changed(planned(plan), where({"kind": "all-gather", "component": "mlp"}, wide))


def waited_for(plan: Plan) -> CompiledProgram:
    return changed(planned(plan), lambda one: replace(one, overlapped=one.component != "mlp"))


def hidden(plan: Plan) -> CompiledProgram:
    return changed(planned(plan), lambda one: replace(one, overlapped=True))


def not_donated(plan: Plan) -> CompiledProgram:
    return remembered(planned(plan), aliased_bytes=0)


def with_scores(plan: Plan) -> CompiledProgram:
    row = plan.by_name["logits.scores"]
    batch, length, vocabulary = row.shape
    scores = Temporary(
        bytes_per_device=row.bytes_per_device,
        dtype="float32",
        shape=(batch // 8, length, vocabulary),
        op="fusion",
        component="logits",
        phase="backward",
        source="shardwright/engine_jax/layers/loss.py:37",
    )
    return remembered(planned(plan), largest=(scores,), peak_bytes=24 << 30)


def with_a_layer(plan: Plan) -> CompiledProgram:
    layer = Temporary(bytes_per_device=1 << 30, dtype="bfloat16", shape=(32, 4096, 4096), op="copy", component="mlp")
    return remembered(planned(plan), largest=(layer,))


def too_large(plan: Plan) -> CompiledProgram:
    assert plan.request.chip is not None
    peak = plan.request.chip.usable_bytes + (20 << 30)
    held = plan.memory.weights_bytes + plan.memory.optimizer_bytes
    return remembered(planned(plan), peak_bytes=peak, temporaries_bytes=peak - held)


def newer_tool(plan: Plan) -> CompiledProgram:
    return replace(planned(plan), tools=(Tool(name="libtpu", version="0.0.51", wanted="0.0.42.*"),))


def wanted_tool(plan: Plan) -> CompiledProgram:
    return replace(planned(plan), tools=(Tool(name="libtpu", version="0.0.42.1", wanted="0.0.42.*"),))
