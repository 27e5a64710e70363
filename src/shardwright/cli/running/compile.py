"""`shardwright compile`: compile the step with the target's real compiler, and compare the program with the plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from shardwright.cli.running.compile_torch import compile_by_dry_run
from shardwright.cli.running.compiled import Compiled
from shardwright.cli.typed.devices import simulate_devices
from shardwright.cli.typed.extras import needing_extra
from shardwright.cli.typed.model_file import with_named_model
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import TypedRequest, planned, requested
from shardwright.cli.typed.values import compiler_options
from shardwright.cli.typed.verbs import CompileVerb
from shardwright.compiled.agreement.agreement import agree
from shardwright.compiled.agreement.rewrites import family
from shardwright.compiled.findings import compiled_findings
from shardwright.compiled.findings.tools import wrong_version
from shardwright.compiled.out_of_memory import out_of_memory_findings
from shardwright.compiled.reading.tool_chain import is_wanted, pinned_tools
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.plan.gate import require_lowered
from shardwright.core.plan.plan import Plan
from shardwright.cost import read_machine
from shardwright.cost.advice import settling_on
from shardwright.cost.hardware.chips import CPU

WITHOUT_HARDWARE = {
    # No look for a metadata server, no machine-wide lock, and no log folder.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    # The compiler needs the host's type, though nothing runs on it.
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    # The CUDA plugin looks for a driver before it describes a GPU, unless JAX is set to use the CPU.
    "JAX_PLATFORMS": "cpu",
}


def run_compile(verb: CompileVerb) -> int:
    """Compile and compare. Returns 1 if the plan or the program has a finding of severity error."""
    prepare(verb.plan)
    verb = with_named_model(verb)
    typed = requested(verb.model, verb.layout, verb.plan)
    plan = planned(typed)
    on_torch = typed.request.engine == "torch"
    require_lowered(plan)
    try:
        if on_torch:
            if verb.xla:
                raise InputError("--xla: a dry run of PyTorch has no compiler. Leave --xla out, or give --engine jax.")
            compiled = compile_by_dry_run(plan, typed.machine, keep_text=verb.hlo)
        else:
            compiled = compile_plan(
                typed, plan, str(verb.plan.chips), keep_text=verb.hlo, options=compiler_options(verb.xla)
            )
    except FindingsError as refused:
        return _refused(verb, typed, plan, refused.findings)
    if verb.plan.json:
        write_json(compiled.to_json())
    else:
        from shardwright.report.compile.compile_view import compile_view

        view = compile_view(plan, compiled.program, compiled.agreement, compiled.findings, typed.chosen)
        write_view(view, sys.stdout)
    return 1 if any(finding.severity == "error" for finding in compiled.findings) else 0


def _refused(verb: CompileVerb, typed: TypedRequest, plan: Plan, findings: Sequence[Finding]) -> int:
    """Show the plan, and the findings for which the compiler refused it. Returns 1."""
    if verb.plan.json:
        shown = [finding.to_json() for finding in worst_first((*plan.findings, *findings))]
        nothing_compiled = {"target": verb.plan.chips, "compiled": None, "agreement": None}
        write_json({**plan.to_json(), "findings": shown, **nothing_compiled})
    else:
        from shardwright.report.plan.findings_view import findings_list
        from shardwright.report.plan.plan_view import plan_view

        write_view(plan_view(plan, typed.chosen), sys.stdout)
        write_view(lambda width: findings_list(findings, width), sys.stdout)
    return 1


def compile_plan(
    typed: TypedRequest,
    plan: Plan,
    target: str,
    keep_text: Path | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
) -> Compiled:
    """The plan's step compiled for its chips, which need not be present. ``options``: of the compiler.

    Raises InputError for what the user can fix, and FindingsError where the compiler reports that it does not fit.
    """
    machine = typed.machine
    if machine is None:
        raise InputError("compile needs a target: --chips v5p:4x4x4, h100:8x8, or cpu:8 for simulated devices.")
    if typed.request.engine == "torch":
        raise InputError(
            "--engine torch: nothing is compiled that could be locked. `shardwright compile` makes a dry run of its step."
        )
    if keep_text is not None and not keep_text.parent.is_dir():
        raise InputError(f"--hlo: cannot write {keep_text}: there is no folder {keep_text.parent}.")
    without_hardware(os.environ, jax_is_loaded="jax" in sys.modules)
    if machine.numbers is None:
        simulate_devices(machine.num_devices, os.environ, jax_is_loaded="jax" in sys.modules)
    from shardwright.report.compile.compile_progress import compile_progress

    tools = pinned_tools() if family(machine.numbers.kind if machine.numbers else CPU) == "tpu" else ()
    with needing_extra("jax", "compiling"):
        engine = import_module("shardwright.engine_jax.compile.compiling")
        cache = import_module("shardwright.engine_jax.compile.built_cache")
    from shardwright.compiled.reading.read import read

    with compile_progress() as doing:
        doing(f"lowering {plan.request.table.name} for {target}")
        lowered = engine.lower_step(plan, machine)
        doing(f"compiling {plan.request.table.name} for {target}")
        try:
            built = cache.cached(
                lowered, target, lambda: engine.build(lowered, machine, options), cache.default_folder(), options
            )
        except engine.DoesNotFitError as error:
            if findings := out_of_memory_findings(plan, error.text, settling_on(plan, machine)):
                raise FindingsError(findings) from None
            message = error.text.strip().splitlines()[0]
            raise InputError(f"the compiler of {target} refused the program: {message}") from None
        except engine.NoSuchOptionError as error:
            raise InputError(
                f"--xla: the compiler of {target} refuses its options: {error.text.strip().splitlines()[0]}"
            ) from None
        except engine.CannotBePrintedError as error:
            if findings := [wrong_version(tool) for tool in tools if not is_wanted(tool)]:
                raise FindingsError(findings) from None
            message = error.text.strip().splitlines()[0]
            raise InputError(f"the program that was compiled for {target} cannot be printed: {message}") from None
        doing("reading the program")
        if keep_text is not None:
            _write_text(built.text, keep_text)
        program = read(built.text, plan.mesh, target=target, stats=built.stats, compile_seconds=built.compile_seconds)
    program = replace(program, tools=tools, options={**cache.environment_options(), **options})
    agreement = agree(plan, program)
    findings = worst_first((*plan.findings, *compiled_findings(plan, program, agreement, settling_on(plan, machine))))
    return Compiled(plan=plan, program=program, agreement=agreement, findings=findings)


def prepare(options: PlanOptions) -> None:
    """Set the environment of a compiler before a plan is made whose optimizer is optax's: that loads JAX, which reads it once."""
    if options.chips is None or not (options.optimizer or "").startswith("optax:"):
        return
    machine = read_machine(options.chips)
    without_hardware(os.environ, jax_is_loaded="jax" in sys.modules)
    if machine.numbers is None:
        simulate_devices(machine.num_devices, os.environ, jax_is_loaded="jax" in sys.modules)


def without_hardware(environment: MutableMapping[str, str], *, jax_is_loaded: bool) -> None:
    """Set variables with which compilers start on a machine without accelerators. The user's values stay, except JAX_PLATFORMS."""
    if jax_is_loaded:
        return
    for name, value in WITHOUT_HARDWARE.items():
        if name == "JAX_PLATFORMS":
            environment[name] = value
        else:
            environment.setdefault(name, value)


def _write_text(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--hlo: cannot write {path}: {error.strerror}.") from None
