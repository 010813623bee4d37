"""``fedexp-runs rerun``: a stored run's config once more, beside it, and whether the bits are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedexp.commands.errors import JOB_ERROR
from fedexp.core.errors import ConfigError
from fedexp.core.renames import RenamedError
from fedexp.storage.files import read_json
from fedexp.storage.run_folder import RunFolder, rows_of
from fedexp.storage.selection import flat
from fedexp.storage.stored_run import StoredRun

_NUMERICS = "numerics.json"


def rerun(run: StoredRun, root: Path, data_root: str | None) -> int:
    """Run the config of `run` under ``<root>/reruns`` and compare; 0 if the bits are the same, else 1.

    With the numerics of then, without memo and trackers; what an earlier rerun finished is moved aside, and one that was
    interrupted is resumed. The stored run is only read.
    """
    from fedexp.commands.launching import executed
    from fedexp.config.compose import group_option, register
    from fedexp.config.pinning import pin
    from fedexp.running.check import Checked, naming

    if run.status != "done" or not run.config:
        raise ConfigError(
            "there is no result to compare with",
            where=str(run.path),
            expected="a run that is done, with its config.yaml",
            got=run.status if run.status != "done" else "no config.yaml that can be read",
        )
    register()
    config = {
        **run.config,
        "output_root": str(root / "reruns"),
        "logger": {
            key: value for key, value in group_option("logger", "local", "logger", []).items()
        },
        "memo": {**run.config.get("memo", {}), "enabled": False},
        "reuse": True,
        **({"data_root": data_root} if data_root else {}),
    }
    with naming(f"the stored config of {run.name}"):
        try:
            Checked.of(config)
        except RenamedError as error:
            version = run.result.get("fedexp_version", "0.1")
            error.facts["to do"] = f"rerun it with fedexp {version}, which made it"
            raise
        now, then = pin(config), run.config.get("contents", {})
        for key in then:
            if now.get(key) != then[key]:
                raise ConfigError(
                    "a file that the run was made with is another one now, or gone",
                    where=key,
                    expected=f"sha256 {then[key][:8]}",
                    got=str(now.get(key, "no file"))[:8],
                    do="put that file back",
                )
    folder = RunFolder.of(config)
    if folder.path.resolve() == run.path.resolve():
        raise ConfigError(
            "this run is itself a rerun, which would take its own place",
            where=str(run.path),
            do=f"rerun the first one: fedexp-runs rerun {run.name} --root {root}",
        )
    _prepare(folder, run)
    result = executed(config, "this rerun")
    return result if isinstance(result, int) else _compare(run, StoredRun(folder.path), result)


def _prepare(folder: RunFolder, run: StoredRun) -> None:
    """Make room, and lay down the numerics of then."""
    folder.acquire("fail", print)
    try:
        if folder.result() is not None:
            folder.set_aside()
        if (numerics := read_json(run.path / _NUMERICS)) is not None:
            folder.once(_NUMERICS, numerics)
    finally:
        folder.release()


def _compare(old: StoredRun, new: StoredRun, result: Mapping[str, Any]) -> int:
    """Say whether `new`, whose result is given, has the bits of `old`, and what else differs."""
    found = [
        *_metrics(rows_of(old.path, old.result), rows_of(new.path, result)),
        *_models(old.result, result),
    ]
    print(f"first:  {old.path}\nagain:  {new.path}")
    if not found:
        known = (
            "metrics and models"
            if old.result.get("models_sha256")
            else "metrics (no hash of the models was stored)"
        )
        print(f"the same bits: {known}")
    else:
        print("not the same bits")
    for line in found:
        print(f"  {line}")
    others = [*_circumstances(old, new)]
    if others:
        print("what else differs:" if found else "though these differ:")
    for line in others:
        print(f"  {line}")
    return JOB_ERROR if found else 0


def _metrics(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Iterator[str]:
    for before, after in zip(old, new, strict=False):
        names = [name for name in [*before, *after] if before.get(name) != after.get(name)]
        if names:
            first = names[0]
            yield f"metrics from round {before['round']} on: {first} {before.get(first)} -> {after.get(first)}"
            return
    if len(old) != len(new):
        yield f"metrics: {len(old)} rows -> {len(new)}"


def _models(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    before, after = old.get("models_sha256") or {}, new["models_sha256"]
    for name in sorted({*before, *after}):
        if before and before.get(name) != after.get(name):
            yield f"{name}: sha256 {str(before.get(name))[:8]} -> {str(after.get(name))[:8]}"


def _circumstances(old: StoredRun, new: StoredRun) -> Iterator[str]:
    """Code, data, numerics and versions, where they are others."""
    for part, shown in (
        ("hashes", "{} hash"),
        ("partition", "{} of the data"),
        ("numerics", "{}"),
        ("environment", "{}"),
    ):
        before, after = (dict(flat(run.result.get(part) or {})) for run in (old, new))
        for name in sorted({*before, *after} - {"command"}):
            if before.get(name) != after.get(name):
                yield f"{shown.format(name)}: {_short(before.get(name))} -> {_short(after.get(name))}"


def _short(value: Any) -> str:
    text = str(value)
    return text[:8] if len(text) >= 32 and text.isalnum() else text
