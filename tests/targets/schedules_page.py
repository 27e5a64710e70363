"""The page of compiled schedules, docs/schedules.md, from what is stored and from plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.published.planned import machine_of, published_seconds, typed
from benchmarks.published.steps import Published, published
from shardwright.core.layout.wording import count
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.cost import price, read_machine
from shardwright.layouts import load_layout
from shardwright.models import build
from tests.targets.schedules import FLAGS, TARGETS, WAYS, cases

HEAD = """# What compiled schedules do

`python -m tests.targets.schedules compile` compiles these cases for absent chips, and writes this page. A collective is *exposed* if the program has no product
between its start and its done ([SW309](findings/SW309.md)); bytes are those of one device in a step, of collectives of a MiB or more.
"""

FLAGS_HEAD = """## Published flags

Options of compilers that others publish, given with `--xla` ([compile.md](compile.md#options-of-the-compiler)), and what each changes in the program of llama3-8b with
four layers, `--layout fsdp --mesh fsdp=8 --batch 16 --length 4096`. *Same* is a program with as many collectives, bytes, exposed bytes and memory as without the
flags.

| target | `--xla` | published by | collectives | exposed | peak, GB |
|---|---|---|---|---:|---:|
"""

HOPS_HEAD = """## Over an entire slice

Each way of `--hops` ([what it is](cost.md#over-a-whole-slice)), compiled: deepseek3-671b on 128 v5p under `ep-as-cp` (128 rows of 4,096 tokens), and on tpu7x:4x4x8
under `fsdp` (512 rows of 4,096); and a small model on tpu7x:4x4x2, four layers of llama3-8b.

*Planned*: the seconds of all collectives of a step, and what of them the plan expects to be exposed.
The eight unmatched rows of the small model were read before sums on SparseCores were matched with gathers. The two of 671B are the
all-reduces of the gradients of embedding and logits, which are counted with the sums that stand for gathers.

| case | `--hops` | collectives | exposed | peak, GB | planned | unmatched | compiled in |
|---|---|---|---:|---:|---:|---:|---:|
"""

ARGUED = """### The order of the prices, from links and bytes

V: bytes of what is gathered; W: bytes per second of a link in one direction; a ring has 2W. Every way leaves V on each device.

{table}

On v5p all three dims of 4 x 4 x 8 are rings. One collective becomes an all-reduce: it sends 2V, over the rings of all three dims, so it takes 2/3 of V / 2W. Two hops along z first
send V / 16 over one ring (1/16) and then V over the two rings of x and y (1/2): 9/16. The same split the other way around sends V / 8 over two rings and V over one: more than 1.
Chunks have the least bytes and would use all rings at once, but v5p waits for each hop: a third of V over one ring, three times, is 1, and the earlier hops
and the copies that put the chunks in order come on top. So two hops along z, one collective, the other two hops, chunks.

The compiled programs send, for what is gathered and scattered over the slice (99.0 GB of 671B in a step): in one collective 196 GB over all three dims, by all-reduces;
in two hops 98.9 GB over x and y and 5.7 GB over z; in chunks 69.7 GB over x or y and 44.5 GB over z, one dim after the other. Of the hops' scatters libtpu makes an all-reduce
again of 6.5 GB (embedding, logits, down-projections) and of 20.0 GB in chunks, which no price has. At the rates of the prices that is 0.42 s in two hops, 0.50 s in one
collective, and 0.86 s in chunks without their copies: the order of the prices.

No collective of the three programs is asynchronous, except some permutes of padding: libtpu hides nothing of them by itself. The plan expects products to hide
two thirds of the communication; its times are fitted to [published runs](published.md), which give the compiler options.

On TPU7x two devices share the links of a chip, and only the gather is an all-reduce: the scatter stays one collective. With x first, V / 64 goes over
one ring, and V over y, z and the pair of devices in a chip, which uses two rings; what then stands in another order is copied once, which is in the price. With z
and the pair first, V is sent over x and y by both devices of a chip at once, so that each has half of the links. That split was the only one before all were priced.

SparseCores carry nearly all of it beside the products: of the bytes of 671B on tpu7x:4x4x8 1% are exposed, in chunks 25%. The plan expects most of the time to be exposed all the same (of 512 rows,
13.3 s of 16.5 s in the hops that were compiled): a gather of a layer's experts begins before a product and ends long after it. So the share of bytes says what a schedule
begins early, and the plan's seconds how long it then waits.
"""

DECIDES = """### Published steps that decide

Of the {number} published steps over an entire slice of a torus whose collectives can go in more than one way, {same} have the same planned time under all of them, within {within}: their
collectives are hidden behind products. These are the others, in seconds:

| step | published | one | two, z first | two, by time | chunks |
|---|---:|---:|---:|---:|---:|
{rows}

The two steps of 671B on TPU7x have the same rows on each device. The first gathers over one mesh axis of 256 devices; the second over two axes, one after the other
(`docs/published.md` says what a command cannot). They took 27.0 and 26.8 s: 1% apart. Planned with one collective and with two hops by time they are 2% apart, and 12% too
fast both. With two hops and z first the second would take 20% longer than the first: that order is not what these runs did, and the
plan does not choose it. Chunks are nearer to both times, and no published program does them. v5p-671b-512 is far from its plan under every way, and decides
nothing.
"""


def text(stored: Mapping[str, Any]) -> str:
    """The entire page."""
    return "\n".join(
        [
            HEAD,
            FLAGS_HEAD + "\n".join(_flags(stored)),
            "",
            HOPS_HEAD + "\n".join(_hops(stored)),
            "",
            *_left(stored),
            ARGUED.format(table="\n".join(_prices())),
            _decides(),
        ]
    )


def _flags(stored: Mapping[str, Any]) -> Iterator[str]:
    for target in TARGETS:
        plain = stored.get(f"{target} as it is")
        if plain is None:
            continue
        yield f"| {target} | | | {_result(plain)} |"
        for name, (of, flags, source) in FLAGS.items():
            if of == target and name in stored:
                found = stored[name]
                same = _measured(found) == _measured(plain)
                shown = "same | | " if same else _result(found)
                yield f"| {target} | `{flags}` | {source} | {shown} |"


def _left(stored: Mapping[str, Any]) -> Iterator[str]:
    left = [name for name, _ in cases() if name not in stored]
    if left:
        yield f"Not compiled yet, {count(len(left), 'case')}: {', '.join(left)}. A program of 671B takes eight to thirty minutes and 5 to 8 GB of memory to compile.\n"


def _measured(found: Mapping[str, Any]) -> object:
    return found.get("error"), found.get("kinds"), found.get("peak_bytes")


def _result(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"refused: {found['error'][:160].replace('|', '/')} | - | -"
    return f"{_kinds(found)} | {_exposed(found):.0%} | {found['peak_bytes'] / 1e9:.2f}"


def _kinds(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{row['times']} {kind} ({row['bytes'] / 1e9:.2f} GB)" for kind, row in sorted(found["kinds"].items())
    )


def _exposed(found: Mapping[str, Any]) -> float:
    rows = found["kinds"].values()
    return sum(row["exposed"] for row in rows) / max(1, sum(row["bytes"] for row in rows))


def _hops(stored: Mapping[str, Any]) -> Iterator[str]:
    for name in ("small tpu7x", "671b v5p", "671b tpu7x"):
        for way in WAYS:
            found = stored.get(f"{name} {way}")
            if found is None:
                continue
            more = (
                "- | - | -" if "error" in found else f"{_planned(found)} | {found['unmatched']} | {found['seconds']} s"
            )
            yield f"| {name} | `{way}` | {_result(found)} | {more} |"


def _planned(found: Mapping[str, Any]) -> str:
    priced = found["priced"]
    shown = f"{priced['communication']:.3g} s" if priced else "-"
    return f"{shown}, {priced['exposed'] / priced['communication']:.0%}" if priced and "exposed" in priced else shown


def _plan(layout: str, chips: str, batch: int, remat: str, **sizes: int) -> Plan:
    machine = read_machine(chips)
    request = Request(
        layout=load_layout(layout),
        table=build("deepseek3-671b"),
        mesh_sizes=sizes,
        batch=batch,
        length=4096,
        dtype="bfloat16",
        remat=remat,
        chip=machine.chip,
        devices=machine.num_devices,
    )
    return price(make_plan(request), machine)


def _prices() -> Iterator[str]:
    plans = {
        "128 v5p, `ep-as-cp`": _plan("ep-as-cp", "v5p:4x4x8", 128, "full", fsdp=16, expert=8),
        "tpu7x:4x4x8, `fsdp`, 2,048 rows": _plan("fsdp", "tpu7x:4x4x8", 2048, "host=residual.stream", fsdp=256),
    }
    yield "| 671B on | all collectives over the slice in one step, s |"
    yield "|---|---|"
    for name, plan in plans.items():
        (choice,) = [one for one in plan.choices if one.what == "hops"]
        priced = sorted(choice.seconds.items(), key=lambda item: item[1])
        yield f"| {name} | {'; '.join(f'{way} {seconds:.3g}' for way, seconds in priced)} |"


def _ways(step: Published) -> Mapping[str, float]:
    """Planned seconds under each way; empty where no collective is over an entire slice, or chunks cannot divide."""
    request, machine, found = typed(step).request, machine_of(step), {}
    if machine.numbers is None or machine.numbers.network != "torus":
        return {}
    for way in (*WAYS, "auto"):
        plan = price(make_plan(replace(request, hops=way)), machine)
        if plan.step is None or not any(one.what == "hops" for one in plan.choices):
            continue
        found[way] = plan.step.seconds
    return found


def _decides() -> str:
    by_step = {step: ways for step in published() if (ways := _ways(step))}
    apart = {step: max(ways.values()) / min(ways.values()) - 1 for step, ways in by_step.items()}
    others = [step for step in by_step if apart[step] > 0.01]
    rows = "\n".join(
        f"| {step.name} | {published_seconds(step):.1f} | {ways['one']:.1f} | {ways['two']:.1f} | {ways['auto']:.1f} | {ways['chunks']:.1f} |"
        for step in others
        for ways in (by_step[step],)
    )
    same = [apart[step] for step in by_step if step not in others]
    return DECIDES.format(number=len(by_step), same=len(same), within=f"{max(same):.1%}", rows=rows)
