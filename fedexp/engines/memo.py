"""A memo of client work: jobs that do not depend on earlier rounds are trained once and shared by all runs.

One-shot methods then fuse the same local models, and a sweep over methods trains its first round once.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from filelock import FileLock

from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.numerics import Numerics
from fedexp.core.probe import Probe
from fedexp.core.trees import Tree, Trees, digest
from fedexp.core.weights import Weights
from fedexp.storage.identity import probe_code_hash
from fedexp.storage.tensors import load_tree, save_tree


class Memo(Engine):
    """Wraps an engine; first-round jobs are looked up by content before they are run.

    Args:
        inner: the engine that trains what is missing.
        root: folder shared by runs; max_gb: the least recently used entries go beyond it.
        numerics, code: part of every key, so other bits or other code never pass for these.

    A key holds the start's digest, the trainer, task, budget, seed, broadcast trees, the client's state and its samples,
    byte for byte. Of several processes that ask for the same jobs, one trains them and the others wait.
    """

    def __init__(self, inner: Engine, root: Path, max_gb: float, numerics: Numerics, code: str) -> None:
        self.inner = inner
        self.root = root
        self.max_bytes = max_gb * 1e9
        self.hits = self.misses = 0
        self._answered = 0  # bytes of probes' answers stored; what lies in the folder is weighed after jobs alone
        self._recalled = 0  # local steps of the hits, which nobody executed
        self._base = json.dumps([asdict(numerics), code])

    @property
    def stacked_steps(self) -> int:
        return self.inner.stacked_steps

    @property
    def recalled_steps(self) -> int:
        return self._recalled

    def close(self) -> None:
        self.inner.close()

    def map(self, jobs: Sequence[ClientJob], data: FederatedData) -> Generator[ClientResult, None, None]:
        if not jobs or not all(job.first for job in jobs):
            yield from self.inner.map(jobs, data)
            return
        parts = self.inner.split(jobs, data)
        keys = self._keys(jobs, parts, data)
        together = hashlib.blake2b("".join(keys).encode(), digest_size=16).hexdigest()
        self.root.mkdir(parents=True, exist_ok=True)
        lock = self.root / f"{together}.lock"
        with FileLock(lock):
            missing = _Missing(self.inner, jobs, parts, data, [self._path(key).exists() for key in keys])
            written = 0
            for i, (job, key) in enumerate(zip(jobs, keys, strict=True)):
                began = time.perf_counter()
                result = None if i in missing.positions else self._load(key, job, data)
                if result is None:  # never stored, or evicted or damaged since we looked
                    result = missing.train(i)
                    if written < self.max_bytes:
                        written += self._save(key, result, time.perf_counter() - began)
                    self.misses += 1
                yield result
            lock.unlink(missing_ok=True)  # who waits for it finds everything trained
        self._evict()

    def probe(self, job: ClientJob, weights: Weights, data: FederatedData) -> dict[str, Tree]:
        """Answers of first rounds are stored beside the models they are about."""
        if not job.first:
            return self.inner.probe(job, weights, data)
        return {probe.name: self._answer(probe, job, weights, data) for probe in job.probes}

    def _answer(self, probe: Probe, job: ClientJob, weights: Weights, data: FederatedData) -> Tree:
        model = [digest(weights.params), digest(weights.buffers), repr(weights.spec)]
        parts = [
            self._base,
            *model,
            _described(job.task),
            _described(probe),
            probe_code_hash(probe),
            job.seed,
            *_client_data(data, job.client),
        ]
        key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()
        path, lock = self._path(key), self.root / f"{key}.lock"
        with FileLock(lock):
            try:
                tree, _ = load_tree(path, data.train.x.device)
                path.touch()
            except (FileNotFoundError, safetensors.SafetensorError):
                tree = self.inner.probe(replace(job, probes=(probe,)), weights, data)[probe.name]
                if self._answered < self.max_bytes:
                    self._answered += save_tree(path, tree, {})
            lock.unlink(missing_ok=True)
        return tree

    def _keys(self, jobs: Sequence[ClientJob], parts: list[list[int]], data: FederatedData) -> list[str]:
        digests: dict[int, str] = {}  # many clients share one start
        keys = [""] * len(jobs)
        for part in parts:
            sizes = [data.partition.size(jobs[i].client) for i in part]
            for place, i in enumerate(part):
                company = [sizes, place] if len(part) > 1 else []  # last bits depend on who is padded to whose size
                keys[i] = self._key(jobs[i], company, data, digests)
        return keys

    def _key(self, job: ClientJob, company: list[Any], data: FederatedData, digests: dict[int, str]) -> str:
        start = digests.get(id(job.start))
        if start is None:
            start = digests[id(job.start)] = digest(job.start.params) + digest(job.start.buffers)
        shared = {name: digest(tree) for name, tree in job.shared.items()}
        state = {name: digest(tree) for name, tree in (job.state or {}).items()}
        parts = [self._base, job.client, start, repr(job.start.spec), _described(job.trainer), _described(job.task)]
        parts += [repr(job.budget), job.seed, shared, state, sorted(job.frozen), company]
        parts += [*_client_data(data, job.client), repr(data.train.augment)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()

    def _path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.safetensors"

    def _save(self, key: str, result: ClientResult, seconds: float) -> int:
        tree: Tree = {f"params/{name}": value for name, value in result.weights.params.items()}
        tree |= {f"buffers/{name}": value for name, value in result.weights.buffers.items()}
        for kind, trees in (("payload", result.payload), ("state", result.state or {})):
            for group, inner in trees.items():
                tree |= {f"{kind}/{group}/{name}": value for name, value in inner.items()}
        facts = {
            "num_examples": result.num_examples,
            "num_steps": result.num_steps,
            "metrics": result.metrics,
            "payload": list(result.payload),
            "state": None if result.state is None else list(result.state),
            "seconds": seconds,
        }
        return save_tree(self._path(key), tree, facts)

    def _load(self, key: str, job: ClientJob, data: FederatedData) -> ClientResult | None:
        path = self._path(key)
        try:
            tree, facts = load_tree(path, data.train.x.device)
            path.touch()
        except (FileNotFoundError, safetensors.SafetensorError):
            return None
        self.hits += 1
        self._recalled += facts["num_steps"]
        return ClientResult(
            client=job.client,
            weights=Weights(job.start.spec, _under(tree, "params/"), _under(tree, "buffers/")),
            num_examples=facts["num_examples"],
            num_steps=facts["num_steps"],
            payload=_trees(tree, "payload", facts["payload"]),
            state=None if facts["state"] is None else _trees(tree, "state", facts["state"]),
            metrics=facts["metrics"],
        )

    def _evict(self) -> None:
        """Delete the least recently used entries beyond the cap."""
        entries = []
        for path in self.root.glob("*/*.safetensors"):
            try:
                stat = path.stat()
            except FileNotFoundError:  # another run evicts too
                continue
            entries.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


class _Missing:
    """Trains what is not stored: whole parts of the engine's split, for within a part last bits may be shared."""

    def __init__(
        self,
        inner: Engine,
        jobs: Sequence[ClientJob],
        parts: list[list[int]],
        data: FederatedData,
        stored: list[bool],
    ) -> None:
        self._inner, self._jobs, self._data = inner, jobs, data
        self._part_of = {i: part for part in parts for i in part}
        self.positions = {i for i, part in self._part_of.items() if not all(stored[j] for j in part)}
        self._done: dict[int, ClientResult] = {}
        order = sorted(self.positions)
        alone = all(len(part) == 1 for part in parts)  # else a shorter list of jobs would be split another way
        together = alone or len(order) == len(jobs)
        self._stream = zip(order, inner.map([jobs[i] for i in order], data), strict=False) if together else None

    def train(self, i: int) -> ClientResult:
        """Result of job `i`; to be asked in ascending order."""
        if self._stream is not None and i in self.positions:
            return next(self._stream)[1]
        if i not in self._done:
            part = self._part_of[i]
            self._done |= zip(part, self._inner.map([self._jobs[j] for j in part], self._data), strict=True)
        return self._done.pop(i)


def _client_data(data: FederatedData, client: int) -> list[Any]:
    """Hash of a client's inputs and targets, in its order, and how they are normalised."""
    index = torch.from_numpy(data.partition.of(client)).to(data.train.x.device)
    content = digest({"x": data.train.x[index], "y": data.train.y[index]})
    return [content, data.train.mean, data.train.std]


def _described(plugin: object) -> str:
    return f"{type(plugin).__module__}.{plugin!r}"


def _under(tree: Tree, prefix: str) -> Tree:
    return {name.removeprefix(prefix): value for name, value in tree.items() if name.startswith(prefix)}


def _trees(tree: Tree, kind: str, groups: list[str]) -> Trees:
    return {group: _under(tree, f"{kind}/{group}/") for group in groups}
