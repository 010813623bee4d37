"""Tests of local, ensemble and centralised training and of FedProx in special cases."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from fedexp.core.errors import ConfigError
from fedexp.core.weights import Weights
from fedexp.evaluation.evaluate import Evaluator
from fedexp.tasks.classification import Classification
from tests.world import assert_same, make_data, make_world


def test_local_with_one_client_equals_fedavg() -> None:
    data = make_data((20,))
    a = make_world("method=local", "rounds=1", data=data)
    b = make_world("method=fedavg", "rounds=1", data=data)
    assert_same(a.models(a.run()), b.models(b.run()), 1e-12)


def test_ensemble_has_the_models_of_local_training() -> None:
    a, b = make_world("method=local"), make_world("method=ensemble")
    assert_same(a.models(a.run()), b.models(b.run()))


def test_local_models_go_on_from_where_they_were() -> None:
    """Local models continue training from their last weights.

    Two rounds of one epoch equal one round of two epochs, with one batch per epoch.
    """
    two = make_world("method=local", "rounds=2", "local.batch_size=100")
    one = make_world("method=local", "rounds=1", "local.batch_size=100", "local.epochs=2")
    assert_same(two.models(two.run()), one.models(one.run()), 1e-12)


def test_centralized_full_batch_step_equals_fedavg() -> None:
    overrides = ("rounds=4", "local.batch_size=1000")
    a, b = make_world("method=centralized", *overrides), make_world("method=fedavg", *overrides)
    assert_same(a.models(a.run()), b.models(b.run()), 1e-10)


@pytest.mark.parametrize("combine", ["logits", "probs"])
def test_ensemble_of_copies_is_the_model(combine: str) -> None:
    data = make_data((14,) * 3, copies=True)
    world = make_world(
        "method=ensemble", f"aggregator.combine={combine}", "local.batch_size=100", data=data
    )
    alone = make_world("method=local", "local.batch_size=100", data=data)
    evaluate = Evaluator(world.experiment.task, 7)
    together = evaluate(world.aggregator.outcome(world.run().state), data.test, "test")
    each = evaluate(alone.aggregator.outcome(alone.run().state), data.test, "test")
    assert together["test/ensemble/acc"] == pytest.approx(each["test/local/acc_mean"])
    if combine == "probs":
        assert together["test/ensemble/loss"] == pytest.approx(each["test/local/loss_mean"])


def test_local_models_with_an_infinite_or_nan_loss_are_measured() -> None:
    world = make_world("method=local")
    outcome = world.aggregator.outcome(world.run().state)
    sound = outcome.models[0]
    diverged = Weights(
        sound.spec, {name: value * math.inf for name, value in sound.params.items()}, sound.buffers
    )
    # No output is NaN, but the probability of one class is exactly zero
    output_bias = [*sound.params][-1]
    bias = sound.params[output_bias].clone()
    bias[int(world.data.test.y[0])] = -math.inf
    certain = Weights(sound.spec, {**sound.params, output_bias: bias}, sound.buffers)
    evaluate = Evaluator(world.experiment.task, 7)
    for models in ((sound, diverged), (diverged, sound)):
        found = evaluate(replace(outcome, models=models), world.data.test, "test")
        assert all(math.isnan(found[f"test/local/loss_{of}"]) for of in ("mean", "std", "min"))
        assert math.isfinite(found["test/local/acc_std"])

    for models in ((sound, certain), (certain, sound)):
        found = evaluate(replace(outcome, models=models), world.data.test, "test")
        assert found["test/local/loss_mean"] == math.inf
        assert math.isfinite(found["test/local/loss_min"])
        assert math.isnan(found["test/local/loss_std"])


def test_an_ensembles_loss_stays_finite_where_probabilities_underflow() -> None:
    """The loss of an ensemble stays finite if probabilities underflow.

    Two float32 members give a class logits 200 and 300 below the best. The loss is
    log((e^-200 + e^-300) / 2).
    """
    members = [torch.tensor([[0.0, -gap]]) for gap in (200.0, 300.0)]
    log_p = Classification().combine(members, "probs", None)
    torch.testing.assert_close(log_p, torch.tensor([[0.0, -200.0 - math.log(2)]]))
    weighted = Classification().combine(members, "probs", torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(weighted, members[1])


def test_evaluation_does_not_depend_on_its_batches() -> None:
    world = make_world("method=fedavg")
    outcome = world.aggregator.outcome(world.run().state)
    results = [
        Evaluator(world.experiment.task, size)(outcome, world.data.test, "test")
        for size in (1, 7, 1000)
    ]
    for name in results[0]:
        assert (
            results[0][name] == pytest.approx(results[1][name]) == pytest.approx(results[2][name])
        )


def test_different_starts_average_the_models() -> None:
    """The result is the mean by samples of local models with different starts.

    From the second round on, all clients start from this mean.
    """
    mean, alone = (
        make_world(f"method={method}", "init=different", "rounds=1")
        for method in ("fedavg", "local")
    )
    starts = [mean.env.initial_weights(client).params["hidden.0.weight"] for client in (None, 0, 1)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(starts, 2))
    shares = [float(n) / 58 for n in mean.env.sizes]
    models, snapshot = alone.models(alone.run()), mean.run()
    expected = {
        name: sum(p * m[name] for p, m in zip(shares, models, strict=True)) for name in models[0]
    }
    assert_same(mean.models(snapshot), [expected], 1e-12)
    for job in mean.aggregator.plan(snapshot.state, mean.env.at(1)):
        assert_same([job.start.params], mean.models(snapshot))


def test_fedprox_pulls_harder_with_larger_mu() -> None:
    lengths = []
    for mu in ("0.0", "1.0", "5.0"):
        world = make_world("method=fedprox", f"trainer.mu={mu}", "rounds=1", "local.epochs=5")
        start = world.aggregator.init(world.env)["weights"].params
        after = world.run().state["weights"].params
        lengths.append(float(sum(((after[k] - start[k]) ** 2).sum() for k in start)))
    assert lengths[0] > lengths[1] > lengths[2]


def test_fedprox_hook_is_the_gradient_of_its_quadratic() -> None:
    from fedexp.core.kernel import adjusted
    from fedexp.methods.fedprox import FedProx

    world = make_world("method=fedprox", "trainer.mu=0.7")
    start = world.env.initial_weights().params
    at = {k: (v + 0.1).requires_grad_() for k, v in start.items()}
    value = 0.35 * sum(((at[k] - start[k]) ** 2).sum() for k in at)
    expected = dict(zip(at, torch.autograd.grad(value, list(at.values())), strict=True))

    adjustment = FedProx(mu=0.7).adjustment(None)
    assert adjustment is not None
    with torch.no_grad():
        hook = adjusted({k: torch.zeros_like(v) for k, v in at.items()}, at, start, adjustment)
    assert_same([{k: v.detach() for k, v in hook.items()}], [expected], 1e-12)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("method=local", "trainer=scaffold"), "aggregator Local does not average"),
        (("method=ensemble", "server_optimizer=fedadam"), "a server optimizer has no effect"),
    ],
)
def test_baselines_with_settings_without_effect_are_refused(
    overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_world(*overrides)
