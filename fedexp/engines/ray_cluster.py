"""Connection to a Ray cluster and the pool of actors on its nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.numerics import Numerics
from fedexp.engines.ray_actor import Worker

# Largest length of the path of the folder for temporary files, in bytes. fedexp and Ray
# add 84 bytes to this path. The path of a socket may have 103 bytes on macOS and 107 on
# Linux.
_LONGEST_PARENT = 19
START_SECONDS = 60.0  # seconds until at least one actor must have started

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage report to Ray's makers
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class Connection:
    """The membership of this process in a Ray cluster.

    `close` leaves the cluster only if this object has joined or started the cluster.

    Args:
        address: ``auto`` (the cluster that this machine belongs to), ``host:port``, or
            ``local`` (start a cluster for this run).
        cpus: Number of CPUs of a local cluster.
        gpus: Whether a local cluster offers the GPUs of this machine.

    Raises:
        ConfigError: There is no cluster at the address, or this process belongs to
            another cluster.
    """

    def __init__(self, address: str, cpus: int, gpus: bool) -> None:
        for name, value in _QUIET.items():  # these are read when ray is imported
            os.environ.setdefault(name, value)

        import ray

        self._folder: str | None = None
        self._own = not ray.is_initialized()
        if not self._own:
            _check_same(address, ray.get_runtime_context().gcs_address)
            return

        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address == "local":
            self._folder = _session_folder()
            options |= {
                "include_dashboard": False,
                "num_cpus": cpus,
                "num_gpus": None if gpus else 0,  # None for all GPUs of the machine
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": self._folder,
            }
        else:
            _check_reachable(address)
            # On the loopback interface, one machine may run several nodes. The node to
            # join must therefore be named.
            if address.startswith("127."):
                options["_node_ip_address"] = address.partition(":")[0]

        in_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)

        try:
            ray.init(address=address, **options)
        except (OSError, RuntimeError, ValueError) as error:
            self.close()
            raise _no_cluster(address, str(error).partition("\n")[0]) from error
        except BaseException:
            self.close()
            raise
        finally:
            if in_main:
                signal.signal(signal.SIGTERM, handler)  # ray.init sets its own handler

    def close(self) -> None:
        import ray

        if self._own:
            ray.shutdown()
        if self._folder is not None:
            # Ray's processes may still write their last log lines.
            shutil.rmtree(self._folder, ignore_errors=True)


def _session_folder() -> str:
    """Create a folder for the files of a local cluster and return its path.

    The folder is in the system's folder for temporary files, or in ``/tmp`` if the path
    of that folder is too long.
    """
    usual = tempfile.gettempdir()
    parent = usual if len(os.fsencode(usual)) <= _LONGEST_PARENT else "/tmp"
    try:
        return tempfile.mkdtemp(prefix="fedexp-ray-", dir=parent)
    except OSError as error:
        raise ConfigError(
            f"Ray could not be started: it has no folder for its sockets: {error}",
            where="TMPDIR",
            expected=f"a writable folder whose path has at most {_LONGEST_PARENT} bytes "
            "(if it is longer, /tmp is used)",
            got=usual,
        ) from error


def _check_same(asked: str, joined: str) -> None:
    if asked not in ("auto", joined):
        raise ConfigError(
            "this process already belongs to a Ray cluster",
            where="engine.address",
            expected=f"auto or {joined}",
            got=asked,
            do="set engine.address=auto",
        )


def _check_reachable(address: str) -> None:
    """Refuse an address where no process listens. Ray itself would wait for minutes."""
    import ray

    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # Ray looks for a cluster of this machine
    if host in ("localhost", "127.0.0.1"):  # Ray replaces these by the machine's own address
        own_address: Any = ray.util.get_node_ip_address  # untyped
        host = own_address()
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise _no_cluster(f"{host}:{port}", str(error)) from error


def _no_cluster(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster could be joined: {why}"
        if address != "local"
        else f"Ray could not be started: {why}",
        where="engine.address",
        expected="the address of a running cluster that this machine belongs to, or local",
        got=address,
        do="start one with 'ray start --head' "
        "(and 'ray start --address=...' on the other machines), "
        "or set engine.address=local"
        if address != "local"
        else "look at the output of 'ray start --head', or use engine=workers",
    )


@dataclass(eq=False)
class Actor:
    """An actor of the pool.

    Args:
        handle: Ray's handle.
        starting: Ray's reference to the result of `Worker.ready`, or None once the
            actor is ready.
        node: ID of the node that the actor was last ready on.
        batches: Ray's references to the results of the batches that the actor holds. It
            works on the first one.
    """

    handle: Any
    starting: Any = None
    node: str = ""
    batches: list[Any] = field(default_factory=list)


class ActorPool:
    """A pool of actors, which Ray spreads over the nodes and restarts.

    Args:
        wanted: Number of actors, or None for as many as the CPUs and GPUs of the
            cluster allow.
        threads: Number of CPUs reserved for each actor.
        gpus: Number of GPUs reserved for each actor.
        inner: Config node of the engine that each actor runs.
        numerics: Numerics of that engine.
        note: Callback that shows the user a line of text.

    Raises:
        ConfigError: The cluster is too small, or no actor could start.
    """

    def __init__(
        self,
        wanted: int | None,
        threads: int,
        gpus: float,
        inner: dict[str, Any],
        numerics: Numerics,
        note: Callable[[str], None],
    ) -> None:
        import ray

        self._ray: Any = ray  # several functions of ray have no types
        self._wanted, self._threads, self._gpus, self._note = wanted, threads, gpus, note
        self._setup = (inner, numerics, threads, torch.__version__)
        self.actors: list[Actor] = []
        self._remote = self._ray.remote(Worker).options(
            num_cpus=threads,
            num_gpus=gpus,
            max_restarts=-1,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"PYTHONPATH": _own_path(), "OMP_NUM_THREADS": str(threads)}},
        )

        room = self._room()
        if room < (wanted or 1):
            each = f"{threads} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
            raise ConfigError(
                "the Ray cluster is too small",
                where="engine",
                expected=f"{wanted or 'at least 1'} actors of {each} each, each on a single node",
                got=f"room for {room}",
                do="lower engine.actors, engine.threads or engine.gpus, or add nodes",
            )

        try:
            self.fill(room)
            why = self.wait_for_start(START_SECONDS, START_SECONDS / 4)  # the others join later
            if not self.ready:
                raise ConfigError(
                    f"no Ray actor could start: {why or f'none did within {START_SECONDS:.0f} s'}",
                    where="engine.actors",
                    do="look at 'ray status', "
                    "and check that fedexp is installed on the cluster's nodes",
                )
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.starting is None]

    @property
    def starting(self) -> dict[Any, Actor]:
        """Actors that are starting, by their reference `Actor.starting`."""
        return {actor.starting: actor for actor in self.actors if actor.starting is not None}

    def fill(self, most: int = sys.maxsize) -> None:
        """Create missing actors.

        If their number is not set, one actor more than there is room for waits for a
        new node. An autoscaler adds nodes only for actors that wait.

        Args:
            most: Largest number of actors that have work, if their number is not set.
        """
        wanted = self._wanted or min(self._room() + 1, most)
        for _ in range(wanted - len(self.actors)):
            self.actors.append(Actor(self._remote.remote(*self._setup)))
            self._start(self.actors[-1])

    def admit(self, actor: Actor) -> str | None:
        """Take in an actor whose start has ended.

        Returns:
            The reason if the start failed, or None if the actor is ready.

        Raises:
            ConfigError: The actor refused to start, for example because its machine has
                another version of torch.
        """
        try:
            found = self._ray.get(actor.starting)
        except self._ray.exceptions.RayTaskError as error:
            raise unexpected_error(error) from error
        except self._ray.exceptions.RayError as error:  # Ray does not try again
            self.actors.remove(actor)
            return str(error).strip().rpartition("\n")[2] or type(error).__name__
        if isinstance(found, FedexpError):
            raise found
        actor.node, actor.starting = found, None
        return None

    def lose(self, actor: Actor) -> list[Any]:
        """Wait for the restart of an actor that died or cannot be reached.

        Returns:
            The references of the batches that it held.
        """
        held, actor.batches = actor.batches, []
        self._start(actor)
        self._note(
            f"ray: lost an actor on node {actor.node[:8]}, "
            f"{len(self.ready)} of {len(self.actors)} left"
        )
        return held

    def wait_for_start(self, seconds: float, patience: float) -> str | None:
        """Wait until no actor is starting.

        Args:
            seconds: Maximum number of seconds to wait.
            patience: Maximum number of seconds to wait if at least one actor is ready.

        Returns:
            The reason of the last failed start, or None if no start failed.
        """
        began = time.monotonic()
        why = None
        while self.starting and time.monotonic() - began < (patience if self.ready else seconds):
            done, _ = self._ray.wait(list(self.starting), num_returns=1, timeout=1)
            for reference in done:
                why = self.admit(self.starting[reference]) or why
        return why

    def close(self) -> None:
        if self._ray.is_initialized():
            for actor in self.actors:
                self._ray.kill(actor.handle)
        self.actors = []

    def _start(self, actor: Actor) -> None:
        # Ray repeats this call until it has found room for the actor.
        actor.starting = actor.handle.ready.options(max_task_retries=-1).remote(*self._setup)

    def _room(self) -> int:
        """Return how many actors fit on the nodes of the cluster."""
        room = 0
        for node in self._ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            fit = has.get("CPU", 0) // self._threads
            if self._gpus:
                on_one = max(1, int(1 / self._gpus + 1e-6))
                fit = min(fit, has.get("GPU", 0) // max(1, self._gpus) * on_one)
            room += int(fit)
        return room


def unexpected_error(error: Exception) -> FedexpError:
    """Return the error to raise for an unexpected exception in an actor.

    The usual cause is a module that is missing on the actor's machine.
    """
    cause = getattr(error, "cause", None) or error
    return FedexpError(
        f"a Ray actor failed: {type(cause).__name__}: {str(cause).strip().rpartition(chr(10))[2]}",
        where="engine=ray",
        do="if a module is missing, install it on every node, "
        "or launch from a folder that all nodes share",
    )


def _own_path() -> str:
    """Return the import path of this process, except for its libraries.

    The folders of the interpreter and its libraries are left out, because every node
    has its own.
    """
    libraries = {Path(path) for path in sysconfig.get_paths().values()}
    own = dict.fromkeys(Path(entry or ".").resolve() for entry in sys.path)
    return os.pathsep.join(
        str(path) for path in own if path.is_dir() and libraries.isdisjoint([path, *path.parents])
    )
