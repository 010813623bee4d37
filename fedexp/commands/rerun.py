"""The command ``fedexp-runs rerun``: run a stored config again and compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedexp.commands.errors import JOB_ERROR
from fedexp.core.errors import ConfigError
from fedexp.core.renames import RenamedError
from fedexp.storage.files import damaged, read_json
from fedexp.storage.run_folder import RunFolder, rows_of
from fedexp.storage.selection import dotted_items
from fedexp.storage.stored_run import StoredRun
from fedexp.tracking.outlet import visible

_NUMERICS = "numerics.json"


def rerun(run: StoredRun, root: Path, data_root: str | None) -> int:
    """Run the config of `run` under ``<root>/reruns`` and compare the results.

    The rerun uses the numerics of the stored run. The client cache (config key
    ``memo``) is switched off, and ``logger`` is ``local``. An earlier rerun is moved
    aside if it is finished or has other numerics, and resumed if it was interrupted.
    The stored run is not changed.

    Args:
        run: Stored run.
        root: Output root of the stored runs. The rerun has the output root
            ``<root>/reruns``.
        data_root: Folder of the data sets. If None, the folder of the stored run is
            used.

    Returns:
        The exit code: 0 if the results are bit-identical, and 1 otherwise.

    Raises:
        ConfigError: The run has no result, or a file that it used has changed. This
            error is also raised if the run is itself a rerun, because it would be
            replaced.
        StorageError: The run's ``config.yaml``, ``metrics.jsonl`` or ``numerics.json``
            is damaged.
    """
    from fedexp.commands.launching import execute_job
    from fedexp.config.compose import group_option, resolve_stored
    from fedexp.config.pinning import pin
    from fedexp.config.search_path import register
    from fedexp.running.check import CheckedJob, name_job_in_errors

    if run.status != "done" or not run.read_config():
        raise ConfigError(
            "there is no result to compare with",
            where=str(run.path),
            expected="a run that is done, with its config.yaml",
            got=run.status if run.status != "done" else "no config.yaml that can be read",
        )

    before = rows_of(run.path, run.result)
    register()
    stored = resolve_stored(run.resolved_config)
    config = stored.with_values(
        output_root=str(root / "reruns"),
        logger=dict(group_option("logger", "local", "logger", [])),
        memo={**stored.values.get("memo", {}), "enabled": False},
        reuse=True,
        **({"data_root": data_root} if data_root else {}),
    )

    with name_job_in_errors(f"the stored config of {run.name}"):
        try:
            job = CheckedJob.of(config)
        except RenamedError as error:
            error.facts["to do"] = (
                f"rerun it with fedexp {run.result.get('fedexp_version', '0.1')}, which made it"
            )
            raise

        current, then = pin(config.values), stored.contents
        for key in then:
            if current.get(key) != then[key]:
                raise ConfigError(
                    "a file that the run was made with has changed or is gone",
                    where=key,
                    expected=f"sha256 {then[key][:8]}",
                    got=str(current.get(key, "no file"))[:8],
                    do="put that file back",
                )

    folder = RunFolder.of(config)
    if folder.path.resolve() == run.path.resolve():
        raise ConfigError(
            "this run is itself a rerun and would replace itself",
            where=str(run.path),
            do=f"rerun the first one: fedexp-runs rerun {run.name} --root {root}",
        )

    _prepare_folder(folder, run)
    result = execute_job(job, "this rerun")
    return (
        result
        if isinstance(result, int)
        else _print_comparison(run, before, StoredRun(folder.path), result)
    )


def _prepare_folder(folder: RunFolder, run: StoredRun) -> None:
    """Prepare `folder` for a rerun with the numerics of `run`.

    An earlier rerun is moved aside if it is finished, or if it has other numerics. The
    latter is a rerun of another run with the same config.
    """
    folder.acquire("fail", print)
    try:
        numerics, begun = (_stored_numerics(path / _NUMERICS) for path in (run.path, folder.path))
        if folder.result() is not None or _differ(numerics, begun):
            folder.set_aside()
        if numerics is not None:
            folder.once(_NUMERICS, numerics)
    finally:
        folder.release()


def _stored_numerics(path: Path) -> dict[str, Any] | None:
    numerics = read_json(path)
    if not isinstance(numerics, dict | None):
        raise damaged(path, "it is not a JSON object")
    return numerics


def _differ(numerics: dict[str, Any] | None, begun: dict[str, Any] | None) -> bool:
    """Return whether the numerics of a rerun are not those of the stored run.

    Args:
        numerics: Numerics of the stored run, or None if they are not known.
        begun: Numerics of the rerun, or None if it was not begun.
    """
    if numerics is None or begun is None:
        return False
    if not numerics.get("engine"):
        # The rerun may have chosen its engine, and with it the number of threads.
        numerics = numerics | {"engine": begun.get("engine"), "threads": begun.get("threads")}
    return numerics != begun


def _print_comparison(
    old: StoredRun, before: list[dict[str, Any]], new: StoredRun, result: Mapping[str, Any]
) -> int:
    """Print whether the results of two runs are bit-identical, and other differences.

    Args:
        old: Stored run.
        before: Rows of its metrics.
        new: Its rerun.
        result: Result of the rerun.

    Returns:
        The exit code: 0 if the runs are bit-identical, and 1 otherwise.
    """
    found = [
        *_metric_differences(before, rows_of(new.path, result)),
        *_model_differences(old.result, result),
    ]
    print(visible(f"first:  {old.path}\nagain:  {new.path}"))

    if not found:
        known = (
            "metrics and models"
            if old.result.get("models_sha256")
            else "metrics (no hash of the models was stored)"
        )
        print(f"bit-identical: {known}")
    else:
        print("not bit-identical")

    for line in found:
        print(visible(f"  {line}"))
    others = [*_other_differences(old, new)]
    if others:
        print("other differences:" if found else "these differ nevertheless:")
    for line in others:
        print(visible(f"  {line}"))

    return JOB_ERROR if found else 0


def _metric_differences(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Iterator[str]:
    for before, after in zip(old, new, strict=False):
        names = [name for name in [*before, *after] if before.get(name) != after.get(name)]
        if names:
            first = names[0]
            change = f"{before.get(first)} -> {after.get(first)}"
            yield f"metrics from round {before['round']} on: {first} {change}"
            return
    if len(old) != len(new):
        yield f"metrics: {len(old)} rows -> {len(new)}"


def _model_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    before, after = old.get("models_sha256") or {}, new["models_sha256"]
    for name in sorted({*before, *after}):
        if before and before.get(name) != after.get(name):
            yield f"{name}: sha256 {str(before.get(name))[:8]} -> {str(after.get(name))[:8]}"


def _other_differences(old: StoredRun, new: StoredRun) -> Iterator[str]:
    """Yield the differences in code, data, numerics and versions."""
    for part, shown in (
        ("hashes", "{} hash"),
        ("partition", "{} of the data"),
        ("numerics", "{}"),
        ("environment", "{}"),
    ):
        before, after = (dict(dotted_items(run.result.get(part) or {})) for run in (old, new))
        for name in sorted({*before, *after} - {"command"}):
            if before.get(name) != after.get(name):
                change = f"{_short_text(before.get(name))} -> {_short_text(after.get(name))}"
                yield f"{shown.format(name)}: {change}"


def _short_text(value: Any) -> str:
    text = str(value)
    return text[:8] if len(text) >= 32 and text.isalnum() else text
