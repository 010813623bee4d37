"""Tests of the conditional VAE: closed forms, training by both engines, samples."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import pytest
import torch
import torch.nn.functional as F

from fedexp.config.compose import compose
from fedexp.core.data import Samples
from fedexp.core.net import Net
from fedexp.core.outcome import Outcome
from fedexp.core.runner import Snapshot, run
from fedexp.core.task import Batch
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.evaluation.evaluate import Evaluator
from fedexp.models.cvae import Cvae as Network
from fedexp.models.cvae import decoder_of, generate, kl_to_standard_normal, one_hot
from fedexp.running.experiment import Experiment
from fedexp.tasks.cvae import CvaeTask, standard_normal
from tests.world import CPU

DIGITS = [
    "task=cvae",
    "model=cvae",
    "model.hidden=[32,48]",
    "model.latent=4",
    "partition=iid",
    "dtype=float64",
]


def make(*overrides: str):
    experiment = Experiment.of(compose([*DIGITS, *overrides]))
    data = experiment.load(CPU)
    return experiment, data, experiment.env(data, CPU)


@pytest.fixture(scope="module")
def world():
    return make()


def parts(world) -> tuple[CvaeTask, Net, Weights, Batch]:
    """Return task, net, initial weights and the first test images.

    The net is in evaluation mode.
    """
    experiment, data, env = world
    weights = env.initial_weights()
    net = Net(env.server_spec, CPU, torch.float64)
    net.train(False)
    assert isinstance(experiment.task, CvaeTask)
    return experiment.task, net, weights, Batch(data.test.inputs(slice(0, 12)), data.test.y[:12])


def test_kl_divergence_against_torchs_and_its_zero() -> None:
    assert kl_to_standard_normal(torch.zeros(3, 5), torch.zeros(3, 5)).tolist() == [0.0] * 3
    generator = torch.Generator().manual_seed(0)
    mean, logvar = torch.randn(2, 6, 5, dtype=torch.float64, generator=generator)
    q = torch.distributions.Normal(mean, (0.5 * logvar).exp())
    p = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    torch.testing.assert_close(
        kl_to_standard_normal(mean, logvar), torch.distributions.kl_divergence(q, p).sum(1)
    )


def test_box_muller_is_standard_normal_and_finite() -> None:
    z = standard_normal(
        torch.rand(2, 200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    assert abs(float(z.mean())) < 0.01 and abs(float(z.var()) - 1) < 0.02
    assert abs(float((z.abs() < 1).double().mean()) - 0.6827) < 0.005
    assert torch.isfinite(standard_normal(torch.tensor([[0.0, 1 - 2**-24], [0.0, 0.3]]))).all()


def test_normalisation_is_undone(world) -> None:
    _, _, weights, batch = parts(world)
    with torch.device("meta"):
        module = weights.spec.module()
    assert isinstance(module, Network)
    torch.testing.assert_close(
        module.pixels(batch.x), world[1].test.x[:12].double() / 255, atol=1e-7, rtol=0
    )


def plain_forward(params: Tree, x: torch.Tensor, y: torch.Tensor, z_noise: torch.Tensor | None):
    """Compute logits, mean and logvar with the network written out."""

    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    label = torch.eye(10, dtype=x.dtype)[y]
    h = torch.cat([x, label], 1)
    h = linear("encoder.1", linear("encoder.0", h).clamp(min=0)).clamp(min=0)
    mean, logvar = linear("mean", h), linear("logvar", h)
    z = mean if z_noise is None else mean + logvar.exp().sqrt() * z_noise
    code = torch.cat([z, label], 1)
    return (
        linear(
            "decoder.2", linear("decoder.1", linear("decoder.0", code).clamp(min=0)).clamp(min=0)
        ),
        mean,
        logvar,
    )


def test_layers_meet_their_inputs_as_the_papers_fusion_asks(world) -> None:
    """MA-Echo projects onto the inputs of a layer.

    The input of the decoder is [z, one-hot label]. z is the posterior's mean.
    """
    task, net, weights, batch = parts(world)
    found = net.observe(weights.params, {}, *task.inputs(batch), layers="all").layers
    x = world[1].test.x[:12].double().flatten(1) / 255
    _, mean, _ = plain_forward(weights.params, x, batch.y, None)
    code = torch.cat([mean, torch.eye(10, dtype=x.dtype)[batch.y]], 1)
    torch.testing.assert_close(found["decoder.0.weight"], code, rtol=1e-6, atol=1e-6)
    order = ["encoder.0", "encoder.1", "mean", "logvar", "decoder.0", "decoder.1", "decoder.2"]
    assert (
        list(found)
        == [layer.weight for layer in world[2].layers]
        == [f"{name}.weight" for name in order]
    )


@pytest.mark.parametrize("noisy", [False, True])
def test_loss_is_bernoulli_reconstruction_plus_kl(world, noisy: bool) -> None:
    task, net, weights, batch = parts(world)
    x = world[1].test.x[:12].double().flatten(1) / 255
    noise = (
        torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        if noisy
        else None
    )
    inputs = task.inputs(batch) if noise is None else (*task.inputs(batch), noise)
    ours = net(weights.params, {}, *inputs)
    logits, mean, logvar = plain_forward(weights.params, x, batch.y, noise)
    missed = F.binary_cross_entropy(torch.sigmoid(logits), x, reduction="none").sum(1)
    expected = torch.stack([missed, kl_to_standard_normal(mean, logvar)], 1)
    # The constants of the normalisation are stored in float32
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_evaluation_uses_labels_and_averages_over_images(world) -> None:
    task, net, weights, _ = parts(world)
    data = world[1]
    metrics = Evaluator(task, 100)(Outcome((weights,), "global"), data.test, "test")
    assert list(metrics) == ["test/global/loss", "test/global/reconstruction_loss"]
    whole = task.predict(net, weights.params, {}, data.test.inputs(slice(0, 360)), data.test.y)
    assert metrics["test/global/loss"] == pytest.approx(float(whole.sum(1).mean()), rel=1e-9)
    assert metrics["test/global/reconstruction_loss"] == pytest.approx(
        float(whole[:, 0].mean()), rel=1e-9
    )
    assert not any(task.higher_is_better(name) for name in task.metric_names)
    wrong = Samples(
        data.test.x, (data.test.y + 1) % 10, data.test.mean, data.test.std, dtype=torch.float64
    )
    assert Evaluator(task, 100)(Outcome((weights,), "global"), wrong, "test") != metrics


def test_an_ensembles_loss_is_its_members_mean(world) -> None:
    task, _, weights, _ = parts(world)
    other = replace(weights, params={name: value * 1.5 for name, value in weights.params.items()})
    measure = Evaluator(task, 100)
    one, two = (
        measure(Outcome((w,), "global"), world[1].test, "test")["test/global/loss"]
        for w in (weights, other)
    )
    both = measure(
        Outcome((weights, other), "ensemble", "probs", torch.tensor([1.0, 3.0])),
        world[1].test,
        "test",
    )
    assert both["test/ensemble/loss"] == pytest.approx((one + 3 * two) / 4, rel=1e-6)


@pytest.fixture(scope="module")
def trained():
    """Train three rounds with each engine."""
    experiment, data, env = make(
        "rounds=3", "clients=3", "local.optimizer=adam", "local.lr=0.01", "local.epochs=3"
    )
    outcomes = []
    for engine in (Serial(), Vectorized(stack=3)):
        losses, snapshot = [], Snapshot(0, experiment.aggregator.init(env))
        measure = Evaluator(experiment.task, 360)
        outcome = experiment.aggregator.outcome(snapshot.state)
        losses.append(measure(outcome, data.test, "test")["test/global/loss"])
        for step in run(experiment.aggregator, env, engine, data, snapshot):
            outcome = experiment.aggregator.outcome(step.after.state)
            losses.append(measure(outcome, data.test, "test")["test/global/loss"])
        outcomes.append((losses, outcome.models[0], engine.stacked_steps))
    return experiment, data, outcomes


def test_loss_falls_and_engines_agree(trained) -> None:
    _, _, ((serial, first, _), (stacked, second, stacked_steps)) = trained
    assert serial[-1] < 0.8 * serial[0] and serial == sorted(serial, reverse=True)
    assert stacked_steps > 0 and stacked == pytest.approx(serial, rel=1e-9)
    for name in first.params:
        torch.testing.assert_close(first.params[name], second.params[name], rtol=1e-6, atol=1e-9)


def test_labels_that_fit_have_the_better_bound(trained) -> None:
    experiment, data, ((_, model, _), _) = trained
    net = Net(model.spec, CPU, torch.float64)
    net.train(False)
    x = data.test.inputs(slice(0, 360))
    bounds = experiment.task.predict(net, model.params, {}, x)
    own = experiment.task.predict(
        net, model.params, {}, *experiment.task.inputs(Batch(x, data.test.y))
    )
    torch.testing.assert_close(bounds.gather(1, data.test.y[:, None])[:, 0], -own.sum(1))
    # The accuracy of random guesses is 0.1
    assert float((bounds.argmax(1) == data.test.y).double().mean()) > 0.3


def test_samples_are_a_function_of_code_and_label(trained) -> None:
    _, data, ((_, model, _), _) = trained
    decoder = decoder_of(model)
    assert set(decoder.params) == {
        f"decoder.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")
    }
    z, labels = torch.zeros(10, 4, dtype=torch.float64), torch.arange(10)
    images = generate(decoder, labels, z)
    assert images.shape == (10, 1, 8, 8) and torch.equal(images, generate(decoder, labels, z))
    code = torch.cat([z, one_hot(labels, 10, torch.float64)], 1)
    chain = Net(decoder.spec, CPU, torch.float64).linear_chain
    for weight, bias in chain[:-1]:
        code = (code @ decoder.params[weight].T + decoder.params[bias]).relu()
    weight, bias = chain[-1]
    expected = torch.sigmoid(code @ decoder.params[weight].T + decoder.params[bias])
    torch.testing.assert_close(images.flatten(1), expected)
    train = torch.stack([data.train.x[data.train.y == k].double().mean(0) / 255 for k in range(10)])
    distance = torch.cdist(images.flatten(1), train.flatten(1))
    # The image of a zero code is close to the mean digit of its label
    assert (distance.argmin(1) == labels).sum() >= 4


def test_the_decoder_on_mnist_has_the_papers_widths() -> None:
    spec = Experiment.of(compose(["task=cvae", "model=cvae", "dataset=digits"])).specs.server
    mnist = replace(spec, kwargs=tuple({**dict(spec.kwargs), "input_shape": (1, 28, 28)}.items()))
    decoder = decoder_of(Weights.init(mnist, 0, CPU, torch.float32))
    assert [tuple(decoder.params[f"decoder.{i}.weight"].shape) for i in range(3)] == [
        (256, 30),
        (512, 256),
        (784, 512),
    ]


def test_the_normalisation_is_copied_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # On the device "meta", no initial values are computed
    with torch.device("meta"):
        net = Network(input_shape=(1, 2, 2), num_classes=3, mean=(0.1307,), std=(0.3081,))
    x = torch.zeros(2, 1, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(net.pixels(x), torch.full_like(x, 0.1307))

    def refuse(*arguments: object, **named: object) -> NoReturn:
        raise AssertionError("a constant was made again")

    monkeypatch.setattr(torch, "tensor", refuse)
    torch.testing.assert_close(net.pixels(x + 1), torch.full_like(x, 0.1307 + 0.3081))
