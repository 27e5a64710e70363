"""What rules say of the weights of a decoder that no table of ours has: by their logical names, without sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import DimSpec
from shardwright.interop.maxtext.checks.keys import changed_steps, unknown_keys
from shardwright.interop.maxtext.planning import devices_of_slice, slices_of
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.sizes import Devices, sized
from shardwright.interop.maxtext.resolution.annotations import WEIGHTS
from shardwright.interop.maxtext.resolution.flax_resolution import resolve
from shardwright.interop.maxtext.resolution.placement import larger
from shardwright.interop.maxtext.sources import MaxTextRequest, NoTableError

LATENT = ("q_down", "q_norm", "q_up", "kv_down", "kv_norm", "kv_up")
OF_EXPERTS = ("shared", "router", "moe")
LIKE = "llama3-8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesAlone:
    """The mesh, the spec of each kind of weight in MaxText's names, and findings, of which the first says why there is no table."""

    configuration: Configuration
    mesh: Mesh
    specs: Mapping[str, str]
    findings: tuple[Finding, ...]
    chosen: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        return {
            "sources": list(self.configuration.sources),
            "model": None,
            "mesh": dict(self.mesh.shape),
            "chosen": dict(self.chosen),
            "not_read": list(self.configuration.not_read),
            "weights_by_name": dict(self.specs),
            "layout": None,
            "findings": [finding.to_json() for finding in self.findings],
        }


def rules_alone(request: MaxTextRequest, configuration: Configuration, why: NoTableError) -> RulesAlone:
    """Resolve the names of the weights that decoders of this kind have. Raises FindingsError (SW106) for sizes that give no mesh."""
    slices = slices_of(configuration) if request.slices is None else request.slices
    of_slice = devices_of_slice(configuration)
    num = of_slice * slices if request.devices is None and of_slice is not None else request.devices
    sizing = sized(configuration, Devices(num=num, slices=slices, sizes=request.mesh_sizes))
    reason = Finding(
        code="SW123",
        severity="error",
        where="the model of these rules",
        position=why.position,
        found=why.reason,
        needed="a table with these weights; without one there are no sizes, no activations and no layout",
        fix=f"Give --like {LIKE}, or another model: its tensors are then resolved in place of these.",
    )
    return RulesAlone(
        configuration=configuration,
        mesh=sizing.mesh,
        specs=dict(_specs(configuration, sizing.mesh)),
        findings=worst_first(
            (reason, *sizing.findings, *unknown_keys(configuration), *changed_steps(configuration, sizing.mesh))
        ),
        chosen=sizing.chosen,
    )


def _specs(configuration: Configuration, mesh: Mesh) -> Iterator[tuple[str, str]]:
    latent = configuration.value_of("attention_type") == "mla"
    experts = int(configuration.value_of("num_experts") or 1) > 1
    for weight, names in WEIGHTS.items():
        component, _, name = weight.partition(".")
        if (name in LATENT and not latent) or (component in OF_EXPERTS and not experts):
            continue
        outside = component in ("embedding", "logits") or name == "final_norm"
        of_layers = names if outside else ("layers", *names)
        axes = resolve(of_layers, configuration.rules).axes
        yield (
            weight,
            " ".join(str(DimSpec(word or "_", larger(of, mesh))) for word, of in zip(of_layers, axes, strict=True)),
        )
