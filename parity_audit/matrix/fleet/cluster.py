"""Ray, and nothing but Ray: connect, submit, wait, cancel. It is an extra, imported when a fleet is asked for.

A task is tried again by Ray where its machine was lost, and where it raised one of `retried`. Every other exception is its answer.
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
"""Seconds for cancelled tasks to end their engines; then their processes are killed."""
POLL = 1.0
"""Seconds between two looks at the cluster."""
THREADS = "OMP_NUM_THREADS"
LOCAL_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""A cluster of our own reports to nobody, and leaves CUDA_VISIBLE_DEVICES alone for tasks without a GPU."""


class MachineLost(Exception):
    """The task was lost with its machine or process, as often as it was tried."""


class Cancelled(Exception):
    """The task was cancelled."""


class Board:
    """An actor: which machine is at which cell. Runs on the cluster."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}

    def started(self, name: str, node: str) -> None:
        """A task began; a second try takes the place of the first."""
        self.running[name] = node

    def snapshot(self) -> dict[str, str]:
        """The machine of every task that began."""
        return dict(self.running)


@dataclass(frozen=True)
class Cluster:
    """A connection. Handles are Ray's object references."""

    ray: Any
    board: Any
    local: bool

    def submit(
        self, run: Callable[..., Any], *args: Any, name: str, resources: Resources, retries: int,
        retried: Sequence[type[Exception]], after: Any = None,
    ) -> Any:  # fmt: skip
        """A task `run(*args, node=...)`, begun when there is room for it and `after` is done; the handle of its result."""
        options: dict[str, Any] = {
            "num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": retries, "name": name,
            "retry_exceptions": list(retried), "runtime_env": {"env_vars": _variables(resources)},
        }  # fmt: skip
        if resources.memory:
            options["memory"] = resources.memory
        return self.ray.remote(_run).options(**options).remote(self.board, name, run, args, after)

    def wait(self, handles: Sequence[Any]) -> list[Any]:
        """Those that are done; none after `POLL` seconds without news."""
        done, _ = self.ray.wait(list(handles), num_returns=1, timeout=POLL, fetch_local=False)
        more, _ = self.ray.wait(list(handles), num_returns=len(handles), timeout=0, fetch_local=False)
        return list(dict.fromkeys([*done, *more]))

    def result(self, handle: Any) -> Any:
        """What the task returned. Raises what it raised; MachineLost, Cancelled."""
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
        """The machine of every task that began, as far as the board can be asked."""
        with contextlib.suppress(self.ray.exceptions.RayError):
            found: dict[str, str] = self.ray.get(self.board.snapshot.remote(), timeout=POLL)
            return found
        return {}

    def cancel(self, handles: Sequence[Any]) -> None:
        """End tasks: they get a moment to end their engines, then their processes are killed, and engines with them."""
        left = list(handles)
        for force in (False, True):
            for handle in left:
                with contextlib.suppress(Exception):
                    self.ray.cancel(handle, force=force, recursive=True)
            if left:
                _, left = self.ray.wait(left, num_returns=len(left), timeout=GRACE, fetch_local=False)

    def require_room(self, wanted: Sequence[Resources]) -> None:
        """Refuse what a cluster of our own can never run; a cluster of others may grow.

        Raises:
            UsageError: a task asks for more than there is.
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
    """A cluster on this machine (`ray`; or that of RAY_ADDRESS), or the one at `ray://HOST:PORT`.

    Raises:
        UsageError: Ray is not installed, or the place is none.
        EnvFailed: nothing answers there.
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
    # Without an address Ray would look for the last cluster of this machine, and wait minutes for one that was killed.
    address = "local" if local else None if place == HERE else place
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **own)
    except Exception as error:
        raise EnvFailed(f"no Ray cluster at `{place}`: {error}", code="no-cluster") from error
    try:
        yield Cluster(ray, ray.remote(Board).options(num_cpus=0, max_restarts=-1).remote(), local)
    finally:
        ray.shutdown()


def _run(board: Any, name: str, run: Callable[..., Any], args: tuple[Any, ...], after: Any) -> Any:
    """On the cluster: `after` is there to be waited for."""
    import ray

    node = ray.get_runtime_context().get_node_id()[:8]
    board.started.remote(name, node)
    return run(*args, node=node)


def _variables(resources: Resources) -> dict[str, str]:
    """Variables of a task's process. Results depend on the number of threads: that of this process, else one per CPU asked for."""
    threads = os.environ.get(THREADS, str(max(1, int(resources.cpus))))
    return {THREADS: threads, **resources.env}
