"""The actor of the Ray engine: a process of the cluster that runs batches of jobs."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fedexp.core.build import build
from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.numerics import Numerics
from fedexp.core.trees import Tree
from fedexp.engines.ray_wire import JobBatch, Reply, SentResult, unpack
from fedexp.runtime.allocator import keep_freed_memory
from fedexp.runtime.numerics import use_numerics
from fedexp.storage.identity import code_hash


def code_of(targets: tuple[str, ...]) -> str:
    """Return the fingerprint of fedexp's and the plug-ins' code in this process.

    `targets` are the import paths of the plug-ins.

    Raises:
        ConfigError: The module of a plug-in is missing.
    """
    for target in targets:
        module = target.rpartition(".")[0]

        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"a machine of the Ray cluster cannot import '{module}': {error}",
                where=f"engine=ray, node {platform.node()}",
                do="install it on every node, or launch from a folder that all nodes share",
            ) from error
    return code_hash({str(number): {"_target_": target} for number, target in enumerate(targets)})


class Worker:
    """An actor that runs batches of jobs on its engine.

    Errors that a user can act on are returned instead of raised, so that they arrive
    unchanged.

    Args:
        *setup: Arguments of `ready`. With them, `run` opens the engine of an actor that
            Ray has restarted.
    """

    def __init__(self, *setup: Any) -> None:
        self._setup = setup
        self._opened = False
        self._notes: list[str] = []
        self._data: tuple[Any, FederatedData] | None = None
        self._shared: dict[Any, Tree] = {}
        self._checked: set[tuple[tuple[str, ...], str]] = set()

    def ready(
        self, inner: Mapping[str, Any], numerics: Numerics, threads: int, version: str
    ) -> FedexpError | str:
        """Open the inner engine under the run's numerics, unless it is open.

        Args:
            inner: Config node of the inner engine.
            numerics: Numerics of the run.
            threads: Number of threads of this actor.
            version: Version of torch in the run's process.

        Returns:
            The ID of the actor's node, or the error that prevents the use of this
            actor.
        """
        if torch.__version__ != version:
            return _differs("torch", version, torch.__version__)
        import ray

        # The setting is per thread, and Ray may call a method from another thread.
        torch.set_num_threads(threads)
        if not self._opened:
            keep_freed_memory()
            # Ray shows an actor only its own GPU.
            self._device = torch.device("cpu" if numerics.device == "cpu" else "cuda")
            numerics = replace(numerics, device=self._device.type)
            self._switches = use_numerics(numerics)  # entered for as long as the actor lives
            self._switches.__enter__()
            try:
                self._engine = build(Engine, inner, "engine.inner")  # type: ignore[type-abstract]
                self._engine.open(numerics, threads)
            except FedexpError as error:
                return error
            self._engine.note = self._notes.append
            self._opened = True
        return str(ray.get_runtime_context().get_node_id())

    def run(self, batch: JobBatch) -> Reply:
        """Run the jobs of a batch. Each chunk is one `map` of the inner engine."""
        refusal = self.ready(*self._setup)
        if isinstance(refusal, FedexpError):
            return Reply([], refusal)

        before = self._engine.stacked_steps
        results: list[SentResult] = []
        failure: FedexpError | None = None

        try:
            self._check_code(batch)
            data = self._federated(batch.data)
            for jobs in batch.jobs(self._trees(batch.trees)):
                for result in self._engine.map(jobs, data):
                    results.append(SentResult.of(result))
        except FedexpError as error:
            failure = error

        notes = self._notes[:]
        self._notes.clear()
        return Reply(results, failure, self._engine.stacked_steps - before, notes)

    def _check_code(self, batch: JobBatch) -> None:
        wanted = (batch.targets, batch.code)
        if wanted in self._checked:
            return
        mine = code_of(batch.targets)
        if mine != batch.code:
            raise _differs("the code of fedexp or of a plug-in", batch.code, mine)
        self._checked.add(wanted)

    def _federated(self, reference: Any) -> FederatedData:
        import ray

        if self._data is None or self._data[0] != reference:
            self._data = None  # at most one data set is mapped
            self._data = (reference, ray.get(reference).federated(self._device))
        return self._data[1]

    def _trees(self, sent: Mapping[int, Any]) -> dict[int, Tree]:
        """Return the trees of a batch.

        The actor keeps a tree of the object store until it gets a batch that does not
        use the tree.
        """
        import ray

        known, self._shared = self._shared, {}
        trees: dict[int, Tree] = {}
        for key, value in sent.items():
            if not isinstance(value, ray.ObjectRef):
                trees[key] = unpack(value, self._device)
                continue
            tree = known[value] if value in known else unpack(ray.get(value), self._device)
            trees[key] = self._shared[value] = tree
        return trees


def _differs(what: str, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"{what} is not the same on all machines of the Ray cluster",
        where=f"engine=ray, node {platform.node()}",
        expected=f"{expected} (the machine that launches)",
        got=got,
        do="install the same versions on every node, or share one folder",
    )
