"""SW111 for keys that MaxText does not know: it ends with an error. SW123 for those that change a step and that no plan carries over."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.nearest import nearest
from shardwright.core.layout.faults import shown
from shardwright.core.layout.wording import either
from shardwright.core.mesh.mesh import Mesh
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.reading.known_keys import KNOWN_KEYS, REMOVED
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.reading import SIZE_KEY
from shardwright.interop.maxtext.reading.sizes import size_key
from shardwright.interop.maxtext.reading.step_keys import LOSS_KEYS, OPTIONS, STEP_KEYS
from shardwright.interop.maxtext.reading.vocabulary import ALWAYS_ONE, AXES, FILLS
from shardwright.interop.maxtext.resolution.placement import Imported

RING = "use_ring_of_experts"
STRATEGY = "context_parallel_strategy"
STRATEGIES = ("all_gather", "ring", "ulysses", "usp")
CARRIED_OVER = STRATEGIES[:3]
ATTENTION_TYPE = "attention_type"


def keys_unknown(imported: Imported) -> Iterator[Drafted]:
    """Keys of a file or of the command line that MaxText refuses."""
    yield from (Draft(finding=finding) for finding in unknown_keys(imported.configuration))


def steps_otherwise(imported: Imported) -> Iterator[Drafted]:
    """Keys that are not at the value at which they change nothing."""
    yield from (Draft(finding=finding) for finding in changed_steps(imported.configuration, imported.mesh))


def unknown_keys(configuration: Configuration) -> Iterator[Finding]:
    sizes = [size_key(link, axis) for axis in AXES if axis not in ALWAYS_ONE for link in FILLS]
    for key, place in configuration.not_read.items():
        word = key.partition(".")[0]
        if word in KNOWN_KEYS or SIZE_KEY.fullmatch(word):
            continue
        removed = REMOVED.get(word)
        near = nearest(word, [*KNOWN_KEYS, *sizes])
        yield Finding(
            code="SW111",
            severity="error",
            where=f"'{key}'",
            position=place,
            found="a key that MaxText does not have: it ends with an error" if removed is None else removed,
            needed=f"'{near}', or another of its keys" if near and removed is None else "a key of MaxText's",
            fix=f"Write '{near}'." if near and removed is None else f"Take '{key}' out.",
        )


def changed_steps(configuration: Configuration, mesh: Mesh) -> Iterator[Finding]:
    for key, (_, harmless, effect) in STEP_KEYS.items():
        scalar = configuration.settings.get(key)
        if scalar is None or scalar.value in harmless:
            continue
        scope = "it changes the training, and no placement, byte or second of this plan"
        if key not in LOSS_KEYS:
            scope = "the plan is without it" + (f"; 'plan' has {OPTIONS[key]}" if key in OPTIONS else "")
        yield _otherwise(
            configuration, key, effect, f"{shown(harmless[0]) if harmless[0] != '' else 'no value'}: {scope}"
        )
    kind = configuration.value_of(ATTENTION_TYPE)
    if kind not in (None, "global", "mla"):
        yield _otherwise(configuration, ATTENTION_TYPE, "another attention than causal attention", "'global' or 'mla'")
    strategy = configuration.value_of(STRATEGY)
    if strategy is not None and str(strategy).lower() not in CARRIED_OVER:
        known = str(strategy).lower() in STRATEGIES
        effect = "keys and values that move in another way" if known else "a strategy that MaxText does not have"
        yield _otherwise(configuration, STRATEGY, effect, f"{either(CARRIED_OVER)}: the plan gathers keys and values")
    if configuration.value_of(RING) is True and mesh.shape.get("expert", 1) == 1:
        place = configuration.settings[RING].position
        yield Finding(
            code="SW111",
            severity="error",
            where=f"'{RING}'",
            position=place,
            found="true on a mesh without experts' axis: MaxText ends with an error",
            needed="an 'expert' axis above 1",
            fix=f"Take '{RING}' out.",
        )


def _otherwise(configuration: Configuration, key: str, effect: str, needed: str) -> Finding:
    scalar = configuration.settings[key]
    return Finding(
        code="SW123",
        severity="warning",
        where=f"'{key}'",
        position=scalar.position,
        found=f"{shown(scalar.value)}: {effect}, which is not carried over",
        needed=needed,
    )
