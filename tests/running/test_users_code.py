"""A user's own code: what it draws, what it raises, what is kept of it."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedexp.commands.run import run_command

QUICK = ["rounds=1", "clients=3", "model.hidden=[4]", "limit.train=60", "limit.test=30"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def plugin(group: str, module: str, source: str, **keys: object) -> str:
    """Write ``MODULE.py``, whose class is ``Mine``, and its YAML; the override that chooses it."""
    sys.modules.pop(module, None)
    Path(f"{module}.py").write_text(textwrap.dedent(source))
    Path("conf", group).mkdir(parents=True, exist_ok=True)
    values = "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
    Path(f"conf/{group}/{module}.yaml").write_text(f"_target_: {module}.Mine\n{values}")
    return f"{group}={module}"


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Torch's global generator as it was: no test may leave it changed."""
    with torch.random.fork_rng(devices=[]):
        yield


TRAINER = """
    from dataclasses import dataclass
    import numpy, random, torch
    from fedexp.trainers.sgd import Sgd

    @dataclass(frozen=True)
    class Mine(Sgd):
        def loss(self, net, params, buffers, batch, ctx):
            return super().loss(net, params, buffers, batch, ctx) + 0 * {draw}
"""
AGGREGATOR = """
    from dataclasses import dataclass
    import torch
    from fedexp.aggregators.mean import Mean

    @dataclass(frozen=True)
    class Mine(Mean):
        def {method}(self, {arguments}):
            torch.randn(1)
            return super().{method}({arguments})
"""


@pytest.mark.parametrize(("draw", "whose"), [
    ("torch.rand(())", "torch"), ("numpy.random.rand()", "NumPy"), ("random.random()", "Python"),
])  # fmt: skip
def test_a_trainer_that_draws_from_a_global_generator_is_refused(draw: str, whose: str, capsys) -> None:
    mine = plugin("trainer", f"draws_{whose.lower()}", TRAINER.format(draw=draw))
    with restored():
        assert run_command([mine, *QUICK]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: trainer Mine draws from " + whose) and "Traceback" not in told
    for words in ("client 0", "round 1", "ctx.noise"):
        assert words in told, told


@pytest.mark.parametrize("engine", ["vectorized engine.kernel=vmap", "workers engine.workers=2"])
def test_so_it_is_on_other_engines(engine: str, capsys) -> None:
    mine = plugin("trainer", "draws_elsewhere", TRAINER.format(draw="torch.rand(())"))
    with restored():
        assert run_command([mine, *QUICK, *f"engine={engine}".split()]) == 1
    assert "error: trainer Mine draws from torch" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "arguments"), [
    ("init", "env"), ("update", "state, results, env"), ("outcome", "state"),
])  # fmt: skip
def test_an_aggregator_that_does_is_named(method: str, arguments: str, capsys) -> None:
    mine = plugin("aggregator", f"draws_in_{method}", AGGREGATOR.format(method=method, arguments=arguments))
    with restored():
        assert run_command([mine, *QUICK]) == 1
    told = capsys.readouterr().err
    assert "error: aggregator Mine draws from torch" in told and "torch_generator(env.seed" in told, told
