"""The only module that uses Ray: connect to a cluster, submit tasks, wait for them and cancel them.

Ray is an optional dependency, imported only when a fleet is used. Ray repeats a task, at most `retries` times, if its machine
was lost or if it raised one of the exceptions in `retried`. Any other exception is the final result of the task.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parity_audit.core.errors import EnvFailed, UsageError
from parity_audit.matrix.fleet.resources import Resources

EXTRA = "pip install 'parity-audit[ray]'"
HERE = "ray"
REMOTE = "ray://"
GRACE = 10.0
"""Seconds that cancelled tasks have to stop their engines; after that their processes are killed."""
POLL = 1.0
"""Seconds between two queries of the cluster's state."""
THREADS = "OMP_NUM_THREADS"
LOCAL_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Defaults for a cluster started here: Ray sends no usage statistics, and does not change CUDA_VISIBLE_DEVICES without GPUs."""


class MachineLost(Exception):
    """The machine or process of the task was lost in every try."""


class Cancelled(Exception):
    """The task was cancelled."""


class TaskLocations:
    """A Ray actor on the cluster that records which machine runs which task."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}

    def started(self, name: str, node: str) -> None:
        """Record that a task began on a machine; a later try of the same task replaces the record of an earlier one."""
        self.running[name] = node

    def snapshot(self) -> dict[str, str]:
        """Return the machine of every task that has begun, by the task's name."""
        return dict(self.running)


@dataclass(frozen=True)
class Cluster:
    """A connection to a Ray cluster. Handles of tasks are Ray's object references.

    `local` is true if the cluster was started by this process.
    """

    ray: Any
    board: Any
    local: bool

    def submit(
        self, run: Callable[..., Any], *args: Any, name: str, resources: Resources, retries: int,
        retried: Sequence[type[Exception]], after: Any = None,
    ) -> Any:  # fmt: skip
        """Submit the task `run(*args, node=...)` and return the handle of its result.

        The task begins when its resources are free and the task with the handle `after` has ended.
        """
        options: dict[str, Any] = {
            "num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": retries, "name": name,
            "retry_exceptions": list(retried), "runtime_env": {"env_vars": _variables(resources)},
        }  # fmt: skip
        if resources.memory:
            options["memory"] = resources.memory
        return self.ray.remote(_run).options(**options).remote(self.board, name, run, args, after)

    def wait(self, handles: Sequence[Any]) -> list[Any]:
        """Return the handles of the tasks that have ended; an empty list if none ends within `POLL` seconds."""
        done, _ = self.ray.wait(list(handles), num_returns=1, timeout=POLL, fetch_local=False)
        more, _ = self.ray.wait(list(handles), num_returns=len(handles), timeout=0, fetch_local=False)
        return list(dict.fromkeys([*done, *more]))

    def result(self, handle: Any) -> Any:
        """Return what the task returned, or raise what it raised.

        Raises:
            MachineLost: the machine or process of the task was lost.
            Cancelled: the task was cancelled.
        """
        errors = self.ray.exceptions
        try:
            return self.ray.get(handle)
        except errors.TaskCancelledError as error:
            raise Cancelled from error
        except errors.RayTaskError as error:
            if isinstance(error.cause, errors.RayError):
                raise MachineLost(str(error.cause).partition("\n")[0]) from error
            raise error.cause from error
        except errors.RayError as error:
            raise MachineLost(str(error).strip().partition("\n")[0]) from error

    def running(self) -> dict[str, str]:
        """Return the machine of every task that has begun; an empty mapping if the board does not answer within `POLL` seconds."""
        with contextlib.suppress(self.ray.exceptions.RayError):
            found: dict[str, str] = self.ray.get(self.board.snapshot.remote(), timeout=POLL)
            return found
        return {}

    def cancel(self, handles: Sequence[Any]) -> None:
        """Cancel tasks: they have `GRACE` seconds to stop their engines; then their processes and engines are killed."""
        left = list(handles)
        for force in (False, True):
            for handle in left:
                with contextlib.suppress(Exception):
                    self.ray.cancel(handle, force=force, recursive=True)
            if left:
                _, left = self.ray.wait(left, num_returns=len(left), timeout=GRACE, fetch_local=False)

    def require_room(self, wanted: Sequence[Resources]) -> None:
        """Check that a cluster started by this process has the resources of each task; any other cluster may grow later.

        Raises:
            UsageError: a task asks for more than the whole cluster has.
        """
        have: Mapping[str, float] = self.ray.cluster_resources()
        for one in wanted if self.local else ():
            for kind, amount in (("CPU", one.cpus), ("GPU", one.gpus), ("memory", float(one.memory))):
                if amount > have.get(kind, 0.0):
                    raise UsageError(
                        f"a cell asks for {amount:g} {kind}, and this cluster has {have.get(kind, 0.0):g}", code="no-room",
                        hint="change `resources` in the matrix file, or name a larger cluster with --on ray://HOST:PORT",
                    )  # fmt: skip


@contextlib.contextmanager
def connected(place: str) -> Iterator[Cluster]:
    """Connect to a cluster, and disconnect at the end of the block.

    Args:
        place: `ray://HOST:PORT`, or `ray` for the cluster named by RAY_ADDRESS, or without that variable for a new cluster on
            this machine.

    Raises:
        UsageError: Ray is not installed, or `place` has another form.
        EnvFailed: no cluster answers at this place.
    """
    if place != HERE and not place.startswith(REMOTE):
        raise UsageError(
            f"`--on {place}` is no cluster", code="bad-cluster", expected=f"`{HERE}`, or {REMOTE}HOST:PORT"
        )  # fmt: skip
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.exceptions")
    except ImportError as error:
        raise UsageError(f"Ray is not installed: {error}", code="missing-extra", hint=EXTRA) from error
    local = place == HERE and "RAY_ADDRESS" not in os.environ
    for name, value in LOCAL_VARIABLES.items():
        os.environ.setdefault(name, value)
    own: dict[str, Any] = {"include_dashboard": False} if local else {}
    # Without an address Ray would look for the last cluster of this machine, and wait for minutes if that was killed.
    address = "local" if local else None if place == HERE else place
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **own)
    except Exception as error:
        raise EnvFailed(f"no Ray cluster at `{place}`: {error}", code="no-cluster") from error
    try:
        yield Cluster(ray, ray.remote(TaskLocations).options(num_cpus=0, max_restarts=-1).remote(), local)
    finally:
        ray.shutdown()


def _run(board: Any, name: str, run: Callable[..., Any], args: tuple[Any, ...], after: Any) -> Any:
    """Run a task on the cluster; `after` is an argument only because Ray starts a task when its arguments are available."""
    import ray

    node = ray.get_runtime_context().get_node_id()[:8]
    board.started.remote(name, node)
    return run(*args, node=node)


def _variables(resources: Resources) -> dict[str, str]:
    """Return the environment variables of a task's process.

    OMP_NUM_THREADS is always set, because results depend on the number of threads: to its value in this process, else to the
    number of CPUs that the task asks for (at least 1).
    """
    threads = os.environ.get(THREADS, str(max(1, int(resources.cpus))))
    return {THREADS: threads, **resources.env}
