"""Comparison of stored results with the data that are present."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedexp.core.errors import StorageError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.running.experiment import data_content


def check_result_data(results: Iterable[tuple[ResolvedConfig, Mapping[str, Any]]]) -> None:
    """Refuse stored results that were computed on other data.

    Data that follow completely from the config, such as ``synthetic``, are not checked.
    Other data are checked if their files are present. The files of a data set are
    looked up once.

    Args:
        results: Stored results, each with the config of its run.

    Raises:
        StorageError: A result was computed on other data.
    """
    found: dict[str, list[str | None] | None] = {}
    for config, stored in results:
        data = repr([config[key] for key in ("dataset", "proxy", "data_root")])
        if data not in found:
            found[data] = data_content(config)
        present = found[data]
        if present is None:
            continue

        expected = [stored["partition"][name] for name in ("data_sha256", "proxy_sha256")]
        if any(
            sha256 not in (None, stored_sha256)
            for sha256, stored_sha256 in zip(present, expected, strict=True)
        ):
            raise StorageError(
                "the stored result of this config was computed on other data",
                where=str(config["data_root"]),
                expected=f"data_sha256 {expected}",
                got=f"data_sha256 {present}",
                do="use another output_root for the other data, or start again with reuse=false",
            )
