"""Write the results of all leaderboards that the committed records contain, as CSV."""

from __future__ import annotations

import sys
from pathlib import Path

from fedexp.analysis.leaderboard import to_csv
from fedexp.site.leaderboards import read

RECORDS = Path(__file__).parent / "results"


def main() -> None:
    """Write the CSV file to standard output."""
    boards = [one.board for one in read(RECORDS) if one.board is not None]
    sys.stdout.write(to_csv(boards))


if __name__ == "__main__":
    main()
