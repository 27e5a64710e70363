"""Compile small programs for several targets and keep their texts: `python -m tests.compiled.make_texts [TARGET|PROGRAM ...]`.

Needs the extras `tpu` and `gpu-compile`. The texts are shortened: of what a compiler configures stays what is read, and
constants of kernels go. What each program moves is worked out by hand in the tests.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.cost.hardware.machine import read_machine

FOLDER = Path(__file__).parent / "texts"

_KEPT = re.compile(
    r'"(?:known_trip_count|known_init_step|known_induction_variable|async_collective_fusion_config)":\{[^{}]*(?:\{[^{}]*\})?[^{}]*\}'
    r'|"collective_backend_config":\{"is_sync":\w+'
    r'|"lhs_contracting_dimensions":\[[^\]]*\]'
)


def trimmed(text: str) -> str:
    """A program's text without the parts that nothing reads."""
    text = text.replace(f"{Path(__file__).parent.parent.parent}/", "/home/somebody/")
    head, _, rest = text.partition("\n")
    partitions = re.search(r"num_partitions=\d+", head)
    lines = [f"HloModule {re.split('[ ,]', head)[1]}, is_scheduled=true, {partitions[0] if partitions else ''}"]
    for line in rest.split("\n"):
        before, found, config = line.partition(", backend_config={")
        kept = ",".join(f"{part}}}" if part.count("{") > part.count("}") else part for part in _KEPT.findall(config))
        before = re.sub(r' scheduling_name="[^"]*"|scheduling_name="[^"]*" ?', "", before)
        before = re.sub(r", metadata=\{\}|, frontend_attributes=\{(?:fingerprint|trivially)[^}]*\}", "", before)
        lines.append(f"{before}, backend_config={{{kept}}}" if found and kept else before)
    return "\n".join(lines)


def every_kind(mesh: Any) -> Any:
    """One collective of each kind, on 32,768 rows of 1,024 and a matrix of 1,024 x 2,048 that all devices share."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec as P

    def local(x_RM, w_MF):
        with jax.named_scope("component=moe"):
            y_RM = jnp.tanh(lax.all_to_all(x_RM, "expert", 0, 0, tiled=True)) * 2
            y_RM = lax.ppermute(y_RM, "expert", [(i, (i + 1) % 4) for i in range(4)]) + y_RM
            with jax.named_scope("tensor=layers.moe.up"):
                whole_MF = lax.all_gather(w_MF, ("fsdp", "expert"), tiled=True)
            z_RF = lax.psum_scatter(y_RM @ whole_MF, "fsdp", tiled=True)
            return z_RF, lax.psum(z_RF.astype(jnp.float32).sum(), ("fsdp", "expert"))

    both = P(("fsdp", "expert"))
    step = jax.shard_map(local, mesh=mesh, in_specs=(both, both), out_specs=(both, P()), check_vma=False)
    return jax.jit(step).lower(array(mesh, both, 32768, 1024), array(mesh, both, 1024, 2048))


def layers(mesh: Any) -> Any:
    """Three recomputed layers: two matrices each, gathered for use, their gradients reduce-scattered."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec as P

    def used(name: str) -> Callable[[jax.Array], jax.Array]:
        def forward(w_MF):
            with jax.named_scope(f"tensor=layers.mlp.{name}"):
                return lax.all_gather(w_MF, "fsdp", tiled=True), None

        def backward(_, d_MF):
            with jax.named_scope(f"tensor=layers.mlp.{name}"):
                return (lax.psum_scatter(d_MF, "fsdp", tiled=True),)

        gathered = jax.custom_vjp(lambda w_MF: forward(w_MF)[0])
        gathered.defvjp(forward, backward)
        return gathered

    def layer(h_BLM, weights):
        up_MF, down_FM = weights
        with jax.named_scope("component=mlp"):
            y_BLM = jnp.tanh(h_BLM @ used("up")(up_MF)) @ used("down")(down_FM)
            with jax.named_scope("tensor=mlp.out"):
                return h_BLM + lax.psum(y_BLM, "tensor"), None

    def local(weights, h_BLM):
        def loss(weights):
            return (lax.scan(jax.checkpoint(layer), h_BLM, weights)[0].astype(jnp.float32) ** 2).sum()

        value, gradients = jax.value_and_grad(loss)(weights)
        with jax.named_scope("component=loss"):
            value = lax.psum(value, ("fsdp", "tensor"))
        return value, jax.tree.map(lambda w, g: w - g.astype(w.dtype), weights, gradients)

    specs, rows = (P(None, "fsdp", "tensor"), P(None, ("tensor", "fsdp"))), P("fsdp")
    step = jax.shard_map(local, mesh=mesh, in_specs=(specs, rows), out_specs=(P(), specs), check_vma=False)
    weights = (array(mesh, specs[0], 3, 512, 1024), array(mesh, specs[1], 3, 1024, 512))
    return jax.jit(step, donate_argnums=0).lower(weights, array(mesh, rows, 16, 256, 512))


