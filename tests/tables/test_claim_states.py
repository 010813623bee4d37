"""The committed list of claims contains the states that the records give."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_the_list_of_claims_is_that_of_the_records() -> None:
    script = [sys.executable, str(SCRIPTS / "make_claim_states.py")]
    made = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    listed = (SCRIPTS / "results" / "claim_states.csv").read_text()

    def states(text: str) -> list[tuple[str, ...]]:
        names = ("table", "variant", "claim", "state", "reason")
        return [tuple(row[name] for name in names) for row in csv.DictReader(text.splitlines())]

    assert states(listed) == states(made), "run scripts/make_claim_states.py"
