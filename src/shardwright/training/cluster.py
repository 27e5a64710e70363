"""The processes of a run, from command-line options and from a cluster's environment variables.

| where | index | count | coordinator |
|---|---|---|---|
| options | `--process` | `--processes` | `--coordinator`, or JAX_COORDINATOR_ADDRESS |
| torchrun, for PyTorch | RANK | WORLD_SIZE | MASTER_ADDR and MASTER_PORT, where its store is |
| Open MPI (`mpirun`) | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | to be given |
| Slurm (`srun`) | SLURM_PROCID | SLURM_NTASKS | the first host of SLURM_STEP_NODELIST |
| TPU on Kubernetes | TPU_WORKER_ID, MEGASCALE_SLICE_ID | TPU_WORKER_HOSTNAMES x MEGASCALE_NUM_SLICES | the first host, or MEGASCALE_COORDINATOR_ADDRESS |
| Kubernetes (Indexed Job, JobSet) | JOB_COMPLETION_INDEX | to be given | pod 0, from this pod's own name |

Except for torchrun's, these are the variables that JAX itself reads. The first row whose index is set is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardwright.core.engines.engines import DEFAULT_ENGINE, Engine
from shardwright.core.findings.bounds import number_text, within
from shardwright.core.findings.errors import InputError

KUBERNETES_PORT = 55527
"""JAX's port for pods."""
TPU_PORT = 8482
"""JAX's port for TPU hosts."""

JOIN_TIMEOUT_S = 300
STALL_TIMEOUT_S = 300

TORCHRUN = "torchrun"
"""The launcher whose coordinator is a key-value store, where process 0 publishes its own address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """One of ``count`` processes of a run. All join at ``coordinator``, HOST:PORT, where process 0 listens.

    ``found``: where these values come from, for a person to read. ``launcher``: set where several processes share a host
    and all its devices, so that each must take those of its local index: JAX's name of the launcher that numbers them.
    ``stall_timeout_s``: how much longer than the longest step a process may be silent, or all may be without progress.
    """

    count: int
    index: int
    coordinator: str
    found: str
    launcher: str | None = None
    join_timeout_s: int = JOIN_TIMEOUT_S
    stall_timeout_s: int = STALL_TIMEOUT_S

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The command-line options about processes. None: not given."""

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    join_timeout_s: int = JOIN_TIMEOUT_S
    stall_timeout_s: int = STALL_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cluster:
    """The values of one cluster's variables. ``count`` or ``coordinator`` is None where they do not set it."""

    name: str
    index: int
    index_from: str
    count: int | None
    count_from: str
    coordinator: str | None
    coordinator_from: str = ""
    launcher: str | None = None


def find_processes(
    options: CommandLine,
    environment: Mapping[str, str],
    full_host_name: Callable[[], str],
    engine: Engine = DEFAULT_ENGINE,
) -> tuple[Processes | None, str | None]:
    """The processes of this run, or None for a single process; and a note for the user where the result may surprise.

    ``full_host_name`` returns this machine's name with its domain; it is called only for pods.
    Raises InputError for values that contradict each other, cannot be read, or are incomplete.
    """
    _check(options)
    if options.count == 1:
        if options.index not in (None, 0):
            raise InputError(f"--process is {options.index}, and must be 0: --processes is 1. Processes count from 0.")
        return None, None
    address, address_from = _address(options, environment)
    if options.count is not None and options.index is not None and address is not None:
        return _checked(options.count, options.index, address, "from options", None, options), None
    cluster = _torchrun(environment) if engine == "torch" else None
    cluster = cluster or _cluster(environment, full_host_name)
    if cluster is None:
        given = {
            "--processes": options.count,
            "--process": options.index,
            address_from or "--coordinator": address,
        }
        if all(value is None for value in given.values()):
            return None, _note(environment)
        found = ", ".join(f"{name} ({value})" for name, value in given.items() if value is not None)
        missing = " and ".join(name for name, value in given.items() if value is None)
        raise InputError(
            f"one of several processes: found {found}, and neither an option nor the environment gives {missing}. "
            f"Give --coordinator HOST:PORT, --processes N and --process I to each of them, or --processes 1 for a single-process run."
        )
    return _filled(cluster, options, address, address_from)


def _filled(
    cluster: _Cluster, options: CommandLine, address: str | None, address_from: str
) -> tuple[Processes | None, str | None]:
    """The options, completed with the cluster's values. Raises InputError for a contradiction and for a missing value."""
    for option, ours, theirs, theirs_from in (
        ("--processes", options.count, cluster.count, cluster.count_from),
        ("--process", options.index, cluster.index, cluster.index_from),
    ):
        if ours is not None and theirs is not None and ours != theirs:
            raise InputError(
                f"{option} is {ours}, and {cluster.name} sets {theirs} ({theirs_from}). "
                f"Leave {option} out, or give --coordinator, --processes and --process, which together override it."
            )
    count = options.count if options.count is not None else cluster.count
    if count is None:
        raise InputError(
            f"{cluster.name}: this is process {cluster.index} ({cluster.index_from}), and the number of processes is not given. "
            f"Give --processes N, or --processes 1 for a single-process run."
        )
    if count == 1:
        return None, None
    address, address_from = (
        (address, address_from) if address is not None else (cluster.coordinator, cluster.coordinator_from)
    )
    if address is None:
        raise InputError(
            f"{cluster.name}: this is process {cluster.index} of {count} ({cluster.index_from}, {cluster.count_from}), "
            f"and the address of process 0 is not given. Give --coordinator HOST:PORT, its host and a free port there."
        )
    index = options.index if options.index is not None else cluster.index
    count_from = "--processes" if cluster.count is None else cluster.count_from
    found = f"{cluster.name}: {cluster.index_from}, {count_from}, {address_from}"
    return _checked(count, index, address, found, cluster.launcher, options), None