def ragged(mesh: Any) -> Any:
    """As many rows as there are for each of four devices, of buffers of 512 and 640 rows of 256."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec as P

    def local(x_RM, out_SM):
        with jax.named_scope("component=moe"):
            sizes = jnp.full((4,), 128, jnp.int32)
            there = jnp.full((4,), 128, jnp.int32) * lax.axis_index("expert").astype(jnp.int32)
            starts = jnp.arange(4, dtype=jnp.int32) * 128
            return lax.ragged_all_to_all(x_RM * 2, out_SM, starts, sizes, there, sizes, axis_name="expert")

    both = P(("fsdp", "expert"))
    step = jax.shard_map(local, mesh=mesh, in_specs=(both, both), out_specs=both, check_vma=False)
    return jax.jit(step).lower(array(mesh, both, 8 * 512, 256), array(mesh, both, 8 * 640, 256))


def windowed(mesh: Any) -> Any:
    """Rows times a matrix of 1,024 x 4,096 of which each device has an eighth of the rows; partitioned by XLA."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    rows = P("fsdp")
    step = jax.jit(lambda w_MF, x_BLM: jnp.einsum("blm,mf->blf", x_BLM, w_MF), out_shardings=NamedSharding(mesh, rows))
    return step.lower(array(mesh, rows, 1024, 4096), array(mesh, rows, 16, 1024, 1024))


def partitioned(mesh: Any) -> Any:
    """The gradient of two layers of two matrices, fsdp 4 x tensor 2, with all collectives by XLA."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def layer(h_BLM, weights):
        up_MF, down_FM = weights
        with jax.named_scope("component=mlp"):
            y_BLM = jnp.tanh(h_BLM @ up_MF) @ down_FM
            return h_BLM + lax.with_sharding_constraint(y_BLM, NamedSharding(mesh, P("fsdp"))), None

    def step(weights, h_BLM):
        return jax.grad(lambda w: (lax.scan(layer, h_BLM, w)[0].astype(jnp.float32) ** 2).sum())(weights)

    specs = (P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp"))
    weights = (array(mesh, specs[0], 2, 512, 1024), array(mesh, specs[1], 2, 1024, 512))
    out = tuple(NamedSharding(mesh, spec) for spec in specs)
    return jax.jit(step, out_shardings=out).lower(weights, array(mesh, P("fsdp"), 16, 256, 512))


def kernel(mesh: Any) -> Any:
    """Three iterations of an attention kernel, each with a gather before it and an all-to-all after it."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.sharding import PartitionSpec as P

    mask = masks.MultiHeadMask([masks.CausalMask((1024, 1024))] * 4)
    attend = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1)

    def layer(q_BHSD, w_DD):
        with jax.named_scope("component=attention"):
            y_BHSD = q_BHSD @ lax.all_gather(w_DD, "fsdp", tiled=True)
            return lax.all_to_all(jax.vmap(attend)(y_BHSD, y_BHSD, y_BHSD), "fsdp", 0, 0, tiled=True), None

    def local(q_BHSD, w_LDD):
        return jax.grad(lambda w: (lax.scan(layer, q_BHSD, w)[0].astype(jnp.float32) ** 2).sum())(w_LDD)

    rows, weights = P("fsdp"), P(None, "fsdp")
    step = jax.shard_map(local, mesh=mesh, in_specs=(rows, weights), out_specs=weights, check_vma=False)
    return jax.jit(step).lower(array(mesh, rows, 64, 4, 1024, 128), array(mesh, weights, 3, 128, 128))


