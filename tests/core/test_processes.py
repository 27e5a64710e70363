"""What options and cluster variables say of the processes of a run, against JAX's own reading of the same variables."""

from __future__ import annotations

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.training.cluster import CommandLine, Processes, find_processes

SLURM = {
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[007-015],other",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
POD = {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
TPU = {"TPU_WORKER_HOSTNAMES": "h0.svc,h1.svc", "TPU_WORKER_ID": "1", "JOB_COMPLETION_INDEX": "1"}
SLICES = {**TPU, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "c0:8080"}


def pod_name() -> str:
    return "train-1.pods.team.svc.cluster.local"


def never() -> str:
    raise AssertionError("nobody needs this machine's name")


def found(said: CommandLine, environment: dict[str, str], name=never) -> Processes | None:
    return find_processes(said, environment, name)[0]


def together(processes: Processes | None) -> tuple[int, int, str]:
    assert processes is not None
    return processes.index, processes.count, processes.coordinator


def test_nothing_said_is_a_run_by_itself() -> None:
    assert find_processes(CommandLine(), {}, never) == (None, None)


def test_told_by_options() -> None:
    processes = found(CommandLine(coordinator="[::1]:99", count=2, index=1), {**SLURM, **POD})
    assert together(processes) == (1, 2, "[::1]:99")
    assert processes is not None
    assert (processes.host, processes.port, processes.launcher) == ("::1", 99, None)


@pytest.mark.parametrize("environment", [{}, SLURM, OPEN_MPI, POD, TPU], ids=str)
def test_one_process_is_a_run_by_itself_anywhere(environment: dict[str, str]) -> None:
    assert found(CommandLine(count=1, index=0, coordinator="a:1"), environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    ],
    ids=["slurm: one task", "slurm: a shell in a job", "open mpi", "tpu"],
)
def test_a_cluster_of_one_is_a_run_by_itself(environment: dict[str, str]) -> None:
    assert found(CommandLine(), environment) is None


def test_a_batch_script_of_slurm_runs_by_itself_and_it_is_said() -> None:
    environment = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert find_processes(CommandLine(), environment, never) == (
        None,
        "Slurm: this job has 4 tasks, and this one was not started by srun: it runs as a single process",
    )


def test_slurm() -> None:
    processes = found(CommandLine(), SLURM)
    assert together(processes) == (3, 4, f"node007:{61440 + 70123 % 4096}")
    assert processes is not None
    assert processes.launcher == "slurm"
    assert processes.found == "Slurm: SLURM_PROCID=3, SLURM_NTASKS=4, SLURM_STEP_NODELIST=node[007-015],other"


@pytest.mark.parametrize("bound", [{"CUDA_VISIBLE_DEVICES": "0"}, {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}], ids=str)
def test_a_process_keeps_the_devices_that_are_its_own_already(bound: dict[str, str]) -> None:
    processes = found(CommandLine(), {**SLURM, **bound})
    assert processes is not None
    assert processes.launcher is None


def test_pods_find_the_first_by_their_own_name() -> None:
    processes = found(CommandLine(count=4), POD, pod_name)
    assert together(processes) == (1, 4, "train-0.pods.team.svc.cluster.local:55527")
    assert processes is not None
    assert processes.found == (
        "Kubernetes: JOB_COMPLETION_INDEX=1, --processes, pod 0 of this Job, train-0.pods.team.svc.cluster.local"
    )
    assert together(found(CommandLine(count=4, coordinator="x:1"), POD, pod_name)) == (1, 4, "x:1")


def test_tpu_hosts() -> None:
    assert together(found(CommandLine(), TPU)) == (1, 2, "h0.svc:8482")
    assert together(found(CommandLine(), SLICES)) == (3, 4, "c0:8482")


@pytest.mark.parametrize("cluster", [SLURM, OPEN_MPI, TPU], ids=["slurm", "open mpi", "tpu"])
def test_jax_variables_say_where_process_0_listens(cluster: dict[str, str]) -> None:
    whole = {**cluster, "JAX_COORDINATOR_ADDRESS": "a:5"}
    parts = {**cluster, "JAX_COORDINATOR_ADDRESS": "a", "JAX_COORDINATOR_PORT": "5"}
    for environment in (whole, parts):
        processes = found(CommandLine(), environment)
        assert processes is not None
        assert processes.coordinator == "a:5"


REFUSED = {
    "half of the options": (
        CommandLine(count=2),
        {"JAX_COORDINATOR_ADDRESS": "a:1"},
        "one of several processes: found --processes (2), JAX_COORDINATOR_ADDRESS (a:1), and neither an option nor the "
        "environment gives --process. Give --coordinator HOST:PORT, --processes N and --process I to each of them, or "
        "--processes 1 for a single-process run.",
    ),
    "a coordinator alone": (
        CommandLine(),
        {"JAX_COORDINATOR_ADDRESS": "a:1"},
        "one of several processes: found JAX_COORDINATOR_ADDRESS (a:1), and neither an option nor the environment gives "
        "--processes and --process. Give --coordinator HOST:PORT, --processes N and --process I to each of them, or "
        "--processes 1 for a single-process run.",
    ),
    "another count than Slurm's": (
        CommandLine(count=2),
        SLURM,
        "--processes is 2, and Slurm sets 4 (SLURM_NTASKS=4). Leave --processes out, or give --coordinator, "
        "--processes and --process, which together override it.",
    ),
    "half of Slurm": (
        CommandLine(),
        {name: value for name, value in SLURM.items() if name != "SLURM_PROCID"},
        "Slurm: other variables of it are set, but not SLURM_PROCID. Start the processes with Slurm's own launcher, "
        "or give --coordinator, --processes and --process, or --processes 1 for a single-process run.",
    ),
    "not a number": (
        CommandLine(),
        {**SLURM, "SLURM_NTASKS": "four"},
        "Slurm: SLURM_NTASKS is 'four', and must be a whole number of at least 0.",
    ),
    "pods without a count": (
        CommandLine(),
        POD,
        "Kubernetes: this is process 1 (JOB_COMPLETION_INDEX=1), and the number of processes is not given. "
        "Give --processes N, or --processes 1 for a single-process run.",
    ),
    "mpirun without a place": (
        CommandLine(),
        OPEN_MPI,
        "Open MPI: this is process 2 of 4 (OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=4), and the "
        "address of process 0 is not given. Give --coordinator HOST:PORT, its host and a free port there.",
    ),
    "an index that cannot be": (
        CommandLine(coordinator="a:1", count=2, index=2),
        {},
        "process 2 of 2 (from options): processes count from 0, so the last one is 1.",
    ),
    "no port": (
        CommandLine(coordinator="a", count=2, index=1),
        {},
        "the coordinator is 'a' (from options), and must be HOST:PORT with a port from 1 to 65535, as node0:12345.",
    ),
    "nothing between two dots": (
        CommandLine(coordinator="node..0:1234", count=2, index=1),
        {},
        "the coordinator is 'node..0:1234' (from options), and its host has a dot in its name with nothing before it. "
        "Give HOST:PORT with the host's name, as node0:12345.",
    ),
    "a dot at the start": (
        CommandLine(coordinator=".node:1234", count=2, index=1),
        {},
        "the coordinator is '.node:1234' (from options), and its host has a dot in its name with nothing before it. "
        "Give HOST:PORT with the host's name, as node0:12345.",
    ),
    "a long host": (
        CommandLine(count=2, index=1),
        {"JAX_COORDINATOR_ADDRESS": f"a.{'b' * 70}.c:1"},
        f"the coordinator is 'a.{'b' * 70}.c:1' (from options), and its host has 70 characters between two dots of its "
        f"name, and may have 63. Give HOST:PORT with the host's name, as node0:12345.",
    ),
    "a host that is not UTF-8": (
        CommandLine(coordinator="\udcff:1", count=2, index=1),
        {},
        "the coordinator is '\udcff:1' (from options), and its host has a name that cannot be looked up. "
        "Give HOST:PORT with the host's name, as node0:12345.",
    ),
    "alone with an index": (
        CommandLine(count=1, index=1),
        {},
        "--process is 1, and must be 0: --processes is 1. Processes count from 0.",
    ),
    "no processes": (CommandLine(count=0), {}, "--processes is 0, and must be at least 1."),
}


@pytest.mark.parametrize(("said", "environment", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(said: CommandLine, environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as error:
        found(said, environment, lambda: "no-domain")
    assert str(error.value) == message


@pytest.mark.parametrize(
    "host", ["node0", "node0.", "a" * 63, "::1", "[fe80::1%eth0]", "10.0.0.1", "k\xf6ln.example", "a_b"]
)
def test_a_host_that_can_be_looked_up(host: str) -> None:
    processes = found(CommandLine(coordinator=f"{host}:99", count=2, index=1), {})
    assert processes is not None
    assert (processes.host, processes.port) == (host.strip("[]"), 99)


def test_jax_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.clusters import cloud_tpu_cluster, slurm_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster.BaseTpuCluster, "wait_for_coordinator", lambda *_: None)
    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value_from_metadata", lambda _: None)
    for cluster, variables in (
        (slurm_cluster.SlurmCluster, SLURM),
        (slurm_cluster.SlurmCluster, {**SLURM, "SLURM_STEP_NODELIST": "gpu1,gpu2"}),
        (cloud_tpu_cluster.GkeTpuCluster, TPU),
        (cloud_tpu_cluster.GkeTpuCluster, SLICES),
    ):
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            assert cluster.is_env_present()
            theirs = (
                cluster.get_process_id(),
                cluster.get_process_count(),
                cluster.get_coordinator_address(1, None),
            )
        assert together(found(CommandLine(), variables)) == theirs
