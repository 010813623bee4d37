"""Groups of stored runs that differ only in their seeds.

A group is identified by values of keys, for example by a method and a value of
``partition.alpha``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedexp.analysis.presets import swapped_parts
from fedexp.core.errors import ConfigError
from fedexp.storage.identity import SEEDS, scientific
from fedexp.storage.selection import (
    ABSENT,
    Condition,
    dotted_items,
    select,
    text_of,
    value_of,
)
from fedexp.storage.stored_run import StoredRun
from fedexp.tables.seeds import Seeds

# For a key, all keys that change together with it. A method's preset chooses the
# method's parts, so these keys change with ``method``.
_PAIRS = {"method": ("method", "trainer", "aggregator", "server_optimizer")}
# Keys that are named first if runs differ in them. The method sets many other keys.
# Trials of ``fedexp-tune`` usually differ from all other runs in ``eval.held_out``.
_FIRST = ("method", "eval.held_out")
# A number that is typed as 1 and as 1.0 gives equal configs with different hashes.
EQUAL_RUNS = "older runs with equal settings and seeds"
# Largest number of names in a message.
_SHOWN = 4


def finished(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """Return the finished runs. Runs that ``reuse=false`` moved aside are left out."""
    return [run for run in runs if run.status == "done" and run.config and not run.is_aside]


def no_finished_run(runs: Sequence[StoredRun], conditions: Sequence[str]) -> ConfigError:
    """Return the error that no finished run meets the conditions."""
    asked = " ".join(conditions)
    chosen = select(runs, conditions)
    states = Counter("set aside" if run.is_aside else run.status for run in chosen)
    found = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    advice = None if runs else "name the runs' folder with --root, or start runs with fedexp"
    if chosen:
        advice = "finish these runs, or see their errors with fedexp-runs show RUN"
    return ConfigError(
        "no finished run meets the conditions",
        expected=None if chosen else unmet_text(runs, conditions),
        got=": ".join(filter(None, [asked, found])) or "no runs",
        do=advice,
    )


def unmet_text(runs: Sequence[StoredRun], conditions: Sequence[str]) -> str | None:
    """Return why no run meets the conditions, None if there are no runs.

    For each condition that no run meets on its own, the text has the values of the key.
    """
    unmet = [one for one in map(Condition.of, conditions) if not any(map(one, runs))]
    if not runs or not unmet:
        return "a run that meets all conditions, not only some of them" if runs else None
    texts = []
    for key in dict.fromkeys(one.key for one in unmet):
        values = sorted({text_of(value_of(run, key)) for run in runs}, key=sort_key)
        numbers = [value for value in values if sort_key(value)[0] == 0]
        is_range = len(numbers) > _SHOWN
        texts.append(f"{key}: {f'{numbers[0]} to {numbers[-1]}' if is_range else listed(values)}")
    return "; ".join(texts)


def newest_by_config(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """Return the newest run of each config.

    There may be several runs of one config, made by different versions of the code.

    Args:
        runs: Stored runs, the newest first.
    """
    newest: dict[str, StoredRun] = {}
    for run in runs:
        newest.setdefault(run.path.parent.name, run)
    return list(newest.values())


def shown_value(run: StoredRun, key: str) -> str:
    """Return the value of a key as tables and pictures show it.

    The value of ``method`` also names each part that replaces a part of the method's
    preset, as in ``METHOD aggregator=OPTION``.
    """
    text = text_of(value_of(run, key))
    if key != "method":
        return text
    groups = _PAIRS["method"][1:]
    parts = [part for part in swapped_parts(run) if part.partition("=")[0] in groups]
    return " ".join([text, *parts])


def seeds_of(run: StoredRun) -> Seeds:
    """Return the seeds of a run. Runs of other groups with equal seeds are paired."""
    return tuple(value_of(run, key) for key in SEEDS)


def seed_text(seeds: Seeds) -> str:
    """Return the seed as text. The seed of the data is added if it differs."""
    return str(seeds[0]) if seeds[0] == seeds[1] else f"{seeds[0]}/{seeds[1]}"


def made_by_different_code(runs: Iterable[StoredRun]) -> bool:
    """Return whether the runs of a group have different code hashes.

    Runs of different groups may have different hashes with the same code, because a
    hash covers only the modules that a config uses.
    """
    return len({run.path.name for run in runs}) > 1


def notes_on_data(runs: Iterable[StoredRun]) -> list[str]:
    """Return a note for each data set that was not the same in all runs.

    The configs of the data sets are equal, but the fingerprints of the samples are not.
    """
    found: dict[tuple[str, str, str], set[str]] = {}
    for run in runs:
        hashes = run.result.get("partition") or {}
        for key, name in (("dataset", "data_sha256"), ("proxy.dataset", "proxy_sha256")):
            if hashes.get(name):
                option = text_of(value_of(run, key))
                config = repr(_node(run.config, key))
                found.setdefault((key, option, config), set()).add(str(hashes[name]))
    return [
        f"{key}={option} was not the same in all runs: "
        f"{listed(sha[:8] for sha in sorted(different))}"
        for (key, option, _), different in found.items()
        if len(different) > 1
    ]


def _node(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def implied_keys(keys: Iterable[str]) -> list[str]:
    """Return `keys` and the keys that change together with them."""
    return [part for key in keys for part in _PAIRS.get(key, (key,))]


def differing_keys(runs: Sequence[StoredRun], implied: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the keys that affect results and that differ between runs.

    Args:
        runs: Stored runs.
        implied: Keys that are left out, together with all keys below them. Seeds are
            always left out.

    Returns:
        For each of these keys, its different values. The keys of `_FIRST` come first.
    """
    sides = [dict(dotted_items(scientific(run.resolved_config))) for run in runs]
    keys = dict.fromkeys(key for side in sides for key in (*_FIRST, *side))
    values = {
        key: sorted({text_of(side.get(key, ABSENT)) for side in sides}, key=sort_key)
        for key in keys
    }

    return {
        key: texts
        for key, texts in values.items()
        if len(texts) > 1
        and key not in SEEDS
        and not any(key == one or key.startswith(f"{one}.") for one in implied)
    }


def listed(names: Iterable[str]) -> str:
    """Return names as text. If there are more than four, the others are counted."""
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


def sort_key(text: str) -> tuple[int, float, str]:
    """Return the place of a value among others: numbers first, then texts."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text
