"""Cache of client results that all runs of an output folder share.

Jobs of a run's first step do not depend on other steps. If several runs have equal jobs
in their first step, the jobs are therefore trained only once. For example, a sweep over
one-shot methods trains the local models once, and every method fuses the same models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from torch import Tensor

from fedexp.core.data import FederatedData
from fedexp.core.device import to_device
from fedexp.core.engine import Engine, answered, execute
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.numerics import Numerics
from fedexp.core.probe import Probe
from fedexp.core.trees import Tree, Trees, digest, joined, part_of
from fedexp.core.user_code import is_ours
from fedexp.core.weights import Weights
from fedexp.storage.files import delete_path, stale_files
from fedexp.storage.identity import plugin_code_hash
from fedexp.storage.tensors import load_sealed, save_sealed


class ClientCache(Engine):
    """A wrapper of an engine that looks up results of a run's first step in a cache.

    The wrapped engine runs only the jobs whose results are not found. A cache key is a
    hash of the start model, trainer, task, local training and seed. The hash also
    covers the broadcast trees, the client's state and the bytes of the client's
    samples. If several processes request the same jobs, one process trains them and the
    others wait. If the folder cannot be used or an entry is damaged, the jobs are
    trained again and the user sees a note.

    Args:
        inner: Engine that runs the jobs whose results are not in the cache.
        root: Folder of the cache, which several runs share.
        max_gb: Maximum size of the folder in GB. If it is larger, the least recently
            used entries are deleted.
        numerics: Numerics of the run. They are part of every key, because they affect
            the last bits of results.
        code: Hash of the code and the files of the training. It is part of every key.
    """

    def __init__(
        self, inner: Engine, root: Path, max_gb: float, numerics: Numerics, code: str
    ) -> None:
        self.inner = inner
        self.root = root
        self.max_bytes = max_gb * 1e9
        self.hits = self.misses = 0

        self._written = 0
        self._cached_steps = 0  # local steps of results read from the cache
        self._base = json.dumps([asdict(numerics), code])
        self._reported: set[str] = set()

    @property
    def stacked_steps(self) -> int:
        return self.inner.stacked_steps

    @property
    def cached_steps(self) -> int:
        return self._cached_steps

    def close(self) -> None:
        self.inner.close()

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        if not jobs or not all(job.first for job in jobs):
            yield from execute(self.inner, jobs, data)
            return

        parts = self.inner.split(jobs, data)
        keys = self._keys(jobs, parts, data)
        digest_of_all = hashlib.blake2b("".join(keys).encode(), digest_size=16).hexdigest()

        with self._locked(self.root / f"{digest_of_all}.lock"):
            known = [self._answers(job, key, data) for job, key in zip(jobs, keys, strict=True)]
            requests = [
                replace(
                    job, probes=tuple(probe for probe in job.probes if probe.name not in answers)
                )
                for job, answers in zip(jobs, known, strict=True)
            ]
            self._written = 0

            with contextlib.closing(self._results(requests, keys, parts, data)) as results:
                for job, key, answers, result in zip(requests, keys, known, results, strict=True):
                    for probe in job.probes:
                        if probe.name in result.probes:
                            self._save(_answer_key(key, probe), result.probes[probe.name], {})
                    yield replace(result, probes={**answers, **result.probes})

        self._evict()

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold the lock file `path`, so that only one process trains the jobs.

        If the folder cannot be written, there is no lock, and each process trains its
        jobs.
        """
        lock = FileLock(path)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                self._report(
                    "busy", "is receiving this client work from another run: waiting for it"
                )
                lock.acquire()
        except OSError as error:
            self._unusable(error)
            yield
            return

        try:
            yield
            with contextlib.suppress(OSError):
                # A process that waits for the lock will find every result in the
                # folder.
                path.unlink()
        finally:
            lock.release()

    def _unusable(self, error: OSError) -> None:
        self._report(
            "unusable", f"cannot be written ({error.strerror or error}): client work is not stored"
        )

    def _damaged(self) -> None:
        self._report("damaged", "has damaged entries: they are deleted and recomputed")

    def _report(self, kind: str, text: str) -> None:
        """Report a problem to the user, once per kind."""
        if kind not in self._reported:
            self._reported.add(kind)
            self.note(f"the client cache {self.root} {text}")

    def _results(
        self,
        jobs: Sequence[ClientJob],
        keys: list[str],
        parts: list[list[int]],
        data: FederatedData,
    ) -> Generator[ClientResult, None, None]:
        """Yield the result of each job.

        A model that is stored in the folder is read from there. The wrapped engine
        trains the other models. It also answers the probes of `jobs` on all models.
        """
        # Stored results on whose models probes must still run, by position of the job.
        # All of them are in memory at once.
        loaded = {
            i: stored
            for i, job in enumerate(jobs)
            if job.probes
            and not job.trained
            and (stored := self._load(keys[i], job, data)) is not None
        }
        is_stored = [
            job.trained or i in loaded or (not job.probes and self._path(keys[i]).exists())
            for i, job in enumerate(jobs)
        ]
        with contextlib.closing(
            _InnerRequests(self.inner, jobs, parts, data, is_stored, loaded)
        ) as requests:
            for i, (job, key) in enumerate(zip(jobs, keys, strict=True)):
                began = time.perf_counter()
                if job.trained:
                    yield requests.result(i) if job.probes else answered(job, data)
                    continue

                stored = (
                    None
                    if i in requests.missing
                    else loaded.pop(i, None) or self._load(key, job, data)
                )

                if stored is not None:
                    self.hits += 1
                    self._cached_steps += stored.num_steps
                    yield stored.with_answers(requests.result(i)) if job.probes else stored
                    continue

                result = requests.result(i)
                self.misses += 1
                self._save_model(key, result, time.perf_counter() - began)
                yield result

    def _answers(self, job: ClientJob, key: str, data: FederatedData) -> dict[str, Tree]:
        """Return the stored answers to the job's probes, by probe name.

        `key` is the cache key of the job.
        """
        found = {
            probe.name: load_sealed(
                self._path(_answer_key(key, probe)), data.train.x.device, self._damaged
            )
            for probe in job.probes
        }
        return {name: sealed[0] for name, sealed in found.items() if sealed is not None}

    def _keys(
        self, jobs: Sequence[ClientJob], parts: list[list[int]], data: FederatedData
    ) -> list[str]:
        starts = {id(job.start): job.start for job in jobs}  # clients often share a start model
        digests = {
            number: digest(start.params) + digest(start.buffers) for number, start in starts.items()
        }
        keys = [""] * len(jobs)
        for part in parts:
            sizes = [data.partition.size(jobs[i].client) for i in part]
            epochs = [jobs[i].local_training.epochs for i in part]
            for place, i in enumerate(part):
                # The clients of a part are trained in one stack. Their numbers of
                # samples and epochs decide how batches are padded and which clients
                # take a step together. The last bits of each result therefore depend on
                # these numbers of all clients in the part. If all numbers of epochs are
                # equal, the job's own local training already has this number.
                batch_group: list[Any] = [sizes, place] if len(part) > 1 else []
                if len(set(epochs)) > 1:
                    batch_group.append(epochs)
                keys[i] = self._key(jobs[i], digests[id(jobs[i].start)], batch_group, data)
        return keys

    def _key(self, job: ClientJob, start: str, batch_group: list[Any], data: FederatedData) -> str:
        index = to_device(data.positions(job.client), data.train.x.device)
        parts = [
            self._base,
            job.client,
            start,
            repr(job.start.spec),
            _described(job.trainer),
            _described(job.task),
            repr(job.local_training),
            job.seed,
            {name: digest(tree) for name, tree in job.shared.items()},
            {name: digest(tree) for name, tree in (job.state or {}).items()},
            sorted(job.frozen),
            job.trained,
            batch_group,
            # The client's samples in the order of `index`, then their normalisation and
            # augmentation.
            digest({"x": data.train.x[index], "y": data.train.y[index]}),
            data.train.mean,
            data.train.std,
            repr(data.train.augment),
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()

    def _path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.safetensors"

    def _save(self, key: str, tree: Tree, facts: dict[str, Any]) -> None:
        """Store a tree and JSON values (`facts`) under a key.

        Nothing is stored if the current call of `map` has already written `max_gb` GB.
        """
        if self._written < self.max_bytes:
            try:
                self._written += save_sealed(self._path(key), tree, facts)
            except OSError as error:
                self._unusable(error)

    def _save_model(self, key: str, result: ClientResult, seconds: float) -> None:
        parts = {
            "params": result.weights.params,
            "buffers": result.weights.buffers,
            **{f"payload/{group}": tree for group, tree in result.payload.items()},
            **{f"state/{group}": tree for group, tree in (result.state or {}).items()},
        }
        self._save(
            key,
            joined(parts),
            {
                "num_examples": result.num_examples,
                "num_steps": result.num_steps,
                "metrics": result.metrics,
                "payload": list(result.payload),
                "state": None if result.state is None else list(result.state),
                "seconds": seconds,
            },
        )

    def _load(self, key: str, job: ClientJob, data: FederatedData) -> ClientResult | None:
        found = load_sealed(self._path(key), data.train.x.device, self._damaged)
        if found is None:
            return None

        tree, facts = found
        return ClientResult(
            client=job.client,
            weights=Weights(job.start.spec, part_of(tree, "params"), part_of(tree, "buffers")),
            num_examples=facts["num_examples"],
            num_steps=facts["num_steps"],
            payload=_trees(tree, "payload", facts["payload"]),
            state=None if facts["state"] is None else _trees(tree, "state", facts["state"]),
            metrics=facts["metrics"],
        )

    def _evict(self) -> None:
        """Delete the least recently used entries until the folder fits `max_gb`.

        Old temporary files of killed processes are deleted too.
        """
        for folder in self.root.glob("??"):
            for path in stale_files(folder):
                delete_path(path)

        entries = []
        for path in self.root.glob("*/*.safetensors"):
            try:
                stat = path.stat()
            except FileNotFoundError:  # another run deletes entries too
                continue
            entries.append((stat.st_mtime, stat.st_size, path))

        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.max_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


class _InnerRequests:
    """The requests of a `ClientCache` to its wrapped engine.

    The wrapped engine trains the missing models and runs probes on stored models. If
    possible, one call of `Engine.map` (a stream) does all this work. The wrapped engine
    divides jobs into parts (`Engine.split`). The last bits of a result may depend on
    all jobs of its part. If one model of a part is missing, the whole part is therefore
    trained.

    Args:
        inner: Wrapped engine.
        jobs: All jobs of the call.
        parts: Positions of the jobs of each part.
        data: Data of the run.
        is_stored: For each job, whether it needs no training. This is so if its model
            is stored, or if the job only runs probes (`ClientJob.trained`).
        loaded: Stored results on whose models probes must run, by position of the job.

    Attributes:
        missing: Positions of the jobs that the wrapped engine trains.
    """

    def __init__(
        self,
        inner: Engine,
        jobs: Sequence[ClientJob],
        parts: list[list[int]],
        data: FederatedData,
        is_stored: list[bool],
        loaded: Mapping[int, ClientResult],
    ) -> None:
        self._inner, self._jobs, self._data = inner, jobs, data
        self._part_of = {i: part for part in parts for i in part}
        self.missing = {i for part in parts if not all(is_stored[j] for j in part) for i in part}
        asking = {i for i, job in enumerate(jobs) if job.probes}
        self._requests = {i: jobs[i] for i in sorted(self.missing | asking)} | {
            i: jobs[i].asking(result.weights, jobs[i].probes)
            for i, result in loaded.items()
            if i not in self.missing
        }
        self._done: dict[int, ClientResult] = {}
        # The wrapped engine might split a shorter list of jobs into other parts, which
        # could change the last bits of results. One stream is therefore used only in
        # three cases: every part has one job, no job is trained, or every job is
        # trained.
        each_alone = all(len(part) == 1 for part in parts)
        self._together = each_alone or not self.missing or len(self.missing) == len(jobs)
        self._stream = self._from(0)

    def result(self, i: int) -> ClientResult:
        """Return the result of job `i`. Ask for results in ascending order."""
        if i in self._requests and self._together:
            return next(self._stream)

        if i not in self._done:
            part = self._part_of[i]
            if i in self._requests:
                jobs = {j: self._requests[j] for j in part if j in self._requests}
            else:
                # The entry was evicted or damaged after `is_stored` had been computed.
                # The wrapped engine allows one stream at a time, so the current stream
                # is closed.
                self._stream.close()
                jobs = {j: self._jobs[j] for j in part}

            results = execute(self._inner, list(jobs.values()), self._data)
            self._done |= zip(jobs, results, strict=True)
            if i not in self._requests:
                self._stream = self._from(i + 1)

        return self._done.pop(i)

    def _from(self, first: int) -> Generator[ClientResult, None, None]:
        jobs = [job for i, job in self._requests.items() if i >= first] if self._together else []
        return execute(self._inner, jobs, self._data)

    def close(self) -> None:
        self._stream.close()


def _answer_key(key: str, probe: Probe) -> str:
    """Return the cache key of the answer of `probe`.

    `key` is the cache key of the job that trained the probed model.
    """
    # `key` covers the training only, and `_described` the code of user's probes only.
    parts = [key, _described(probe), plugin_code_hash(probe)]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


def _described(plugin: object) -> str:
    """Return a text that names the class of a plug-in and its values.

    For a user's plug-in, the text also has the fingerprint of its code. An aggregator
    may have made it, and then no config group names its class. Its fields are added,
    because its own text may leave out some of them.
    """
    text = f"{type(plugin).__module__}.{plugin!r}"
    if is_ours(type(plugin).__module__) or not is_dataclass(plugin):
        return text
    values = [(one.name, _text_of_value(getattr(plugin, one.name))) for one in fields(plugin)]
    return f"{text} {plugin_code_hash(plugin)} {values}"


def _text_of_value(value: object) -> str:
    """Return a value as text. Unlike its `repr`, it has all numbers of large arrays."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, Mapping):
        return repr({key: _text_of_value(one) for key, one in value.items()})
    if isinstance(value, list | tuple):
        return repr([_text_of_value(one) for one in value])
    return repr(value)


def _trees(tree: Tree, kind: str, groups: list[str]) -> Trees:
    return {group: part_of(tree, f"{kind}/{group}") for group in groups}
