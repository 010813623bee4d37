"""Run random fault injections, and check that every run resumes bit-exactly.

    python -m tests.faults.campaign [--kills 300] [--seed 0] [--only METHOD ...]
                                    [--cases kills damage ...] [--write FILE]
    python -m tests.faults.campaign --short

This module is a command line, not a pytest file. It also starts as a script.

The faults are kills, damaged files, full disks, signals, dead workers and closed
output. Every method of conf/method runs on tiny data. A process dies at a random
instant, before or after it flushes, renames, deletes or appends, or before a backward
pass of its clients or its server. The run is launched again and may die again.

In the end the files must equal those of an uninterrupted run. Models, metrics,
partition, traces and pictures are compared by digest. The content of result.json is
compared by value. After every case, no process and no file in /dev/shm may remain.
After the last launch, no temporary file may remain.

Most processes are forked from one that has made all imports (`tests.fork_server`).
Therefore kill -9 ends a real process, and the campaign takes about an hour. The cases
of the group `interpreter` start a new interpreter, as a user does.

Finished cases are stored in a journal, outputs/campaign/<code>-<seed>.jsonl. The same
command continues from there. The exit code is 1 if any case failed, and the output
names these cases. If the kernel permits namespaces, the campaign has a separate
/dev/shm and small disks. Otherwise only limits on file sizes and failing flushes
simulate a full disk.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.alternate import Table, heading
from tests.faults.faulty_runs import (
    PATIENCE,
    Ended,
    Fault,
    Place,
    children,
    differences,
    facts,
    members,
    read_all,
)
from tests.fork_server import Forked
from tests.killing import kill
from tests.methods.declared import DECLARED

HERE = Path(__file__).resolve().parents[2]
# The forked processes inherit this environment
os.environ.update(PYTHONPATH=str(HERE), OMP_NUM_THREADS="1", WANDB_MODE="offline")

TINY = [
    *(
        "clients=4",
        "clients_per_round=3",
        "partition=iid",
        "local.batch_size=8",
        "model.hidden=[6,5]",
    ),
    *("limit.train=96", "limit.test=40", "threads=1", "device=cpu"),
]
SMALL = [*TINY, "rounds=3"]
LONG = [*TINY, "rounds=40", "checkpoint.every=1"]
ENGINES = {"serial": [], "vectorized": [], "workers": ["engine.workers=2"]}
GROUPS = ("kills", "damage", "disk", "signals", "workers", "stdout", "interpreter")
MOMENTS = ("any instant", "at a file's change", "before a backward pass")
SHELL = {"| head -1": "set -o pipefail; {} | head -1", ">&-": "{} >&-", ">&- 2>&-": "{} >&- 2>&-"}
JOBLIB = ("joblib's worker", "joblib's parent")
# Methods that together store every kind of file, and the overrides that are needed
KEEPING = {
    "scaffold": ["state.memory_gb=0"],
    "fedcda": ["state.memory_gb=0"],
    "ma_echo": ["trace.every=1", "trace.weights=[1]"],
    "local": [],
}
DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "one bit": lambda content, rng: _flipped(content, rng.randrange(8 * len(content))),
    "half": lambda content, rng: content[: len(content) // 2],
    "empty": lambda content, rng: b"",
}


@dataclass(frozen=True)
class Row:
    """The outcome of a case, or of a part of it.

    Args:
        what: Text in the first column of the table, "what".
        how: Text in the second column of the table, "how".
        verdict: "same bits", "named" or a description of the fault.
        kills: Number of deaths that happened.
    """

    what: str
    how: str
    verdict: str
    kills: int = 0

    @property
    def good(self) -> bool:
        return self.verdict in ("same bits", "named")


@dataclass(frozen=True)
class Case:
    """A run and a fault.

    `number` distinguishes cases that are otherwise equal.
    """

    group: str
    kind: str
    method: str = "scaffold"
    engine: str = "serial"
    number: int = 0

    @property
    def name(self) -> str:
        return "/".join(map(str, asdict(self).values()))


class Campaign:
    """An executor of cases that uses subfolders of `work`.

    Args:
        work: Folder of all cases.
        seed: Seed of the cases' random choices.
        few: Number of damaged files that are tried. None means all files.
    """

    def __init__(self, work: Path, seed: int, few: int | None = None) -> None:
        self.work, self.seed, self.few = work, seed, few
        self._references: dict[tuple[str, ...], tuple[dict[str, Any], dict[str, int], float]] = {}
        # The first process makes the imports. Their time must not count in a later run
        Place(work / "first").run(["--help"])

    def rows(self, case: Case) -> list[Row]:
        rng = random.Random(f"{self.seed} {case.name}")
        place = Place(self.work / "case")

        try:
            return list(getattr(self, f"_{case.group}")(case, rng, place))
        finally:
            if place.folder.is_mount():
                subprocess.run(["umount", str(place.folder)], check=True)
            shutil.rmtree(place.folder, ignore_errors=True)

    def arguments(self, case: Case, small: Sequence[str] = SMALL) -> list[str]:
        engine = [f"engine={case.engine}", *ENGINES[case.engine]]
        return [f"method={case.method}", *small, *DECLARED[case.method].small, *engine]

    def straight(self, arguments: list[str]) -> tuple[dict[str, Any], dict[str, int], float]:
        """Return the `facts`, event counts and seconds of an uninterrupted run."""
        key = tuple(arguments)
        if key not in self._references:
            place = Place(self.work / "straight")
            counts = place.folder / "counts.json"
            began = time.monotonic()
            ended = place.run(arguments, Fault("count", counts=str(counts)))

            if ended.code:
                sys.exit(f"the uninterrupted run failed: {' '.join(arguments)}\n{ended.said}")
            seconds = time.monotonic() - began
            self._references[key] = facts(place.outputs), json.loads(counts.read_text()), seconds
            shutil.rmtree(place.folder)
        return self._references[key]

    def finished(self, place: Place, arguments: list[str], more: Sequence[str] = ()) -> str:
        """Launch the run for the last time.

        Returns:
            "same bits", or a description of the fault.
        """
        ended = place.run([*arguments, *more])

        if ended.code:
            return f"not resumed, {ended.told}"

        differ = differences(facts(place.outputs), self.straight(arguments)[0])
        left = place.left()
        return f"DIFFERENT: {differ}" if differ else f"LEFT: {left}" if left else "same bits"

    def _kills(self, case: Case, rng: random.Random, place: Place) -> Iterator[Row]:
        arguments = self.arguments(case)
        _, counts, seconds = self.straight(arguments)

        more = [
            f"checkpoint.every={rng.choice(['1', '1', '2', 'off'])}",
            f"state.memory_gb={rng.choice([0, 1])}",
        ]

        kind = {MOMENTS[1]: "file", MOMENTS[2]: "pass"}.get(case.kind, "")
        # If only the workers make such events, count changes of files
        if kind and not counts[kind]:
            kind = "file"
        how = MOMENTS[["", "file", "pass"].index(kind)]

        kills, wanted = 0, rng.choice([1, 1, 2, 3])

        for _ in range(10 * wanted):
            if kind:
                exact = Fault(
                    kind, rng.randrange(counts[kind]), kind == "file" and rng.random() < 0.5
                )
                ended = place.run([*arguments, *more], exact)
            else:
                process = place.start([*arguments, *more])
                time.sleep(rng.random() * seconds)
                process.send_signal(signal.SIGKILL)

                ended = place.end(process)

            kills += ended.code == -signal.SIGKILL
            if ended.code not in (0, -signal.SIGKILL):
                yield Row(case.method, how, f"not resumed, {ended.told}", kills)
                return
            if ended.code == 0 and not kills:
                # The run ended before the kill
                shutil.rmtree(place.outputs)
            elif ended.code == 0 or kills == wanted:
                break

        yield Row(case.method, how, self.finished(place, arguments, more), kills)

    def _damage(self, case: Case, rng: random.Random, place: Place) -> Iterator[Row]:
        """Damage each kind of file in turn, for a run that died halfway or is done."""
        more = KEEPING[case.method]
        arguments = [*self.arguments(case), "checkpoint.every=1", *more]

        whole = Place(self.work / "whole")
        counts = self.straight(arguments)[1]
        if case.kind == "halfway":
            whole.run(arguments, Fault("file", counts["file"] - counts["file"] // 4))
        else:
            whole.run(arguments)

        found: dict[str, list[Path]] = defaultdict(list)
        for path in sorted(whole.outputs.rglob("*")):
            name = path.relative_to(whole.outputs).as_posix()
            # All methods share these files, so they are damaged once
            shared = path.parent.parent.parent.name == "runs" and path.name != "clients.json"
            # Only viewers read this file, and its format has checksums
            shown = path.suffix == ".png"
            if (
                path.is_file()
                and path.stat().st_size
                and not shown
                and (case.method == "scaffold" or not shared)
            ):
                found[_kind_of(name)].append(path)

        tried = list(itertools.product(found, DAMAGES))
        for kind, how in rng.sample(tried, self.few) if self.few else tried:
            path = rng.choice(found[kind])
            shutil.copytree(whole.outputs, place.outputs, dirs_exist_ok=True)
            target = place.outputs / path.relative_to(whole.outputs)
            target.write_bytes(DAMAGES[how](target.read_bytes(), rng))
            yield Row(f"{kind}, {case.kind}", how, self._noticed(place, arguments, target))
            shutil.rmtree(place.outputs)
        shutil.rmtree(whole.folder)

    def _noticed(self, place: Place, arguments: list[str], target: Path) -> str:
        """Check that a damaged file is noticed by a launch.

        If the launch does not use the file, the code that reads it must notice the
        damage.

        Returns:
            "same bits", "named" or a description of the fault.
        """
        ended = place.run(arguments)
        if (
            ended.code == 0
            and differences(facts(place.outputs), self.straight(arguments)[0])
            and target.exists()
        ):
            process = Forked(place.folder, read_all, str(place.outputs))
            ended = place.end(process)
        if ended.code:
            named = ended.words and target.name in ended.said
            return (place.left() or "named") if named else f"NOT NAMED, {ended.told}"
        differ = differences(facts(place.outputs), self.straight(arguments)[0])
        return f"UNNOTICED: {differ}" if differ else place.left() or "same bits"

    def _disk(self, case: Case, rng: random.Random, place: Place) -> Iterator[Row]:
        arguments = [*self.arguments(case), "checkpoint.every=1"]
        _, counts, _ = self.straight(arguments)

        fault = Fault()
        if case.kind == "small disk":
            size = f"size={rng.randrange(8, 200, 4)}k"
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place.folder)], check=True
            )
        elif case.kind == "limited file sizes":
            fault = Fault("size", rng.randrange(1500, 20000))
        else:
            fault = Fault("full", rng.randrange(counts["flush"]))

        ended = place.run(arguments, fault)
        running = [
            p for p in place.outputs.glob("runs/*/*/status.json") if b'"running"' in p.read_bytes()
        ]
        if place.folder.is_mount():
            subprocess.run(["mount", "-o", "remount,size=64m", str(place.folder)], check=True)

        verdict = self.finished(place, arguments)
        if not ended.words or ended.code not in (0, 1, 2):
            verdict = f"NOT NAMED, {ended.told}"
        elif ended.code and running:
            verdict = "left as running"
        yield Row(case.kind, case.method, verdict)

    def _signals(self, case: Case, rng: random.Random, place: Place) -> Iterator[Row]:
        arguments = self.arguments(case, LONG)
        signum, seconds = signal.Signals[case.kind], self.straight(arguments)[2]

        process = place.start(arguments)
        _wait(place.outputs.exists)
        time.sleep(rng.random() * seconds)
        process.send_signal(signum)
        ended = place.end(process)
        codes = {0, 128 + signum}
        verdict = self.finished(place, arguments)
        if ended.code not in codes or not ended.words:
            verdict = f"not quiet, {ended.told}"
        yield Row(case.kind, case.method, verdict)

    def _workers(self, case: Case, rng: random.Random, place: Place) -> Iterator[Row]:
        """Kill the worker, or the process that forks workers, during a run."""
        arguments = self.arguments(case, LONG)

        process = place.start(arguments)
        _wait(lambda: any(p.stat().st_size for p in place.outputs.glob("runs/*/*/metrics.jsonl")))
        victims = [child for child in children(process.pid) if children(child)]
        if case.kind != "fork server":
            victims = [worker for fork_server in victims for worker in children(fork_server)]
        for victim in victims[:1]:
            kill(victim)

        ended = place.end(process)
        verdict = self.finished(place, arguments) if ended.code == 0 and ended.words else ended.told
        if not victims:
            verdict = "found no process to kill"
        yield Row(f"kill -9 of {case.kind}", case.method, verdict)

    def _stdout(self, case: Case, rng: random.Random, place: Place) -> Iterator[Row]:
        arguments = self.arguments(case)
        ended = place.run(arguments, Fault(case.kind))
        verdict = self.finished(place, arguments) if ended.code == 0 and ended.words else ended.told
        yield Row({"deaf": "| head", "mute": ">&-"}[case.kind], case.method, verdict)

    def _interpreter(self, case: Case, rng: random.Random, place: Place) -> Iterator[Row]:
        """Launch the run in a new interpreter, which may get a signal during imports.

        Joblib runs the sweeps.
        """
        single, sweep = self.arguments(case, LONG), ["-m", "seed=0,1", *self.arguments(case, LONG)]
        joblib = case.kind in JOBLIB
        arguments = (
            [*sweep, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"] if joblib else single
        )
        command = [sys.executable, "-m", "fedexp", *arguments]
        if shell := SHELL.get(case.kind):
            command = ["bash", "-c", shell.format(shlex.join(command))]

        out = place.folder / "said"
        with out.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=place.folder, stdout=file, stderr=file, start_new_session=True
            )

        place.sessions.append(process.pid)
        if not shell and not joblib:
            time.sleep(rng.random() * 8)
            process.send_signal(signal.Signals[case.kind])
        elif not shell:
            _wait(
                lambda: (
                    len(
                        [
                            p
                            for p in place.outputs.glob("runs/*/*/metrics.jsonl")
                            if p.stat().st_size
                        ]
                    )
                    == 2
                )
            )
            workers = [
                pid
                for pid in members(process.pid)
                if b"loky" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            kill(process.pid if case.kind == "joblib's parent" else rng.choice(workers))
        try:
            code: int | None = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None

        ended = Ended(code, out.read_text(errors="replace"))
        orphans = place.left() if joblib else ""
        verdict = self.finished(place, sweep if joblib else single)
        quiet = ended.words or case.kind == "SIGKILL"
        if code is None or not quiet or "orphans" in orphans or (shell and code):
            verdict = f"{orphans} {ended.told}"
        yield Row(f"a true interpreter: {case.kind}", case.method, verdict)


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _kind_of(name: str) -> str:
    """Return a path with "*" instead of hashes and numbers, and without the run folder.

    An example is ``checkpoint/tensors/*.safetensors``.
    """
    name = re.sub(r"^runs/[^/]+/[^/]+/", "", name)
    return re.sub(r"[0-9a-f]{2}/[0-9a-f]{16,}|[0-9a-f]{16,}|\d+", "*", name)


def _wait(there: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not there() and time.monotonic() < deadline:
        time.sleep(0.001)


def cases(groups: Sequence[str], methods: Sequence[str], disks: bool) -> Iterator[Case]:
    """Yield all cases.

    In each of three turns over the methods, a method has another moment and another
    engine.
    """
    if "damage" in groups:
        for method, kind in itertools.product(
            [m for m in KEEPING if m in methods], ["halfway", "done"]
        ):
            yield Case("damage", kind, method)

    if "disk" in groups:
        kinds = [*(["small disk"] if disks else []), "limited file sizes", "failing flushes"]
        for kind, method, number in itertools.product(
            kinds, ["scaffold", "dense", "fedma"], range(3)
        ):
            yield Case("disk", kind, method, number=number)

    if "signals" in groups:
        for kind, engine, number in itertools.product(
            ["SIGINT", "SIGTERM", "SIGHUP"], ENGINES, range(3)
        ):
            yield Case("signals", kind, engine=engine, number=number)

    if "workers" in groups:
        for kind, number in itertools.product(["worker", "fork server"], range(3)):
            yield Case("workers", kind, engine="workers", number=number)

    if "stdout" in groups:
        yield from (Case("stdout", kind) for kind in ("deaf", "mute"))

    if "interpreter" in groups:
        for number, kind in enumerate(
            ("SIGKILL", "SIGKILL", "SIGINT", "SIGINT", "SIGTERM", *SHELL, *JOBLIB)
        ):
            yield Case("interpreter", kind, "fedavg", "workers", number)

    for number in itertools.count() if "kills" in groups else ():
        turn, place = divmod(number, len(methods))
        engine = list(ENGINES)[(2 * turn + place) % 3]
        yield Case("kills", MOMENTS[(turn + place) % 3], methods[place], engine, turn)


SHORT = (
    Case("damage", "halfway", "fedcda"),
    Case("disk", "failing flushes"),
    Case("signals", "SIGTERM"),
    Case("workers", "worker", engine="workers"),
    Case("stdout", "deaf"),
    Case("kills", MOMENTS[0], "fedma"),
    Case("kills", MOMENTS[1], "fedcda", "vectorized"),
    Case("kills", MOMENTS[2], "dense", "workers"),
)


def _has_mount_namespace() -> bool:
    """Return whether this process has a separate mount namespace.

    The namespace is used for /dev/shm and for small disks. If a namespace is permitted,
    the script starts again in one.
    """
    if "FEDEXP_CAMPAIGN" not in os.environ:
        may = subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "t", "/dev/shm"],
            capture_output=True,
            check=False,
        )
        os.environ["FEDEXP_CAMPAIGN"] = "shared" if may.returncode else "isolated"
        if not may.returncode:
            os.execvp("unshare", ["unshare", "-m", sys.executable, *sys.argv])
    return os.environ["FEDEXP_CAMPAIGN"] == "isolated"


class Journal:
    """A file with the rows of finished cases, one line per case.

    If the code changes, a new file is used.
    """

    def __init__(self, seed: int) -> None:
        code = hashlib.sha256()
        for path in sorted(
            [
                *HERE.glob("fedexp/**/*.py"),
                *HERE.glob("conf/**/*.yaml"),
                *HERE.glob("tests/faults/*.py"),
            ]
        ):
            code.update(path.read_bytes())
        self.path = HERE / "outputs" / "campaign" / f"{code.hexdigest()[:12]}-{seed}.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.done = {name: [Row(**row) for row in rows] for name, rows in map(json.loads, lines)}

    def append(self, case: Case, rows: list[Row]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps([case.name, [asdict(row) for row in rows]]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="+", metavar="METHOD", choices=sorted(DECLARED), default=sorted(DECLARED)
    )
    parser.add_argument("--cases", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument(
        "--short",
        action="store_true",
        help="a few cases of each kind, about 20 seconds; nothing is stored",
    )
    parser.add_argument("--write", type=Path, help="also write the table to this Markdown file")

    options = parser.parse_args()

    isolated = _has_mount_namespace()
    if isolated:
        subprocess.run(["mount", "-t", "tmpfs", "t", "/dev/shm"], check=True)

    journal = None if options.short else Journal(options.seed)
    chosen = SHORT if options.short else cases(options.cases, options.only, isolated)

    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), options.seed, 5 if options.short else None)
        rows: list[tuple[Case, Row]] = []
        for case in chosen:
            if case.group == "kills" and sum(row.kills for _, row in rows) >= options.kills:
                break

            found = journal.done.get(case.name) if journal else None
            if found is None:
                found = campaign.rows(case)
                if journal:
                    journal.append(case, found)
                for row in found:
                    print(
                        f"{case.name}: {row.what}, {row.how}: {row.verdict}",
                        file=sys.stderr,
                        flush=True,
                    )
            rows += [(case, row) for row in found]

    report(rows, options.write)
    if bad := [
        f"{case.name}: {row.what}, {row.how}: {row.verdict}" for case, row in rows if not row.good
    ]:
        sys.exit("\n".join(["", *bad]))


def report(rows: list[tuple[Case, Row]], path: Path | None) -> None:
    """Write the table of all rows.

    The table has one line per method and moment, one per kind of damaged file, and one
    per case of any other kind.
    """
    kills = sum(row.kills for case, row in rows if case.group == "kills")
    table = Table(path, heading(f"{kills} kills"), ["what", "how", "runs", "kills", "outcome"])

    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for _, row in sorted(
        rows,
        key=lambda pair: (GROUPS.index(pair[0].group), pair[0].group == "kills" and pair[1].what),
    ):
        found[row.what, row.how].append(row)

    for (what, how), alike in found.items():
        numbers = Counter(row.verdict for row in alike)
        outcome = ", ".join(f"{number} {verdict}" for verdict, number in numbers.most_common())
        table.row(
            [
                what.replace("|", "\\|"),
                how,
                str(len(alike)),
                str(sum(row.kills for row in alike) or ""),
                outcome,
            ]
        )


if __name__ == "__main__":
    main()
