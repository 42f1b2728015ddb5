"""Workers on a Ray cluster: one actor for each GPU, or for so many CPUs, each with the model loaded once.

Ray starts and places the actors and notices when one dies; the items are given out here, so that an item
is known by its hash, found finished, tried again up to a limit, and made by the plan of its moment.
A plan goes through Ray's object store, once to each machine.

Not covered: a cluster that becomes too small later: the items wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stopdown.batch.jobs import Prepared, Task, prepare
from stopdown.batch.pools import Slot, Workers
from stopdown.batch.settings import Job
from stopdown.batch.stores import Store, write_probe
from stopdown.batch.worker import Answer, Worker
from stopdown.devices.environment import list_devices, read_version, require_package
from stopdown.errors import InputError, StopdownError, take_first_line
from stopdown.plans.plan_files import read_class_versions
from stopdown.records import Plan

_STORE_BYTES = 2**28
"""Of the object store of a cluster of our own: tasks, plans and answers, no frames."""

_KNOCK_S, _NODE_S, _OPEN_S, _LEAVING_S = 10.0, 120.0, 600.0, 30.0
"""Seconds for an address to answer, a machine to say its versions, the first workers to begin, and for
Ray to notice that a machine is gone."""


@contextmanager
def connect(address: str, workers: int | None) -> Iterator[Cluster]:
    """A Ray cluster for the time of the block.

    Args:
        address: `local` starts one on this machine; `auto` and `host:port` are those of `ray.init`.
        workers: how many; None for as many as the cluster has GPUs, or room for on its CPUs.
    """
    require_package("ray", "ray", "`ray`", otherwise=", or leave `ray` out")
    import ray

    _knock(address)
    own: dict[str, Any] = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
            **(own if address == "local" else {}),
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise _describe_absence(address, error) from error
    try:
        _check_nodes(ray)
        yield _measure(ray, address, workers)
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Refuse an address without a listener: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
        except OSError as error:
            raise _describe_absence(address, error) from error


def _describe_absence(address: str, error: Exception) -> InputError:
    return InputError(
        f"There is no Ray cluster at {address}: {take_first_line(error)[:200].rstrip('.')}.",
        expected="An address is that of a cluster that runs: `ray status --address ADDRESS`.",
        remedy='Start one with ray start --head, or use ray="local".',
    )


def _measure(ray: Any, address: str, workers: int | None) -> Cluster:
    """What each worker takes of a cluster, and how many there are."""
    total = ray.cluster_resources()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = sorted(int(x["CPU"]) for x in nodes if x.get("CPU"))
    gpus, all_cpus = int(total.get("GPU", 0)), int(total.get("CPU", 0))
    each = 1
    if not gpus and cpus:
        each = min(max(1, sum(cpus) // workers if workers else cpus[0]), cpus[-1])
    fitting = gpus or sum(number // each for number in cpus)
    count = workers or fitting
    if not 0 < count <= fitting:
        raise InputError(
            f"{count} workers were requested, but the Ray cluster has room for {fitting}: "
            f"{gpus} GPUs and {all_cpus} CPUs on {len(nodes)} machines.",
            expected=f"Each takes {'a GPU' if gpus else f'{each} CPUs of one machine'}.",
            remedy="Use fewer `workers`.",
        )
    resources = {"num_cpus": each, **({"num_gpus": 1} if gpus else {})}
    what = "one GPU" if gpus else f"{each} CPU{'s' * (each != 1)}"
    described = (
        f"Ray at {address}: {len(nodes)} machine{'s' * (len(nodes) != 1)}, {count} "
        f"worker{'s' * (count != 1)} with {what} each."
    )
    return Cluster(ray, count, resources, described)


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, and what each worker takes of it."""

    ray: Any
    workers: int
    resources: dict[str, Any]
    described: str

    @property
    def prepares(self) -> bool:
        """Whether a plan has to be made there: its workers have GPUs, and this machine has none."""
        return "num_gpus" in self.resources and list_devices()[0].type != "cuda"

    def prepare(self, *given: Any, **named: Any) -> Prepared:
        """`jobs.prepare` on a machine of the cluster."""
        try:
            task = self.ray.remote(**self.resources)(prepare)
            prepared: Prepared = self.ray.get(task.remote(*given, **named))
            return prepared
        except self.ray.exceptions.RayTaskError as error:
            raise _unwrap(error) from error

    def make_workers(self, job: Job, store: Store) -> RayActors:
        """Return its workers, which are not begun yet."""
        return RayActors(self, job, store)


