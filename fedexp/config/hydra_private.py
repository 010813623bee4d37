"""All code that uses private interfaces of Hydra or replaces attributes of Hydra.

No other module may import from ``hydra._internal``. Each function has a test in
``tests/config/test_hydra_private.py``. The test fails if a new version of Hydra changes
the interface that the function uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal import utils
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def apply_overrides(overrides: Sequence[Override], config: DictConfig) -> None:
    """Set keys in a composed config, in place.

    Args:
        overrides: Parsed overrides. Each sets a single key to a single value. None of
            them chooses an option of a config group.
        config: Composed config.

    Raises:
        HydraException: An override does not fit the config.
    """
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), config)


def uses_basic_sweeper(sweeper: DictConfig) -> bool:
    """Return whether ``hydra.sweeper`` is Hydra's basic sweeper.

    The basic sweeper runs one job for each point of a grid.
    """
    return str(sweeper.get("_target_")) == _BASIC_SWEEPER


def compose_for_multirun(overrides: Sequence[str]) -> DictConfig:
    """Compose ``conf/config.yaml`` with Hydra's own keys, as Hydra does for a multirun.

    Args:
        overrides: Overrides that hold for the whole sweep, such as the launcher.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    config = hydra.compose_config("config", list(overrides), run_mode=RunMode.MULTIRUN)
    config.hydra.mode = RunMode.MULTIRUN
    return config


@contextmanager
def multirun_launcher(
    config: DictConfig, task: TaskFunction
) -> Iterator[Callable[[Sequence[Sequence[str]]], Any]]:
    """Start Hydra's callbacks and launcher for a list of jobs, without a sweeper.

    Hydra's callbacks for the end of a multirun are called only if the ``with`` block
    ends without an exception.

    Args:
        config: Config from `compose_for_multirun`.
        task: Function that the launcher calls for each job.

    Yields:
        A function that launches jobs. Its argument is a list with the overrides of each
        job.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    callbacks = Callbacks(config)
    context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
    callbacks.on_multirun_start(config=config, config_name="config")
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=task, config=config
    )

    yield lambda jobs: launcher.launch([list(job) for job in jobs], initial_job_idx=0)

    callbacks.on_multirun_end(config=config, config_name="config")


@contextmanager
def quiet_failures(
    reported: type[Exception], call: Callable[[Callable[[], Any]], Any]
) -> Iterator[None]:
    """Prevent Hydra, in a ``with`` block, from printing errors a second time.

    Without this context manager, Hydra prints the overrides of a failed job. It also
    prints the traceback of every error whose class it does not know.

    Args:
        reported: Class of the exceptions that were already printed.
        call: Function that receives the function of Hydra's job and calls it. If `call`
            itself raises an error, Hydra reports this error.
    """
    report = utils.run_and_report
    jobs: Any = JobReturn
    returned = jobs.return_value

    def return_value(job: Any) -> Any:
        if isinstance(job._return_value, reported):
            raise job._return_value
        return returned.fget(job)

    utils.run_and_report = lambda func: report(lambda: call(func))
    jobs.return_value = property(return_value, returned.fset)
    try:
        yield
    finally:
        utils.run_and_report = report
        jobs.return_value = returned
