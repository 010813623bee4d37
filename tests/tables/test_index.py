"""What the index of tables may keep: nothing that a file outside fedexp's own config decides."""

from pathlib import Path

import pytest

from fedexp.config.compose import compose
from fedexp.tables.index import _is_lasting

MIXED = ["method=local", "clients=2"]


@pytest.mark.parametrize(
    ("overrides", "lasts"),
    [
        (["method=local"], True),
        ([*MIXED, "architectures.clients=[mlp,lenet5]"], True),
        ([*MIXED, "architectures.clients={lenet5: '0', mlp: '1'}"], True),
        ([*MIXED, "architectures.clients=names.yaml"], False),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_lists_of_architectures_last_and_files_do_not(
    overrides: list[str], lasts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("names.yaml").write_text("[mlp, lenet5]\n")
    config = compose(overrides)
    assert _is_lasting(config) is lasts
    Path("conf").mkdir()  # of the user's, which may name a file anywhere
    assert _is_lasting(config) is (lasts and len(overrides) == 1)
