"""Logger of Weights & Biases.

It is offline by default. Each job is one W&B run, whose test and validation metrics are
plotted over rounds.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedexp.tracking.logger import Logger, RunInfo
from fedexp.tracking.pictures import pictures_of

_EXIT_CODES = {"done": 0, "interrupted": 130}  # any other status has exit code 1
_NAME, _TAG = 128, 64  # maximum lengths that W&B accepts
_MAX_WAIT = 30.0  # seconds for a server that does not answer
# IDs of the loggers that have an open run. All runs of a process share one W&B service,
# which is a background process that W&B starts.
_open: set[int] = set()
_lock = threading.Lock()
# For each sweep in this process, the reason why W&B's server could not be reached. The
# later jobs of the sweep do not try again.
_unreached: dict[str, str] = {}
# Keys of result.json whose values are mappings. The summary of a W&B run has each value
# of such a mapping under the name ``<key>/<name>``.
_SUMMARY_GROUPS = (
    "headline",
    "best",
    "mean_last_10",
    "std_last_10",
    "rounds_to",
    "seconds",
    "peak_memory",
    "bytes",
    "hashes",
)
_SUMMARY_NAMES = (
    "folder",
    "rounds",
    "rounds_to_target",
    "local_steps",
    "steps_per_second",
    "stacked_share",
    "attempts",
)


@dataclass
class Wandb(Logger):
    """A logger that writes the metrics of a fedexp run into one W&B run.

    The W&B run has the id of the fedexp run. Its files are in ``<run folder>/wandb``.

    In the mode ``offline``, the network is not used. Every attempt at the run writes
    all rounds again. The latest offline folder is therefore complete and can be
    uploaded with ``wandb sync``.

    In the mode ``online``, only rounds that W&B's server does not have are sent. If the
    server cannot be reached, the logger continues offline. With ``strict``, the fedexp
    run stops instead.

    Args:
        project: W&B project that contains the runs.
        entity: W&B entity (user or team) that owns the project. None: the account's
            default.
        mode: ``offline`` or ``online``.
    """

    project: str = "fedexp"
    entity: str | None = None
    mode: Literal["offline", "online"] = "offline"
    _run: Any = field(init=False, default=None, repr=False)
    _folder: Path = field(init=False, default=Path(), repr=False)
    _sent: int = field(init=False, default=0, repr=False)  # steps up to this one are in W&B already

    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        """Start or resume the W&B run.

        Rows of earlier attempts that W&B lacks are sent.
        """
        with _environment(run.folder / "wandb"):
            import wandb

            try:
                self._run = self._start(wandb, run)
            except BaseException:
                if _is_last_run():
                    # Otherwise W&B would keep the run that did not start.
                    wandb.teardown()
                raise

        self._folder = run.folder
        with _lock:
            _open.add(id(self))
        self._run.define_metric("*", step_metric="step")  # a round may have several steps
        for measured in ("test/*", "val/*"):
            self._run.define_metric(measured, step_metric="round")
        # An interrupted attempt may have sent rounds that are now computed again. Their
        # values are the same, so they are not sent again.
        self._sent = int(self._run.summary.get("step", 0)) if self._run.resumed else 0
        if self._sent and not history:
            self.note(
                f"W&B already has {self._sent} steps under this run ID and keeps their values. If "
                "you started again with reuse=false, delete that run in W&B to log the new values"
            )
        for row in history:
            self.log(row)
        for part in (run.folder / "wandb").glob(f"offline-run-*-{run.id}*"):
            # The new offline folder also has the rounds of earlier attempts. Syncing
            # old and new folders would repeat or lose rounds.
            if part.name != Path(self._run.settings.sync_dir).name:
                shutil.rmtree(part, ignore_errors=True)

    def log(self, row: dict[str, Any]) -> None:
        """Send one step, with its pictures, unless W&B has it."""
        import wandb

        if row["step"] > self._sent:
            pictures = {
                f"pictures/{name}": wandb.Image(str(path))
                for name, path in pictures_of(self._folder, row["step"]).items()
            }
            # With commit, the row is sent now and not with the next step.
            self._run.log({**row, **pictures}, step=row["step"], commit=True)
            self._sent = row["step"]

    def summarize(self, values: dict[str, Any]) -> None:
        """Put values into the summary of the open run."""
        self._run.summary.update(values)

    def log_artifact(self, name: str, kind: str, files: Sequence[Path]) -> None:
        """Log files as an artifact of the open run.

        Args:
            name: Name of the artifact. W&B allows letters, digits, dots, hyphens and
                underscores.
            kind: Type of the artifact.
            files: Files to log.
        """
        import wandb

        artifact = wandb.Artifact(name, type=kind)
        for file in files:
            # W&B reads the files in place and makes no copy in its cache.
            artifact.add_file(str(file), policy="immutable", skip_cache=True)
        self._run.log_artifact(artifact)

    def close(self, status: str, result: dict[str, Any] | None) -> None:
        """Fill the summary and finish the W&B run with an exit code for its status."""
        if self._run is None:
            return
        self._run.summary["status"] = status
        if result is not None:
            self._run.summary.update(_summary(result))

        run, self._run = self._run, None
        try:
            run.finish(exit_code=_EXIT_CODES.get(status, 1))
        finally:
            with _lock:
                _open.discard(id(self))
            if _is_last_run():
                import wandb

                wandb.teardown()  # the service writes its last records to disk as it ends

    def abandon(self) -> bool:
        """Kill W&B's service, because W&B's exit hook would wait for it forever.

        If other runs still use the service, it is killed only when this process ends.

        Returns:
            Whether the service was killed at once, so that the hanging call returns.
        """
        with _lock:
            _open.discard(id(self))
        if _is_last_run():
            return _kill_service()
        atexit.register(_kill_service)  # registered later than W&B's hook, so called earlier
        return False

    def _start(self, wandb: Any, run: RunInfo) -> Any:
        if self.mode == "online":
            try:
                if not self.strict and run.group in _unreached:
                    raise wandb.errors.CommError(_unreached[run.group])

                wandb.setup(wandb.Settings(silent=True))  # W&B's lines would break the progress bar
                if not wandb.login(prompt=False, verify=False):
                    # The login also fails with WANDB_MODE=offline. Without this check,
                    # W&B would wait for the user to type a key.
                    raise wandb.errors.UsageError(
                        "no W&B account: `wandb login`, or set WANDB_API_KEY"
                    )

                online = self._init(wandb, run, "online")
            except (wandb.errors.Error, TimeoutError, OSError) as error:
                if self.strict or not _is_last_run():
                    raise

                # Otherwise W&B would keep the run that did not start. The offline run
                # has the same id.
                wandb.teardown()
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                if run.group is not None:
                    _unreached[run.group] = reason
                self.note(
                    f"warning: W&B cannot be used online ({reason}). "
                    "Continuing offline. Upload later with: "
                    f"wandb sync {run.folder / 'wandb'}/offline-run-*"
                )
            else:
                self.note(f"W&B: {online.url}")
                return online

        return self._init(wandb, run, "offline")

    def _init(self, wandb: Any, run: RunInfo, mode: str) -> Any:
        wanted = {
            "console": "off",
            "silent": True,
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "disable_job_creation": True,
            "x_disable_stats": True,
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
            "init_timeout": min(_MAX_WAIT, self.timeout / 2),  # leaves time to continue offline
            "finish_timeout": self.timeout,  # also the limit of W&B's exit hook
        }
        # Versions of W&B have different settings. If a version does not have a setting,
        # it does not need it.
        known = {key: value for key, value in wanted.items() if key in wandb.Settings.model_fields}
        return wandb.init(
            project=self.project,
            entity=self.entity,
            mode=mode,
            dir=str(run.folder),
            id=run.id,
            resume="allow",
            reinit="create_new",  # do not reuse another open run of this process
            group=run.group,
            name=run.name[:_NAME],
            tags=[tag[:_TAG] for tag in run.tags],
            job_type=str(run.config.get("method", "run")),
            config=flat_config(run.config),
            settings=wandb.Settings(**known),
        )


def _is_last_run() -> bool:
    """Return whether no other run in this process needs W&B's service.

    Another run may be one of this class, or one that the user's code opened.
    """
    import wandb

    with _lock:
        return not _open and wandb.run is None


def _kill_service() -> bool:
    """Kill the service process that W&B started for this process, even if it hangs.

    The records that the service has received are already on disk.

    Returns:
        Whether there was such a process.
    """
    from wandb.sdk import wandb_setup

    # W&B has no public handle of its service.
    connection = getattr(wandb_setup.singleton(), "_connection", None)
    process = getattr(getattr(connection, "_proc", None), "_process", None)
    if process is None:
        return False
    process.kill()
    # W&B's exit hook would print a traceback, because the connection is lost.
    forget_exit_hook = getattr(connection, "_cleanup", None)
    if forget_exit_hook is not None:
        forget_exit_hook()
    return True


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """Set environment variables of W&B while a ``with`` block imports and starts W&B.

    They put W&B's folders inside `folder` and switch its error reports off. Environment
    variables that the user has set do not change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "data"),
        "WANDB_ARTIFACT_DIR": str(folder / "artifact"),
        "WANDB_ERROR_REPORTING": "false",
    }
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ |= ours

    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved config with plain values for the keys that people filter by.

    ``method`` and ``dataset`` become plain names. The settings of the data set are
    moved to ``dataset_config``. The key ``alpha`` is added. It is the partition's
    ``alpha``, or None if the partition has none.
    """
    choices = config.get("choices", {})
    dataset = config.get("dataset")
    return {
        **config,
        **({"dataset_config": dataset} if isinstance(dataset, dict) else {}),
        "method": config.get("method", choices.get("method")),
        "dataset": choices.get("dataset"),
        "alpha": (config.get("partition") or {}).get("alpha"),
    }


def _summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a run's summary: headline, best, means, costs and hashes.

    Values that are missing or not finite are left out.
    """
    summary = {
        f"{group}/{name}": value
        for group in _SUMMARY_GROUPS
        for name, value in (result.get(group) or {}).items()
    }
    summary["partition/sha256"] = (result.get("partition") or {}).get("sha256")
    summary |= {
        name: value
        for name, value in result.items()
        if name in _SUMMARY_NAMES or name.startswith("oracle/")
    }
    return {
        name: value
        for name, value in summary.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }
