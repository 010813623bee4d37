"""The keys of a search on the command line of ``fedexp-tune``.

The module imports nothing, so that ``fedexp-tune --help`` is fast.
"""

from __future__ import annotations

# Keys of the search itself, with their meaning.
SEARCH_KEYS = {
    "trials": "number of trials of the whole study, 20 by default; a grid has all its points",
    "seeds": "tuning seeds: every trial is run with each of them, 0 by default",
    "test_seeds": "seeds of the test runs, by default the five after the largest tuning seed",
    "sampler": "tpe (default) | random | grid",
    "objective": "metric of held-out data, by default that of the headline, e.g. val/global/acc",
    "halving": "factor of successive halving, e.g. 3: one trial in three goes on",
    "batch": "number of trials that are launched together",
}
