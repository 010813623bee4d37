"""Sweeper plug-ins of Hydra that optimise the number which a job returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedexp.core.errors import ConfigError
from fedexp.running.check import CheckedJob
from fedexp.tuning.objective import Objective, num_held_out


def objective_of_sweep(sweeper: Mapping[str, Any], jobs: Sequence[CheckedJob]) -> Objective | None:
    """Return the number that the jobs of an optimising sweeper return.

    It is measured on held-out data, as in ``fedexp-tune``.

    Args:
        sweeper: The node ``hydra.sweeper`` as plain values.
        jobs: Checked jobs of the sweep. Keys with an interval have their defaults.

    Returns:
        The objective, or None if the sweeper does not optimise. A sweeper optimises if
        its node has a key ``direction``, ``directions``, ``maximize`` or ``minimize``.

    Raises:
        ConfigError: The jobs hold out no samples, or the sweeper optimises in the wrong
            direction.
    """
    directions = [*_directions(sweeper, "hydra.sweeper")]
    if not directions:
        return None

    found: dict[Objective, CheckedJob] = {}
    for job in jobs:
        if not job.experiment.has_validation:
            raise ConfigError(
                "the sweeper would choose hyper-parameters on test data",
                where=directions[0][0],
                expected="held-out samples, on which every trial is measured",
                got=f"eval.held_out={job.experiment.config.eval.held_out}",
                do="set eval.held_out to a number of training samples, "
                f"e.g. eval.held_out={num_held_out(job.experiment)}",
            )
        found.setdefault(Objective.of(job.experiment), job)
    if len(found) > 1:
        raise ConfigError(
            "the jobs are not measured by the same metric",
            where=directions[0][0],
            got=", ".join(one.metric for one in found),
            do="sweep over methods that deliver the same kind of model",
        )

    (objective,) = found
    for key, value, maximises in directions:
        if maximises is None:
            raise ConfigError(
                "a job returns one number, and the sweeper expects several or another kind",
                where=key,
                expected="maximize" if objective.higher_is_better else "minimize",
                got=value,
            )
        if maximises != objective.higher_is_better:
            better = "higher" if objective.higher_is_better else "lower"
            if isinstance(value, bool):
                meant = str(not value).lower()
            else:
                meant = "maximize" if objective.higher_is_better else "minimize"
            raise ConfigError(
                f"the sweeper would look for the worst value of {objective.metric}",
                where=key,
                expected=f"{better} values are better",
                got=value,
                do=f"set {key}={meant}",
            )
    return objective


def _directions(node: Any, where: str) -> Iterator[tuple[str, Any, bool | None]]:
    """Yield the keys of a sweeper that say in which direction it optimises.

    Yields:
        The dotted key, its value, and whether the sweeper maximises. The last part is
        None if the value is none that is known, such as a list of directions.
    """
    if not isinstance(node, Mapping):
        return
    for key, value in node.items():
        name = f"{where}.{key}"
        if key in ("direction", "directions"):
            word = str(getattr(value, "name", value)).lower()
            yield name, value, {"maximize": True, "minimize": False}.get(word)
        elif key in ("maximize", "minimize") and isinstance(value, bool):
            yield name, value, value == (key == "maximize")
        else:
            yield from _directions(value, name)
