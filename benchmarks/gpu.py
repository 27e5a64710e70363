"""llama3-1b at length 4,096 in bfloat16 on one GPU: tokens a second, and the share of the chip's measured peak.

python -m benchmarks.gpu [--quick]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.cases import Case, ours, plan_of
from benchmarks.options import begin
from benchmarks.results import Found, keep
from benchmarks.timing import take_turns
from shardwright.cost.steps.flops import step_flops

AIM = 0.55
SIDE = 8192
"""Side of the square matrices whose product measures the peak: a larger one is not faster on an H100."""

CASES = tuple(
    Case(model="llama3-1b", layout="fsdp", mesh="fsdp=1", rows=rows, length=4096, dtype="bfloat16", remat=remat)
    for rows, remat in ((4, "dots"), (8, "dots"), (4, "full"), (8, "full"))
)


def fastest_s(go: Callable[[], object], times: int) -> float:
    """The fastest of some runs."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        go()
        taken.append(time.perf_counter() - started)
    return min(taken)


def peak_flops(times: int) -> float:
    """FLOP/s of a large bfloat16 product, 16 in sequence."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (SIDE, SIDE), jnp.bfloat16) for key in keys)

    @jax.jit
    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 16, lambda _, x: (x @ b) * jnp.bfloat16(0.01), a)

    products(a, b).block_until_ready()
    return 16 * 2 * SIDE**3 / fastest_s(lambda: products(a, b).block_until_ready(), times)


def main() -> None:
    """Time all cases, or say that there is no GPU."""
    options = begin(__doc__, devices=None)
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"no GPU: JAX sees {device.platform} ({device.device_kind}). Nothing was measured.")
        return
    peak = peak_flops(5 if options.quick else 20)
    print(f"{device.device_kind}: {peak / 1e12:.0f} TFLOP/s, a product of {SIDE:,} x {SIDE:,} in bfloat16", flush=True)
    rows, numbers = [], []
    for case in CASES[: 1 if options.quick else None]:
        work = step_flops(plan_of(case))
        useful = sum(flops for (_, phase), flops in work.items() if phase != "recompute")
        attention = useful_attention(case)
        try:
            step = ours(case)
            times = take_turns({"ours": step.go}, blocks=options.blocks(5), block_s=options.block_s(4.0))["ours"]
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            rows.append([str(case), *["does not fit"] * 4])
            continue
        share, causal = useful / times.wall / peak, (useful - attention / 2) / times.wall / peak
        rows.append(
            [str(case), f"{case.tokens / times.wall:,.0f}", f"{times.wall:.3f}", f"{share:.1%}", f"{causal:.1%}"]
        )
        numbers.append(
            {"case": str(case), "times": times.to_json(), "flops": useful, "share": share, "causal_share": causal}
        )
        print("  ".join(rows[-1]), flush=True)
        del step
    best = max((number["share"] for number in numbers), default=0.0)
    keep(
        Found(
            name="gpu",
            title="llama3-1b on one GPU",
            columns=["case", "tokens/s", "s/step", "of the measured peak", "counting the causal half"],
            rows=rows,
            headline=f"{best:.1%} of {peak / 1e12:.0f} TFLOP/s measured; the aim is {AIM:.0%}",
            notes=(
                f"Peak: a bfloat16 product of {SIDE:,} x {SIDE:,}, measured in the same run: {peak / 1e12:.0f} TFLOP/s.",
                "Work: products forward and twice backward, without what is recomputed; attention in full "
                "(PaLM, arXiv:2204.02311, appendix B), in the last column its causal half.",
            ),
            numbers={"peak_flops_per_s": peak, "cases": numbers},
        ),
        options.load_before,
        accelerator=device.device_kind,
    )


def useful_attention(case: Case) -> float:
    """FLOPs of attention scores and their product with values, forward and backward, for all pairs of tokens."""
    form = plan_of(case).request.table.architecture
    layers = sum(stack.num for stack in form.stacks)
    return 3 * layers * 4 * case.rows * case.length**2 * form.attention.heads * form.attention.head_dim


if __name__ == "__main__":
    main()
