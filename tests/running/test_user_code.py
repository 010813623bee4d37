"""Tests of user code: its random draws, its errors, and its stored sources."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import fedexp
from fedexp.commands.run import run_command
from fedexp.commands.runs import run_command as runs_command
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.user_code import place_of_error
from fedexp.storage import identity
from fedexp.storage.sources import commit

QUICK = ["rounds=1", "clients=3", "model.hidden=[4]", "limit.train=60", "limit.test=30"]
TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def plugin(group: str, module: str, source: str, **keys: object) -> str:
    """Write ``MODULE.py`` with a class ``Mine``, and a YAML file that selects it.

    Returns:
        The override that selects this file.
    """
    sys.modules.pop(module, None)
    Path(f"{module}.py").write_text(textwrap.dedent(source))
    Path("conf", group).mkdir(parents=True, exist_ok=True)
    values = "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
    Path(f"conf/{group}/{module}.yaml").write_text(f"_target_: {module}.Mine\n{values}")
    return f"{group}={module}"


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore torch's global generator after the block."""
    with torch.random.fork_rng(devices=[]):
        yield


TRAINER = """
    from dataclasses import dataclass
    import numpy, random, torch
    from fedexp.methods.fedavg import PlainTrainer

    @dataclass(frozen=True)
    class Mine(PlainTrainer):
        def loss(self, net, params, buffers, batch, ctx):
            return super().loss(net, params, buffers, batch, ctx) + 0 * {draw}
"""
AGGREGATOR = """
    from dataclasses import dataclass
    import torch
    from fedexp.methods.fedavg import Mean

    @dataclass(frozen=True)
    class Mine(Mean):
        def {method}(self, {arguments}):
            torch.randn(1)
            return super().{method}({arguments})
"""


@pytest.mark.parametrize(("draw", "whose"), [
    ("torch.rand(())", "torch"), ("numpy.random.rand()", "NumPy"), ("random.random()", "Python"),
])  # fmt: skip
def test_a_trainer_that_draws_from_a_global_generator_is_refused(
    draw: str, whose: str, capsys
) -> None:
    mine = plugin("trainer", f"draws_{whose.lower()}", TRAINER.format(draw=draw))
    with restored():
        assert run_command([mine, *QUICK]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: trainer Mine draws from " + whose) and "Traceback" not in told
    for words in ("client 0", "round 1", "ctx.noise"):
        assert words in told, told


def test_stacked_trainer_that_draws_globally_is_refused(capsys) -> None:
    mine = plugin("trainer", "draws_stacked", TRAINER.format(draw="torch.rand(())"))
    with restored():
        assert (
            run_command([mine, *QUICK, "engine=vectorized", "engine.kernel=vmap", "partition=iid"])
            == 1
        )
    assert "error: trainer Mine draws from torch" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "arguments"), [
    ("init", "env"), ("update", "state, results, env"),
])  # fmt: skip
def test_aggregator_that_draws_globally_is_refused_by_name(
    method: str, arguments: str, capsys
) -> None:
    mine = plugin(
        "aggregator", f"draws_in_{method}", AGGREGATOR.format(method=method, arguments=arguments)
    )
    with restored():
        assert run_command([mine, *QUICK]) == 1
    told = capsys.readouterr().err
    assert (
        "error: aggregator Mine draws from torch" in told and "torch_generator(env.seed" in told
    ), told


HOOKS = """
    from dataclasses import dataclass
    from {module} import {base}

    @dataclass(frozen=True)
    class Mine({base}):
        {body}
"""