def _check_nodes(ray: Any) -> None:
    """Refuse machines without Stopdown, or with other versions than here; each says so itself."""
    here = {"stopdown": read_version("stopdown"), **read_class_versions()}
    here["torch"] = (read_version("torch") or "").partition("+")[0]

    def read_versions(names: list[str]) -> dict[str, str | None]:  # sent by value: no import there
        import importlib.metadata

        found: dict[str, str | None] = {}
        for name in names:
            try:
                found[name] = importlib.metadata.version(name).partition("+")[0]
                if name == "stopdown":
                    importlib.import_module(name)  # metadata can lie beside a package that is gone
            except ImportError:
                found[name] = None
        return found

    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    asked = [  # several nodes may have one address
        (
            node,
            ray.remote(read_versions)
            .options(num_cpus=0, scheduling_strategy=strategy(node["NodeID"], soft=False))
            .remote(list(here)),
        )
        for node in ray.nodes()
        if node["Alive"] and (node["Resources"].get("CPU") or node["Resources"].get("GPU"))
    ]
    if not asked:
        raise InputError(
            "The Ray cluster has no machine with CPUs or GPUs.",
            remedy="Add one: ray start --address ADDRESS",
        )
    for node, task in asked:
        machine = node["NodeManagerAddress"]
        try:
            found = ray.get(task, timeout=_NODE_S)
        except ray.exceptions.RayError as error:
            if _is_leaving(ray, node["NodeID"]):
                continue
            raise InputError(
                f"The machine {machine} of the Ray cluster does not answer: "
                f"{take_first_line(error)[:200]}",
                remedy="Look at it: ray status",
            ) from error
        _compare_versions(machine, here, found)


def _is_leaving(ray: Any, identity: str) -> bool:
    """Whether a machine that did not answer is found to be gone; Ray notices within some seconds."""
    until = time.monotonic() + _LEAVING_S
    while time.monotonic() < until:
        if not any(node["NodeID"] == identity and node["Alive"] for node in ray.nodes()):
            return True
        time.sleep(0.5)
    return False


def _compare_versions(
    machine: str, here: dict[str, str | None], found: dict[str, str | None]
) -> None:
    lacking = [name for name, version in found.items() if version is None]
    others = [
        f"{name} {found[name]} (here {version})"
        for name, version in here.items()
        if found[name] not in (None, (version or "").partition("+")[0])
    ]
    if not lacking and not others:
        return
    said = [f"has no {', '.join(lacking)}"] if lacking else []
    said += [f"has {', '.join(others)}"] if others else []
    raise InputError(
        f"The machine {machine} of the Ray cluster {' and '.join(said)}.",
        expected="All workers make items with the same versions, so that it does not matter which.",
        remedy=f"Install them there: pip install stopdown=={here['stopdown']} and what it needs.",
    )


class RayActors(Workers):
    """A pool of actors."""

    def __init__(self, cluster: Cluster, job: Job, store: Store) -> None:
        super().__init__(cluster.workers, store)
        self._ray, self._cluster, self._job = cluster.ray, cluster, job
        self._plans: dict[str, Any] = {}

    def _open(self) -> None:
        calls = [slot.channel for slot in self._slots]
        self._ray.wait(calls, num_returns=len(calls), timeout=_OPEN_S)
        self.wait(0.0)

    def __exit__(self, *_: object) -> None:
        for slot in self._slots:
            with contextlib.suppress(Exception):  # it is dead already, or the cluster is
                self._ray.kill(slot.worker)

    def _begin(self, number: int) -> Slot:
        made = self._ray.remote(_Actor).options(**self._cluster.resources, max_restarts=0)
        actor = made.remote()
        return Slot(actor, actor.open.remote(self._job, self._job.settings.device))

    def give(self, worker: int, task: Task, plan: Plan | None) -> None:
        """Send a task; the plan is put into the object store once."""
        held = None
        if plan is not None:
            held = self._plans.setdefault(plan.seal, None) or self._ray.put(plan)
            self._plans[plan.seal] = held
        slot = self._slots[worker]
        slot.channel, slot.state = slot.worker.make.remote(task.complete(), held), "busy"

    def _list_ready(self, waited: dict[Any, int], timeout_s: float) -> Iterable[int]:
        calls = list(waited)
        ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        return [waited[call] for call in ready]

    def _receive(self, slot: Slot) -> Any:
        try:
            return self._ray.get(slot.channel)
        except self._ray.exceptions.RayTaskError as error:
            raise _unwrap(error) from error
        except self._ray.exceptions.RayError as error:
            return f"died: {take_first_line(error)[:200].strip().rstrip('.')}"


class _Actor:
    """A worker as Ray has it."""

    def open(self, job: Job, device: str) -> tuple[str, str]:
        """Begin: what it computes on, and the name of a file that it wrote among the outputs."""
        self._worker = Worker(job, device)
        return str(self._worker.device), write_probe(self._worker.store)

    def make(self, task: Task, plan: Plan | None) -> Answer:
        return self._worker.make(task, plan)


def _unwrap(error: Any) -> StopdownError:
    """What a task raised there, without Ray's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, StopdownError):
        return cause
    return StopdownError(
        f"A worker failed: {take_first_line(str(cause or error))}",
        remedy="Make one item with stopdown generate to see why.",
    )