def _checked(count: int, index: int, address: str, found: str, launcher: str | None, options: CommandLine) -> Processes:
    if not 0 <= index < count:
        raise InputError(
            f"process {index} of {count} ({found}): processes count from 0, so the last one is {count - 1}."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(
            f"the coordinator is '{address}' ({found}), and must be HOST:PORT with a port from 1 to 65535, as "
            f"node0:12345."
        )
    if (fault := _host_fault(host)) is not None:
        raise InputError(
            f"the coordinator is '{address}' ({found}), and its host {fault}. Give HOST:PORT with the host's name, as "
            f"node0:12345."
        )
    processes = Processes(count=count, index=index, coordinator=address, found=found, launcher=launcher)
    return replace(processes, join_timeout_s=options.join_timeout_s, stall_timeout_s=options.stall_timeout_s)


LABEL_CHARACTERS = 63
"""The longest label of a host name (RFC 1035)."""


def _host_fault(host: str) -> str | None:
    """Why a name cannot even be looked up. Python raises another error for it than OSError, as for an unknown host."""
    try:
        host.encode("idna")
    except UnicodeError:
        labels = host.removesuffix(".").split(".")
        longest = max(len(label) for label in labels)
        if "" in labels:
            return "has a dot in its name with nothing before it"
        if longest > LABEL_CHARACTERS:
            return f"has {longest} characters between two dots of its name, and may have {LABEL_CHARACTERS}"
        return "has a name that cannot be looked up"
    return None


def _check(options: CommandLine) -> None:
    for option, number, least, counted in (
        ("--processes", options.count, 1, "processes"),
        ("--process", options.index, 0, "processes"),
        ("--join-timeout", options.join_timeout_s, 1, "seconds"),
        ("--stall-timeout", options.stall_timeout_s, 1, "seconds"),
    ):
        if number is not None and number < least:
            raise InputError(f"{option} is {number_text(number)}, and must be at least {least}.")
        if number is not None:
            within(option, number, counted)


def _address(options: CommandLine, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """HOST:PORT of the coordinator from the option or JAX's own variables, and the name of its source."""
    if options.coordinator is not None:
        return options.coordinator, "--coordinator"
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        return None, ""
    port = environment.get("JAX_COORDINATOR_PORT")
    if port and not re.search(r":\d+$", address):
        return f"{address}:{port}", "JAX_COORDINATOR_ADDRESS and JAX_COORDINATOR_PORT"
    return address, "JAX_COORDINATOR_ADDRESS"


def _cluster(environment: Mapping[str, str], full_host_name: Callable[[], str]) -> _Cluster | None:
    for find in (_open_mpi, _slurm, _tpu):
        if (cluster := find(environment)) is not None:
            return cluster
    return _kubernetes(environment, full_host_name)


def _torchrun(environment: Mapping[str, str]) -> _Cluster | None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if environment.get(name)]
    if not {"RANK", "WORLD_SIZE"} & set(given):
        return None
    missing = [name for name in names if name not in given]
    if missing:
        raise InputError(
            f"torchrun: the environment has {', '.join(given)} and lacks {', '.join(missing)}. Start the ranks with torchrun, "
            f"or give --coordinator, --processes and --process."
        )
    index, count = _number(environment, "RANK", "torchrun"), _number(environment, "WORLD_SIZE", "torchrun")
    if count < 1:
        raise InputError(f"torchrun: WORLD_SIZE is {count}, and must be at least 1.")
    return _Cluster(
        name="torchrun",
        index=index,
        index_from=f"RANK={index}",
        count=count,
        count_from=f"WORLD_SIZE={count}",
        coordinator=f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
        coordinator_from="MASTER_ADDR and MASTER_PORT",
        launcher=TORCHRUN,
    )


def _open_mpi(environment: Mapping[str, str]) -> _Cluster | None:
    size, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    if size not in environment and rank not in environment:
        return None
    index, count = _number(environment, rank, "Open MPI"), _number(environment, size, "Open MPI")
    return _Cluster(
        name="Open MPI",
        index=index,
        index_from=f"{rank}={index}",
        count=count,
        count_from=f"{size}={count}",
        coordinator=None,
        launcher="ompi"
        if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1" and _sees_all(environment)
        else None,
    )


def _slurm(environment: Mapping[str, str]) -> _Cluster | None:
    """A task of a job step. A process in a job's script or shell, outside any step, runs alone."""
    nodes = environment.get("SLURM_STEP_NODELIST")
    if nodes is None or environment.get("SLURM_STEP_NUM_TASKS") == "1":
        return None
    index, count = (_number(environment, name, "Slurm") for name in ("SLURM_PROCID", "SLURM_NTASKS"))
    job = _number(environment, "SLURM_JOB_ID", "Slurm")
    step = environment.get("SLURM_STEP_ID", "0")
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # One of 4,096 ports above 61,439, as in JAX, but a different one for each step: two steps may share a host.
    port = 61440 + (job + (int(step) if step.isdecimal() else 0)) % 4096
    port_from = environment.get("JAX_COORDINATOR_PORT", str(port))
    return _Cluster(
        name="Slurm",
        index=index,
        index_from=f"SLURM_PROCID={index}",
        count=count,
        count_from=f"SLURM_NTASKS={count}",
        coordinator=f"{first_host(nodes)}:{port_from}",
        coordinator_from=f"SLURM_STEP_NODELIST={nodes}",
        launcher="slurm" if not re.fullmatch(r"1(\(x\d+\))?", tasks) and _sees_all(environment) else None,
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("node[007-015,020]-ib,other"), first_host("a1,a2"), first_host("a[3,5]"), first_host("gpu1")
    ('node007-ib', 'a1', 'a3', 'gpu1')
    """
    match = re.match(r"([^,\[]*)(?:\[([^],-]+)[^]]*])?([^,\[]*)", nodes)
    assert match is not None
    return "".join(group or "" for group in match.groups())


def _tpu(environment: Mapping[str, str]) -> _Cluster | None:
    hosts_from = "TPU_PROCESS_ADDRESSES" if "TPU_PROCESS_ADDRESSES" in environment else "TPU_WORKER_HOSTNAMES"
    if hosts_from not in environment or "TPU_WORKER_ID" not in environment:
        return None
    hosts = environment[hosts_from].split(",")
    worker = _number(environment, "TPU_WORKER_ID", "TPU")
    slices = _number(environment, "MEGASCALE_NUM_SLICES", "TPU") if environment.get("MEGASCALE_NUM_SLICES") else 1
    slice_id = _number(environment, "MEGASCALE_SLICE_ID", "TPU") if environment.get("MEGASCALE_SLICE_ID") else 0
    first_from = "MEGASCALE_COORDINATOR_ADDRESS" if environment.get("MEGASCALE_COORDINATOR_ADDRESS") else hosts_from
    host = environment[first_from].split(",")[0].split(":")[0]
    return _Cluster(
        name="TPU",
        index=slice_id * len(hosts) + worker,
        index_from=f"TPU_WORKER_ID={worker}" + (f", MEGASCALE_SLICE_ID={slice_id}" if slices > 1 else ""),
        count=slices * len(hosts),
        count_from=f"{len(hosts)} names in {hosts_from}" + (f", MEGASCALE_NUM_SLICES={slices}" if slices > 1 else ""),
        coordinator=f"{host}:{environment.get('JAX_COORDINATOR_PORT', TPU_PORT)}",
        coordinator_from=f"the first host of {first_from}",
    )


def _kubernetes(environment: Mapping[str, str], full_host_name: Callable[[], str]) -> _Cluster | None:
    """A pod of an Indexed Job, whose name ends with its index; that of pod 0 differs in the index only."""
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    index = _number(environment, "JOB_COMPLETION_INDEX", "Kubernetes")
    pod, dot, domain = full_host_name().partition(".")
    first = f"{pod.removesuffix(f'-{index}')}-0{dot}{domain}" if dot and pod.endswith(f"-{index}") else None
    port = environment.get("JAX_COORDINATOR_PORT", str(KUBERNETES_PORT))
    return _Cluster(
        name="Kubernetes",
        index=index,
        index_from=f"JOB_COMPLETION_INDEX={index}",
        count=None,
        count_from="--processes",
        coordinator=None if first is None else f"{first}:{port}",
        coordinator_from=f"pod 0 of this Job, {first}",
    )


def _sees_all(environment: Mapping[str, str]) -> bool:
    """Whether a process sees every GPU of its host. A launcher that binds each process to one GPU shows it only that one."""
    return len(environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) > 1


def _number(environment: Mapping[str, str], name: str, cluster: str) -> int:
    value = environment.get(name)
    if value is None:
        raise InputError(
            f"{cluster}: other variables of it are set, but not {name}. Start the processes with {cluster}'s own "
            f"launcher, or give --coordinator, --processes and --process, or --processes 1 for a single-process run."
        )
    if not value.isdecimal():
        raise InputError(f"{cluster}: {name} is '{value}', and must be a whole number of at least 0.")
    return int(value)


def _note(environment: Mapping[str, str]) -> str | None:
    """The note on a single-process run where several processes might have been intended."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environment and tasks != "1":
        return f"Slurm: this job has {tasks} tasks, and this one was not started by srun: it runs as a single process"
    return None