def slices(mesh: Any) -> Any:
    """The gradient of one matrix that the devices of a slice share, summed over two slices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def gradient(w_MF, x_RM):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x_RM @ w).astype(jnp.float32) ** 2))(w_MF)

    spec = P("fsdp")
    step = jax.jit(gradient, out_shardings=NamedSharding(mesh, spec))
    return step.lower(array(mesh, spec, 1024, 1024), array(mesh, P(("data", "fsdp")), 4096, 1024))


def codes(mesh: Any) -> Any:
    """Products of 4,096 rows of 1,024 codes a device with those of two matrices of 2,048 outputs: of the first with scales of rows,
    of the second with scales of blocks of 32, and of the values of the first's."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from shardwright.engine_jax.precision.kernels import Rows, multiplied

    def local(x_RK, scales_RN, w_OK, scales_ON):
        with jax.named_scope("component=mlp"):
            after_R1, after_O1 = (jnp.sum(one.astype(jnp.float32), 1, keepdims=True) for one in (scales_RN, scales_ON))
            rows, blocks = (
                (Rows(x_RK, None, after_R1), Rows(w_OK, None, after_O1)),
                (Rows(x_RK, scales_RN, None), Rows(w_OK, scales_ON, None)),
            )
            with jax.named_scope("tensor=layers.mlp.gate"):
                gate = multiplied("fp8", *rows)
            with jax.named_scope("tensor=layers.mlp.up"):
                up = multiplied("mx", *blocks)
            with jax.named_scope("tensor=layers.mlp.down"):
                down = multiplied("bfloat16", *(one._replace(codes=one.codes.astype(jnp.bfloat16)) for one in rows))
            return gate + up + down

    def argument(spec: P, dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    specs = (P("fsdp"), P("fsdp"), P(), P())
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("fsdp"), check_vma=False)
    e4m3, e8m0 = "float8_e4m3fn", "float8_e8m0fnu"
    shapes = ((e4m3, 32768, 1024), (e8m0, 32768, 32), (e4m3, 2048, 1024), (e8m0, 2048, 32))
    return jax.jit(step).lower(*(argument(spec, *shape) for spec, shape in zip(specs, shapes, strict=True)))


def array(mesh: Any, spec: Any, *shape: int) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


EXPERTS, TENSOR = {"fsdp": 2, "expert": 4}, {"fsdp": 4, "tensor": 2}
PROGRAMS: Mapping[str, tuple[Callable[[Any], Any], Mapping[str, int], tuple[str, ...]]] = {
    "every_kind": (every_kind, EXPERTS, ("cpu:8", "v5p:2x2x2", "tpu7x:2x2x1", "h100:1x8")),
    "layers": (layers, TENSOR, ("cpu:8", "v5e:2x4", "h100:1x8")),
    "ragged": (ragged, EXPERTS, ("v5p:2x2x2", "h100:1x8")),
    "windowed": (windowed, {"fsdp": 8}, ("v5e:2x4",)),
    "partitioned": (partitioned, TENSOR, ("h100:1x8",)),
    "codes": (codes, {"fsdp": 8}, ("h100:1x8", "b200:1x8")),
    "kernel": (kernel, {"fsdp": 8}, ("v5p:2x2x2",)),
    "slices": (slices, {"data": 2, "fsdp": 8}, ("v5p:2x2x2*2", "v5e:2x4*2")),
}
"""Each program with its mesh and its targets."""


def main(targets: list[str]) -> None:
    os.environ.update(
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_LOG_DIR="disabled",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    from shardwright.core.mesh.mesh import Mesh
    from shardwright.engine_jax.compile.target import target_mesh

    FOLDER.mkdir(exist_ok=True)
    for name, (program, sizes, its_targets) in PROGRAMS.items():
        for target in its_targets:
            if not targets or target in targets or name in targets:
                mesh = target_mesh(Mesh.of(**sizes), read_machine(target))
                path = FOLDER / f"{name}.{target.split(':')[0]}.txt"
                path.write_text(trimmed(program(mesh).compile().as_text()), encoding="utf-8")
                print(path.name, path.stat().st_size, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