@pytest.mark.parametrize(("group", "module", "base", "body", "said"), [
    ("trainer", "fedexp.methods.fedavg", "PlainTrainer", "def loss(self, model, x): return 0",
     ["Mine.loss cannot be called", "def loss(self, net, params, buffers, batch, ctx)", "def loss(self, model, x)"]),
    ("trainer", "fedexp.methods.fedavg", "PlainTrainer", "def needs(self): return None", ["Mine.needs", "a @property"]),
    ("trainer", "fedexp.methods.fedavg", "PlainTrainer", "correct = 3", ["Mine.correct", "a int"]),
    ("aggregator", "fedexp.methods.fedavg", "Mean", "def weight(self): return 1",
     ["Mine.weight", "def weight(self, num_examples)"]),
    ("aggregator", "fedexp.core.aggregator", "Aggregator", "def init(self, env, more): return {}",
     ["Mine lacks outcome, plan, update", "def plan(self, state, env)", "Mine.init cannot", "def init(self, env);"]),
    ("trainer", "fedexp.methods.fedavg", "PlainTrainer", "init_state = lambda self: {}; finish = lambda self, params: params",
     ["Mine.init_state cannot be called as its interface says; Mine.finish cannot", "def finish(self, params, buffers, ctx)"]),
    ("trainer", "fedexp.methods.fedavg", "PlainTrainer", "def __post_init__(self): {}['mu']",
     ["Mine cannot be made of its config: KeyError: 'mu'"]),
    ("trainer", "fedexp.methods.fedavg", "PlainTrainer", "rate: Decimal = 0", ["the type of a field is not known", "Decimal"]),
    ("aggregator", "fedexp.methods.fedavg", "Mean", "def check(self, spec, shape): shape[7]",
     ["your code raised IndexError", "HYDRA_FULL_ERROR=1"]),
])  # fmt: skip
def test_hooks_are_checked_before_anything_starts(
    group: str, module: str, base: str, body: str, said: list[str], capsys
) -> None:
    name = f"hooked_{abs(hash(body))}"
    future = "from __future__ import annotations" if "Decimal" in body else ""
    source = future + textwrap.dedent(HOOKS).format(module=module, base=base, body=body)
    mine = plugin(group, name, source)
    assert run_command([mine, *QUICK]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "Traceback" not in told and f"{name}.py:" in told
    for words in said:
        assert words in told, told
    assert not Path("outputs").exists()


def test_arguments_may_have_other_names_and_more_with_defaults() -> None:
    body = "def correct(self, g, w, context, scale=1.0): return g"
    mine = plugin(
        "trainer",
        "renamed",
        HOOKS.format(module="fedexp.methods.fedavg", base="PlainTrainer", body=body),
    )
    assert run_command([mine, *QUICK, "engine=serial"]) == 0


def test_a_data_set_that_cannot_be_read_is_told_with_its_line(capsys) -> None:
    body = "def read(self, root, download): return [][1]"
    source = HOOKS.format(module="fedexp.data.dataset", base="Dataset", body=body)
    mine = plugin("dataset", "unreadable", source, num_classes=10, shape=[1, 8, 8])
    assert run_command([mine, *QUICK]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: your code raised IndexError") and "Traceback" not in told
    assert (
        "unreadable.py:7" in told and "HYDRA_FULL_ERROR=1" in told and not Path("outputs").exists()
    )


def test_a_faulty_loss_names_its_line(capsys) -> None:
    mine = plugin("trainer", "faulty", TRAINER.format(draw="{}['x']"))
    assert run_command([mine, *QUICK]) == 1
    assert "faulty.py:9" in capsys.readouterr().err


def test_clients_that_are_not_stacked_are_told_once_and_in_the_result(capsys) -> None:
    why = "its loss cannot be vectorised"
    mine = plugin("trainer", "unstackable", TRAINER.format(draw="float(batch.y[0])"))
    stacked = ["engine=vectorized", "engine.kernel=vmap", "rounds=2"]
    assert run_command([mine, *QUICK, *stacked]) == 0
    out = capsys.readouterr().out
    assert out.count(f"clients train one after the other (trainer Mine): {why}") == 1, out
    assert "0% of them stacked" in out
    (path,) = Path().glob("outputs/runs/*/*/result.json")
    result = json.loads(path.read_text())
    assert why in result["engine_notes"][0] and result["stacked_share"] == 0
    assert result["engine_notes"][0] in (path.parent / "run.log").read_text()


ENCODINGS = {
    "byte-order mark": ("", "utf-8-sig"),
    "latin-1": ("# -*- coding: latin-1 -*-\n", "latin-1"),
}


@pytest.mark.parametrize(("cookie", "encoding"), ENCODINGS.values(), ids=ENCODINGS)
def test_module_in_another_encoding_is_identified_by_its_text(cookie: str, encoding: str) -> None:
    source = """
        from fedexp.methods.fedavg import PlainTrainer

        NAME = "Müller"

        class Mine(PlainTrainer):
            pass
    """
    module = f"encoded_as_{encoding.replace('-', '_')}"
    chosen, config = plugin("trainer", module, source), {"_target_": f"{module}.Mine"}
    file, plain = Path(f"{module}.py"), identity.code_hash(config)
    identity._module.cache_clear()
    identity._fingerprint.cache_clear()

    file.write_text(cookie + file.read_text(), encoding=encoding)
    assert run_command([*QUICK, chosen]) == 0
    os.utime(file, (0, 0))  # now the text is compared
    assert identity.code_hash(config) == plain
    (stored,) = Path("outputs/sources").iterdir()
    assert stored.read_text() == cookie + textwrap.dedent(source)

    file.write_bytes(b"# coding: unknown")
    with pytest.raises(ConfigError, match="changed after this process had read it"):
        identity.code_hash(config)


def test_sources_are_kept_once_and_a_difference_is_shown(capsys) -> None:
    subprocess.run(
        "git init -q . && git config user.name a && git config user.email a@b.c",
        shell=True,
        check=True,
    )
    Path("helpers.py").write_text("SHARE = 1.0\n")
    source = """
        from dataclasses import dataclass
        from fedexp.methods.fedavg import PlainTrainer
        import helpers

        @dataclass(frozen=True)
        class Mine(PlainTrainer):
            def loss(self, net, params, buffers, batch, ctx):
                return {share} * super().loss(net, params, buffers, batch, ctx)
        """
    mine = plugin("trainer", "kept", source.format(share="helpers.SHARE"))
    subprocess.run("git add kept.py helpers.py && git commit -q -m one", shell=True, check=True)
    assert run_command([mine, *QUICK]) == 0
    identity._module.cache_clear()  # read sources again, like a new process
    identity._fingerprint.cache_clear()
    commit.cache_clear()
    plugin("trainer", "kept", source.format(share="2"))
    assert run_command([mine, *QUICK]) == 0

    folders = sorted(
        Path().glob("outputs/runs/*/*"),
        key=lambda folder: (folder / "sources.json").stat().st_mtime_ns,
    )
    before, after = (json.loads((folder / "sources.json").read_text()) for folder in folders)
    assert list(before["modules"]) == ["helpers", "kept"]
    assert len(list(Path("outputs/sources").iterdir())) == 3  # `helpers` is stored once
    commits = [next(iter(facts["commits"].values())) for facts in (before, after)]
    head = subprocess.run(
        "git rev-parse HEAD", shell=True, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert head.startswith(commits[0]) and commits[1] == f"{commits[0]}+"

    capsys.readouterr()
    assert runs_command(["diff", *map(str, folders)]) == 0
    out = capsys.readouterr().out
    assert "-        return helpers.SHARE * super()" in out and "+        return 2 * super()" in out
    assert "SHARE = 1.0" not in out
    assert runs_command(["show", str(folders[1])]) == 0
    assert f"commit {commits[1]}" in " ".join(capsys.readouterr().out.split())


def test_data_and_networks_that_draw_are_refused(capsys) -> None:
    body = "def read(self, root, download): __import__('numpy').random.rand(); return super().read(root, download)"
    source = HOOKS.format(module="fedexp.data.digits", base="Digits", body=body)
    mine = plugin("dataset", "drawn", source, num_classes=10, shape=[1, 8, 8])
    assert run_command([mine, *QUICK]) == 1
    assert "error: dataset Mine draws from NumPy's global generator" in capsys.readouterr().err

    layer = """
        import numpy, torch
        class Mine(torch.nn.Linear):
            def __init__(self, input_shape, num_classes):
                super().__init__(64, num_classes)
                self.bias.data.fill_(numpy.random.rand())
            def forward(self, x):
                return super().forward(x.flatten(1))
        """
    assert (
        run_command([plugin("model", "noisy", layer), *(q for q in QUICK if "hidden" not in q)])
        == 2
    )
    assert "error: model Mine draws from NumPy's global generator" in capsys.readouterr().err


def write_files_of(tutorial: str) -> None:
    text = (TUTORIALS / f"{tutorial}.md").read_text()
    for name, content in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", text, flags=re.S):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)


def test_aggregator_of_a_tutorial_is_fedavg_on_data_of_another() -> None:
    write_files_of("write_a_method")
    write_files_of("write_a_dataset")
    rng = np.random.default_rng(0)
    rows = np.column_stack([np.arange(60) % 3, rng.normal(size=(60, 4))])
    Path("data").mkdir()
    np.savetxt("data/points.csv", rows, delimiter=",")
    mine = [
        "dataset=points",
        "data_root=data",
        "partition=iid",
        "clients=4",
        "rounds=2",
        "model.hidden=[4]",
    ]
    ours, theirs = (fedexp.run([*mine, f"aggregator={name}"]) for name in ("plain_mean", "mean"))
    assert ours.result["hashes"] != theirs.result["hashes"] and sum(ours.partition.sizes) == 48
    (a,), (b,) = ours.models, theirs.models
    for name, value in a.params.items():
        torch.testing.assert_close(value, b.params[name], rtol=1e-5, atol=1e-7)


MERGE = """
    from dataclasses import dataclass
    import torch
    from fedexp.methods.bases.averaging import Collecting

    @dataclass(frozen=True)
    class Mine(Collecting):
        def merge(self, updates, p):
            mean = {k: sum(u[k] for u in updates) / len(updates) for k in updates[0]}
            return {RETURNED}
"""
SHARES = """
    from dataclasses import dataclass
    import torch
    from fedexp.methods.fedavg import Mean

    @dataclass(frozen=True)
    class Mine(Mean):
        def shares(self, merging, p):
            return [RETURNED]
"""
FUSE = """
    from dataclasses import dataclass, replace
    from fedexp.methods.bases.fusion import FusionAggregator

    @dataclass(frozen=True)
    class Mine(FusionAggregator):
        def fuse(self, results, env):
            first = results[0].weights
            return replace(first, params={RETURNED}), {}
"""
STEP = """
    from dataclasses import dataclass
    from fedexp.core.server_optimizer import ServerOptimizer

    @dataclass(frozen=True)
    class Mine(ServerOptimizer):
        def step(self, state, w, direction, stats):
            return state, {RETURNED}, {}
"""


@pytest.mark.parametrize(("group", "source", "returned", "message", "line"), [
    ("aggregator", MERGE, "k: v[None] for k, v in mean.items()", "the merged update does not fit", 8),
    ("aggregator", MERGE, "k: v.sum() for k, v in mean.items()", "got:      shape (), float32", 8),
    ("aggregator", MERGE, "k: v.double() for k, v in mean.items()", "float64", 8),
    ("aggregator", MERGE, "k: v for k, v in mean.items() if 'bias' not in k", "got:      no such tensor", 8),
    ("aggregator", MERGE, "**mean, 'more': p", "at 'more'", 8),
    ("aggregator", SHARES, "0.5", "weights of the merged update do not fit", 8),
    ("aggregator", SHARES, "*p, *p, *p", "...] (9 values)", 8),
    ("aggregator", SHARES, "*p[1:]", "a list of 3 finite numbers", 8),
    ("aggregator", SHARES, "*p[1:], float('nan')", "nan", 8),
    ("aggregator", SHARES, "torch.ones(3) for each in p", "got:      list\n", 8),
    ("aggregator", SHARES, "0.0 for each in p", "got:      [0.0, 0.0, 0.0]", 8),
    ("aggregator", FUSE, "k: v[None] for k, v in first.params.items()", "the server's model does not fit", 7),
    ("server_optimizer", STEP, "k: v[None] for k, v in w.items()", "the new model does not fit", 7),
])  # fmt: skip
def test_result_that_does_not_fit_the_model_is_refused_with_its_line(
    group: str,
    source: str,
    returned: str,
    message: str,
    line: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = plugin(group, "unfit_result", source.replace("RETURNED", returned))
    assert run_command([*QUICK, chosen]) == 1
    error = capsys.readouterr().err
    assert message in error and f"unfit_result.py:{line} (Mine)" in error, error
    assert "to do:" in error and "Traceback" not in error


ONE_HOOK = """
    from dataclasses import dataclass
    import torch
    from fedexp.core.trainer import Measured
    from fedexp.methods.fedavg import PlainTrainer

    sent = []

    @dataclass(frozen=True)
    class Mine(PlainTrainer):
        def {HOOK}:
            {BODY}
"""
FINISH = "finish(self, params, buffers, ctx)"
LOSS = "loss(self, net, params, buffers, batch, ctx)"
PLAIN_LOSS = "loss = super().loss(net, params, buffers, batch, ctx); return "


@pytest.mark.parametrize(("hook", "body", "message"), [
    (FINISH, "return {}", "finish does not return a pair"),
    (FINISH, "return [], None", "the payload is not a dict of trees"),
    (FINISH, "return {'a': ctx.class_counts}, None", "not a dict of trees at 'a'"),
    (FINISH, "return {'a': {'n': 1.0}}, None", "no tensor at 'a', 'n'"),
    (FINISH, "return {'a/b': {}}, None", "text without '/'"),
    (FINISH, "return {}, {'a': {1: torch.ones(1)}}", "the new client state has an unfit name"),
    ("init_state(self, start, received)", "return {'a': torch.ones(1)}", "initial client state"),
    (LOSS, PLAIN_LOSS + "float(loss)", "got:      float"),
    (LOSS, PLAIN_LOSS + "loss[None]", "got:      shape (1,)"),
    (LOSS, PLAIN_LOSS + "Measured(loss, {'a': 1.0})", "'a' is not a scalar"),
    (LOSS, PLAIN_LOSS + "Measured(loss, None)", "the scalars are not a dict"),
])  # fmt: skip
def test_unfit_result_of_a_trainers_hook_is_refused_with_its_line(
    hook: str, body: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = textwrap.dedent(ONE_HOOK).format(HOOK=hook, BODY=body)
    chosen = plugin("trainer", "unfit_hook", source)
    assert run_command([*QUICK, chosen]) == 1
    error = capsys.readouterr().err
    assert message in error and "unfit_hook.py:11 (Mine)" in error, error
    assert "to do:" in error and "Traceback" not in error


PAYLOADS = """
    from dataclasses import dataclass
    import torch
    from fedexp.methods.fedavg import PlainTrainer

    sent = []

    @dataclass(frozen=True)
    class Mine(PlainTrainer):
        def finish(self, params, buffers, ctx):
            sent.append(ctx)
            return PAYLOAD, None

        MEAN
"""
MEAN = "update_shared = lambda self, shared, payload_mean, update, stats: payload_mean"


@pytest.mark.parametrize(("payload", "message"), [
    ("{'a': {'n': torch.ones(len(sent))}}", "of client 1 differs from that of an earlier client"),
    ("{'a': {'n': torch.ones(1)}} if len(sent) == 1 else {}", "got:      no such tensor"),
    ("{} if len(sent) == 1 else {'a': {'n': torch.ones(1)}}", "expected: no such tensor"),
    ("{'a': {'n': ctx.class_counts}}", "value.float()"),
])  # fmt: skip
def test_payloads_that_cannot_be_averaged_are_refused(payload: str, message: str) -> None:
    source = PAYLOADS.replace("PAYLOAD", payload)
    free = plugin("trainer", "free_payloads", source.replace("MEAN", "pass"))
    fedexp.run([*QUICK, "memo.enabled=false", free])  # no one reads the mean
    averaged = plugin("trainer", "averaged_payloads", source.replace("MEAN", MEAN))
    with pytest.raises(FedexpError) as refused:
        fedexp.run([*QUICK, "memo.enabled=false", averaged])
    assert message in str(refused.value)
    assert str(refused.value.facts["where"]).endswith("averaged_payloads.py:10 (Mine)")


def test_an_empty_tree_in_a_payload_has_an_empty_mean() -> None:
    source = PAYLOADS.replace("PAYLOAD", "{'a': {}}").replace("MEAN", MEAN)
    fedexp.run([*QUICK, plugin("trainer", "empty_payloads", source)])


OUTCOME = """
    from dataclasses import dataclass
    from fedexp.core.outcome import Outcome
    from fedexp.methods.fedavg import Mean

    @dataclass(frozen=True)
    class Mine(Mean):
        def outcome(self, state):
            model = state["weights"]
            return {returned}
"""


@pytest.mark.parametrize(("returned", "message"), [
    ('Outcome((model,) * 3, "local")', 'set delivers = "local" in the class'),
    ('Outcome((model,), "global", clients=(0, 1))', "expected: 1 clients, one per model"),
    ('Outcome((model,) * 3, "global")', "got:      3 models"),
    ("model", "got:      Weights"),
])  # fmt: skip
def test_an_outcome_of_another_kind_is_refused_after_one_round(
    returned: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = plugin(
        "aggregator", "odd_outcome", OUTCOME.format(returned=returned), weights="samples"
    )
    assert run_command([*QUICK, "rounds=5", chosen]) == 1
    answer = capsys.readouterr()
    assert message in answer.err and "odd_outcome.py:8 (Mine)" in answer.err, answer.err
    assert "round 2/5" not in answer.out


STATE = """
    from dataclasses import dataclass
    from typing import NamedTuple
    from fedexp.methods.fedavg import Mean

    class Own(NamedTuple):
        x: int

    @dataclass(frozen=True)
    class Mine(Mean):
        def update(self, state, results, env):
            state, metrics = super().update(state, results, env)
            return {**state, "own": Own(1)}, metrics
"""


def test_a_state_that_cannot_be_stored_is_refused_after_the_first_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = plugin("aggregator", "odd_state", STATE, weights="samples")
    assert run_command([*QUICK, "rounds=5", chosen, "checkpoint.every=5"]) == 1
    answer = capsys.readouterr()
    assert "state['own']" in answer.err and "odd_state.Own" in answer.err, answer.err
    assert "round 2/5" not in answer.out


TASK = """
    from dataclasses import dataclass
    from fedexp.tasks.classification import Classification

    @dataclass(frozen=True)
    class Mine(Classification):
        def {HOOK}:
            {BODY}
"""


@pytest.mark.parametrize(("hook", "body", "message"), [
    ("totals(self, output, y)", "return {'acc': 1.0, 'loss': 1.0}", "got:      float"),
    ("totals(self, output, y)", "return {'acc': output.sum(0)}", "the sum of 'acc'"),
    ("totals(self, output, y)", "return {}", "lack the metric"),
    ("metrics(self, totals, count)", "return {'loss': 0.5}", "missing, or is not a number"),
])  # fmt: skip
def test_unfit_metrics_of_a_task_are_refused(
    hook: str, body: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = plugin("task", "odd_task", textwrap.dedent(TASK).format(HOOK=hook, BODY=body))
    assert run_command([*QUICK, chosen]) == 1
    error = capsys.readouterr().err
    assert message in error and "odd_task.py" in error, error
    assert "Traceback" not in error


@pytest.mark.parametrize("place", [
    "user/lib/python3.11/site-packages", "system/python3/dist-packages", "overlay",
])  # fmt: skip
def test_installed_package_of_another_environment_is_not_user_code(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / place
    (folder / "heavy").mkdir(parents=True)
    (folder / "heavy/__init__.py").write_text("def fail():\n    raise ArithmeticError\n")
    (folder / "heavy-1.0.dist-info").mkdir()
    (folder / "heavy-1.0.dist-info/RECORD").write_text("heavy/__init__.py,,\n")
    (folder / "loose.py").write_text("x = 1\n")
    Path("plug_in.py").write_text("import heavy, loose, besides\n")
    Path("besides.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(folder)

    identity._module.cache_clear()
    found = identity.own_modules({"trainer": {"_target_": "plug_in.Mine"}})
    identity._module.cache_clear()
    # Modules of the user beside packages of `pip install --target` are user code.
    assert {*found} == {"plug_in", "besides"} | ({"loose"} if place == "overlay" else set())

    import heavy  # type: ignore[import-not-found]

    with pytest.raises(ArithmeticError) as raised:
        heavy.fail()
    raised_here = place_of_error(raised.value)
    assert raised_here is not None and raised_here.startswith(__file__)
    del sys.modules["heavy"]


METRICS = """
    from dataclasses import dataclass
    import numpy as np, torch
    from fedexp.methods.fedavg import Mean

    @dataclass(frozen=True)
    class Mine(Mean):
        def update(self, state, results, env):
            state, metrics = super().update(state, results, env)
            return state, {{**metrics, {metrics}}}
"""


def test_metrics_of_the_server_may_be_tensors_and_numpy_numbers() -> None:
    made = '"a": torch.tensor(1.5), "b": np.float32(2.5), "c": np.int64(3), "clients": 9'
    chosen = plugin("aggregator", "numbered", METRICS.format(metrics=made), weights="samples")
    row = fedexp.run([*QUICK, "method=fedavg", chosen]).metrics[-1]
    assert (row["a"], row["b"], row["c"], row["clients"]) == (1.5, 2.5, 3, 9)


@pytest.mark.parametrize(("made", "said"), [
    ('"a": "text"', "metric 'a' of the server cannot be logged: its value is not a number"),
    ('"a": None', "its value is not a number"),
    ('"a": torch.ones(2)', "shape (2,)"),
    ('"round": 7', "metric 'round' of the server cannot be logged: fedexp measures"),
    ('"train/loss": 0.25', "metric 'train/loss'"),
    ('"test/global/acc": 1.0', "metric 'test/global/acc'"),
])  # fmt: skip
def test_metrics_of_the_server_that_cannot_be_logged_are_refused(
    made: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = plugin("aggregator", "unlogged", METRICS.format(metrics=made), weights="samples")
    assert run_command([*QUICK, "method=fedavg", chosen]) == 1
    told = capsys.readouterr().err
    assert said in told and "unlogged.py:8" in told and "Traceback" not in told


@pytest.mark.parametrize("change", [
    'for v in ctx.state["c"].values(): v.add_(1)',
    "for v in ctx.received.params.values(): v.zero_()",
    "for v in ctx.start.values(): v.zero_()",
])  # fmt: skip
def test_a_trainer_that_changes_its_inputs_is_refused(
    change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"""
        from dataclasses import dataclass
        import torch
        from fedexp.methods.fedavg import PlainTrainer

        @dataclass(frozen=True)
        class Mine(PlainTrainer):
            def init_state(self, trainable, received):
                return {{"c": {{name: torch.zeros_like(v) for name, v in trainable.items()}}}}

            def finish(self, params, buffers, ctx):
                {change}
                return {{}}, ctx.state
    """
    chosen = plugin("trainer", "changing", source)
    assert run_command([*QUICK, "method=fedavg", chosen, "engine=serial"]) == 1
    told = capsys.readouterr().err
    assert "Mine changed a tensor of ctx in place" in told and "changing.py" in told


PARTITION = """
    from dataclasses import dataclass
    import numpy as np
    from fedexp.data.partition import Partitioner, from_owners
    from fedexp.core.data import Partition

    @dataclass(frozen=True)
    class Mine(Partitioner):
        def sample(self, labels, num_classes, clients, rng):
            {body}
"""


@pytest.mark.parametrize(("body", "said"), [
    ("labels %= 2; return from_owners(labels, clients)", "read-only"),
    ("return from_owners(labels, clients)", "does not have 3 clients"),
    ("return [[0], [1], [2]]", "a Partition of at most 3 clients"),
])  # fmt: skip
def test_partition_that_breaks_the_rules_is_refused(
    body: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = plugin("partition", "ruled", PARTITION.format(body=body))
    assert run_command([*QUICK, "method=fedavg", chosen]) in (1, 2)
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told


def test_a_plugin_that_changed_in_the_same_process_is_refused() -> None:
    source = METRICS.format(metrics='"mark": 1.0')
    chosen = plugin("aggregator", "edited", source, weights="samples")
    assert fedexp.run([*QUICK, "method=fedavg", chosen]).metrics[-1]["mark"] == 1.0
    Path("edited.py").touch()
    fedexp.run([*QUICK, "method=fedavg", chosen])
    Path("edited.py").write_text(textwrap.dedent(source.replace("1.0", "2.0")))
    with pytest.raises(ConfigError, match="'edited' changed after this process had read it"):
        fedexp.run([*QUICK, "method=fedavg", chosen])


def test_a_class_of_a_script_is_refused() -> None:
    Path("conf/trainer").mkdir(parents=True)
    Path("conf/trainer/scripted.yaml").write_text("_target_: __main__.Mine\n")
    script = """
        import fedexp
        from fedexp.methods.fedavg import PlainTrainer
        class Mine(PlainTrainer): pass
        fedexp.run(["method=fedavg", "trainer=scripted", "rounds=1"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert "a class of a script or notebook is not part of a run's code" in done.stderr
    assert not Path("outputs").exists()


def test_a_server_may_return_inference_tensors() -> None:
    source = """
        from dataclasses import dataclass, replace
        import torch
        from fedexp.methods.fedavg import Mean

        @dataclass(frozen=True)
        class Mine(Mean):
            def update(self, state, results, env):
                state, metrics = super().update(state, results, env)
                weights = state["weights"]
                with torch.inference_mode():
                    params = {name: v * 1 for name, v in weights.params.items()}
                return {**state, "weights": replace(weights, params=params)}, metrics
    """
    chosen = plugin("aggregator", "inferring", source, weights="samples")
    command = [*QUICK, "method=fedavg", "rounds=2", "engine=serial", chosen]
    assert fedexp.run(command).status == "done"


SCALED = """
    from dataclasses import dataclass, field, replace
    from pathlib import Path
    from typing import ClassVar
    from fedexp.methods.fedavg import Mean, PlainTrainer
    from fedexp.storage.files import file_sha256

    @dataclass(frozen=True)
    class Mine(PlainTrainer):
        content_keys: ClassVar[dict] = {{"path": file_sha256}}
        path: str | None = None
        scale: float = field(default=1.0, repr=False)

        def loss(self, net, params, buffers, batch, ctx):
            scale = {scale} * (self.scale if self.path is None else float(Path(self.path).read_text()))
            return scale * super().loss(net, params, buffers, batch, ctx)

    class OfServer(PlainTrainer):
        def loss(self, net, params, buffers, batch, ctx):
            return {scale} * super().loss(net, params, buffers, batch, ctx)

    @dataclass(frozen=True)
    class Server(Mean):
        def plan(self, state, env):
            return [replace(job, trainer=OfServer()) for job in super().plan(state, env)]
"""


def loss_after(*overrides: str) -> float:
    """Return the training loss of a run with one round and the client cache."""
    run = fedexp.run([*QUICK, "method=fedavg", "engine=serial", *overrides])
    return float(run.metrics[0]["train/loss"])


def test_client_cache_depends_on_the_content_of_a_trainers_file() -> None:
    chosen = plugin("trainer", "filed", SCALED.format(scale=1.0), path="scale.txt")
    for text, expected in (("1.0", pytest.approx(2.3, abs=0.3)), ("0.0", 0.0)):
        Path("scale.txt").write_text(text)
        assert loss_after(chosen) == expected


def test_client_cache_depends_on_fields_that_a_trainers_text_leaves_out() -> None:
    chosen = plugin("trainer", "hidden", SCALED.format(scale=1.0), path=None, scale=1.0)
    assert loss_after(chosen) > 1.0
    assert loss_after(chosen, "trainer.scale=0.0") == 0.0


def test_client_cache_depends_on_the_code_of_a_trainer_that_a_server_makes() -> None:
    command = [*QUICK, "method=fedavg", "engine=serial", "aggregator._target_=served.Server"]
    for scale in (1.0, 0.0):
        plugin("trainer", "served", SCALED.format(scale=scale))
        code = f"import fedexp; print(fedexp.run({command!r}).metrics[0]['train/loss'])"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert (float(done.stdout) == 0.0) is (scale == 0.0)
