"""Compare data-free distillation in fedexp with bare loops.

    python scripts/bench_distillation.py [CASE ...] [--threads 2] [--write FILE]
        [--help]

The cases are:

- `steps`: a generator step and a distillation step of DENSE on Fashion-MNIST with
  CNN-MNIST, compared with two loops of torch modules (channels last). The first loop
  has the same arithmetic as fedexp. It sums the kernel entries that meet doubled
  pixels, and computes D(x), the mean logits of the teachers, once per image. Its
  floating-point operations are counted. The second loop is the algorithm as the paper
  prints it. The case also measures the rates of a matrix product and of the generator's
  largest convolution. Two times are derived for an experiment with T = 200 epochs of
  T_G = 30 generator steps: its minutes at the measured times per step, and its floor.
  The floor is the minutes of the first loop at the convolution's rate.
- `bf16`: the same steps with and without autocast.
- `ensemble`: logits, statistics and the gradient with respect to the inputs. The
  teachers are computed stacked (together) and looped (one after another). The case also
  prints which of these ``teachers=auto`` chooses.
- `weights`: the steps in which Co-Boosting updates the clients' weights, as a share of
  an epoch. The bank of generated images has --bank batches.
- `checkpoint`: saving DENSE's state after an epoch with a bank of --bank batches. All
  batches except the last were saved in earlier checkpoints.
- `memory`: the peak memory of --many ResNet-18 teachers, looped, in a separate process.

The clients' models are the start plus noise. The two sides of a comparison take turns,
and the first turn does not count. Times are medians over turns. A ratio is the median
of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent))
import alternate
from bench_multiround import Noise, noisy
from bench_scale import child

from fedexp.config.compose import compose
from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.env import Env
from fedexp.core.runner import Snapshot, run
from fedexp.core.seeds import torch_generator
from fedexp.core.weights import ModelSpec, Weights
from fedexp.distillation.bank import samples_of
from fedexp.distillation.ensemble import TeacherEnsemble
from fedexp.distillation.generator import generator_spec
from fedexp.distillation.stacking import seconds, stacks
from fedexp.methods import co_boosting
from fedexp.methods.bases.data_free import DataFree
from fedexp.methods.bases.replay import Replay
from fedexp.methods.dense import Dense
from fedexp.running.experiment import Experiment
from fedexp.running.peak_memory import peak_memory
from fedexp.server_training.optimizers import Adam, Sgd
from fedexp.storage.checkpoint import Checkpoint

# Epochs, and generator steps per epoch, of the experiment whose minutes are printed
T, T_G = 200, 30
SHAPES = {"cnn_mnist": (1, 28, 28)}  # other models have CIFAR-10's shape
# Bounds that the table prints: ratio of the steps to the bare loop, ratio of auto's
# choice to the better one, share of re-weighting in an epoch, MB of memory, and share
# of a checkpoint in an epoch
EXACT = (1.15, 1.05, 0.02, 8000, 0.02)


def drawn(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch_generator("bench", *shape)).to(device)


def clock(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def beside(
    one: Callable[[], float], other: Callable[[], float], turns: int
) -> tuple[float, float, float]:
    """Measure two sides, which take turns.

    Returns:
        Median seconds of `one`, median seconds of `other`, and the median of the ratio
        one / other.
    """
    pairs = [(one(), other()) for _ in range(1 + turns)][1:]
    mine, theirs = map(statistics.median, zip(*pairs, strict=True))
    return mine, theirs, statistics.median(a / b for a, b in pairs)


def milliseconds(value: float) -> str:
    return f"{1e3 * value:,.2f} ms"


class World:
    """The state of a data-free method after the clients' training.

    The epochs of the server's training start from it.

    Attributes:
        bank: Batches of random images with labels, in place of generated images.
    """

    def __init__(self, name: str, options: argparse.Namespace, batches: int, *more: str) -> None:
        shape = [
            f"clients={options.clients}",
            "partition=iid",
            "rounds=1",
            "limit.train=1000",
            "model=cnn_mnist",
        ]
        shape += [
            f"aggregator.b={options.batch}",
            f"aggregator.B={options.batch}",
            f"data_root={options.data}",
            f"device={options.device}",
            *more,
        ]

        experiment = Experiment.of(compose([f"method={name}", "dataset=fashion_mnist", *shape]))
        data = experiment.load(options.device)
        method, env = experiment.aggregator, experiment.env(data, options.device)
        assert isinstance(method, Replay)
        (step,) = islice(run(method, env, Noise(), data, Snapshot(0, method.init(env))), 1)

        self.method, self.state, self.env = method, step.after.state, env.at(0, 1)
        self.teachers = [kept.load() for kept in self.state["teachers"]]
        self.labels = method.labels(self.env)

        random = torch_generator("bench", "bank")
        pixels = (
            torch.randint(256, (options.batch, *env.input_shape), generator=random)
            for _ in range(batches)
        )
        self.bank = [{"x": x.to(torch.uint8).to(options.device), "y": self.labels} for x in pixels]

    def ensemble(self, bf16: bool = False) -> TeacherEnsemble:
        return TeacherEnsemble(self.teachers, bf16=bf16)


class Bare:
    """The generator and distillation loops of DENSE in plain torch, channels last.

    Args:
        world: State that the loops start from.
        printed: Whether the loops are as the paper prints them. If True, the generator
            is a plain sequence of layers, and the teachers process an image again in
            every pass. If False, the generator is fedexp's module, and the teachers
            process an image once.
    """

    def __init__(self, world: World, printed: bool) -> None:
        self.world, self.norms, self.printed = world, list[tuple[nn.BatchNorm2d, Tensor]](), printed
        self.teachers = [_module(weights).requires_grad_(False) for weights in world.teachers]
        self.student = _module(world.state["student"])
        device, domain = world.env.device, world.env.domain

        self.mean, self.std = (
            torch.tensor(v, device=device).view(-1, 1, 1) for v in (domain.mean, domain.std)
        )

        for module in self.teachers:
            for layer in module.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.register_forward_pre_hook(
                        lambda layer, args: self.norms.append((layer, args[0]))
                    )

    def teacher_logits(self, x: Tensor) -> Tensor:
        self.norms.clear()
        return sum(
            (teacher(x) for teacher in self.teachers), torch.zeros((), device=x.device)
        ) / len(self.teachers)

    def generate(self, steps: int) -> Tensor:
        """Train a generator, and return its images at the lowest loss."""
        method, env, y = self.world.method, self.world.env, self.world.labels
        assert isinstance(method, Dense) and isinstance(method.generator, Adam)
        c, height, width = env.input_shape

        spec = generator_spec(env.input_shape, method.nz, method.ngf)
        generator = (
            _generator((c, height, width), method.nz, method.ngf) if self.printed else spec.module()
        )
        generator = generator.to(env.device, memory_format=torch.channels_last)

        z = drawn(method.b, method.nz, device=env.device).requires_grad_()
        optimizer = torch.optim.Adam(
            [*generator.parameters(), z], lr=method.lr_generator, betas=method.generator.betas
        )

        self.student.eval().requires_grad_(False)
        least, kept = torch.tensor(float("inf"), device=env.device), torch.zeros(())
        for _ in range(steps):
            images = generator(z)
            x = (images - self.mean) / self.std

            d, s = self.teacher_logits(x), self.student(x)
            apart = torch.zeros((), device=env.device)
            for layer, a in self.norms:
                var, mean = torch.var_mean(a, (0, 2, 3), correction=0)
                apart = (
                    apart + (mean - layer.running_mean).norm() + (var - layer.running_var).norm()
                )

            divergence = F.kl_div(
                s.log_softmax(1), d.log_softmax(1), reduction="none", log_target=True
            ).sum(1)
            div = -(divergence * (d.argmax(1) != s.argmax(1))).mean()
            loss = (
                F.cross_entropy(d, y)
                + method.lambda_1 * apart / len(self.teachers)
                + method.lambda_2 * div
            )

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            better = loss.detach() < least
            least, kept = (
                torch.where(better, loss.detach(), least),
                torch.where(better, images.detach(), kept),
            )
        return kept

    def known(self, bank: list[Tensor]) -> list[Tensor]:
        """Return D(x), the mean logits, of all batches of pixels except the last."""
        with torch.no_grad():
            return [
                self.teacher_logits((batch / 255.0 - self.mean) / self.std) for batch in bank[:-1]
            ]

    def distil(self, bank: list[Tensor], known: list[Tensor]) -> None:
        """Take one step per batch of pixels.

        `known` contains the teachers' mean logits for all batches except the last. It
        is not used if `printed` is True.
        """
        method = self.world.method
        assert isinstance(method.student, Sgd)
        self.student.train().requires_grad_(True)
        optimizer = torch.optim.SGD(
            self.student.parameters(), lr=method.lr_student, momentum=method.student.momentum
        )

        pixels, tau = torch.cat(bank), method.tau
        if not self.printed:
            with torch.no_grad():
                targets = torch.cat(
                    [*known, self.teacher_logits((bank[-1] / 255.0 - self.mean) / self.std)]
                )

        for at in torch.randperm(len(pixels)).split(method.B):
            x = (pixels[at.to(pixels.device)] / 255.0 - self.mean) / self.std
            x = x.contiguous(memory_format=torch.channels_last)
            with torch.no_grad():
                d = self.teacher_logits(x) if self.printed else targets[at.to(pixels.device)]

            log_q, log_p = (self.student(x) / tau).log_softmax(1), (d / tau).log_softmax(1)
            loss = tau**2 * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _generator(shape: tuple[int, int, int], nz: int, ngf: int) -> nn.Sequential:
    """Return the layers of fedexp's `Generator` as a plain sequence."""
    c, height, width = shape
    start = (2 * ngf, height // 4, width // 4)
    layers: list[nn.Module] = [
        nn.Linear(nz, math.prod(start)),
        nn.Unflatten(1, start),
        nn.BatchNorm2d(2 * ngf),
    ]

    for channels in (2 * ngf, ngf):
        convolution = nn.Conv2d(2 * ngf, channels, 3, padding=1, bias=False)
        layers += [
            nn.Upsample(scale_factor=2),
            convolution,
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(0.2),
        ]

    return nn.Sequential(*layers, nn.Conv2d(ngf, c, 3, padding=1), nn.Sigmoid())


def _module(weights: Weights) -> nn.Module:
    module: nn.Module = weights.module().to(memory_format=torch.channels_last)
    return module


def generator_step(world: World, steps: int, ensemble: TeacherEnsemble) -> float:
    """Return the seconds per step of `steps` generator steps."""
    made = partial(
        world.method.synthesise,
        world.labels,
        world.state["student"],
        ensemble,
        world.state["own"],
        world.env,
    )
    return clock(made, world.env.device) / steps


def distillation_step(world: World, ensemble: TeacherEnsemble) -> float:
    """Return the seconds per distillation step in one pass over the bank.

    The teachers' logits are known for all batches except the last one, which the
    teachers process in this pass.
    """
    method, env, samples = world.method, world.env, samples_of(world.bank, world.env.domain)
    known = [
        ensemble(samples_of([batch], env.domain).inputs(slice(None))) for batch in world.bank[:-1]
    ]

    def once() -> None:
        _, distillation_batches = method.distillation_batches(
            {"bank": world.bank, "logits": known}, samples, ensemble, env
        )
        method.train_student(world.state, distillation_batches, method.lr_student, env)

    return clock(once, env.device) / len(world.bank)


def rates(options: argparse.Namespace, dtype: torch.dtype) -> tuple[float, float]:
    """Measure two rates in FLOP / s.

    Returns:
        The rates of a matrix product, and of the generator's largest convolution on
        Fashion-MNIST, channels last.
    """
    device, n, b = options.device, options.product, options.batch
    a = drawn(n, n, device=device).to(dtype)
    maps = (
        drawn(b, 128, 28, 28, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    )
    kernel = (
        drawn(64, 128, 3, 3, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    )

    product = min(clock(lambda: a @ a, device) for _ in range(1 + options.turns))
    convolution = min(
        clock(lambda: F.conv2d(maps, kernel, padding=1), device) for _ in range(1 + options.turns)
    )

    return 2 * n**3 / product, 2 * b * 28 * 28 * 64 * 128 * 9 / convolution


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def minutes(generator: float, distillation: float, b: int, B: int) -> float:
    """Return the minutes of T epochs, given the seconds per step.

    Args:
        generator: Seconds per generator step.
        distillation: Seconds per distillation step.
        b: Number of images that the generator adds to the bank per epoch.
        B: Batch size of distillation.
    """
    passes = sum(-(-epoch * b // B) for epoch in range(1, T + 1))
    return (T * T_G * generator + passes * distillation) / 60


def bench_steps(options: argparse.Namespace, table: alternate.Table) -> None:
    world = World("dense", options, options.steps, f"aggregator.T_G={options.steps}")
    ensemble, steps, device = world.ensemble(), options.steps, options.device
    pixels = [batch["x"] for batch in world.bank]

    ours = {
        "generator": partial(generator_step, world, steps, ensemble),
        "distillation": partial(distillation_step, world, ensemble),
    }

    product, convolution = rates(options, torch.float32)
    both: list[tuple[float, float, float]] = []

    for printed in (False, True):
        bare = Bare(world, printed)
        known = bare.known(pixels)
        theirs = {
            "generator": lambda bare=bare: clock(lambda: bare.generate(steps), device) / steps,
            "distillation": lambda bare=bare, known=known: (
                clock(lambda: bare.distil(pixels, known), device) / steps
            ),
        }

        counts = {
            "generator": flops(lambda bare=bare: bare.generate(1)),
            "distillation": flops(lambda bare=bare, known=known: bare.distil(pixels, known))
            / steps,
        }

        for name, count in counts.items():
            mine, other, ratio = beside(ours[name], theirs[name], options.turns)
            what = f"DENSE, {name} step, m = {options.clients}, b = {options.batch}"
            said = f"{count / 1e9:.2f} GFLOP"
            if printed:
                table.row(
                    [
                        what,
                        milliseconds(mine),
                        f"as printed {milliseconds(other)}",
                        f"{ratio:.2f}",
                        said,
                    ]
                )
                continue
            floor = count / convolution
            said += f", {count / mine / 1e9:,.0f} GFLOP/s; floor {milliseconds(floor)}"
            table.row(
                [
                    what,
                    milliseconds(mine),
                    f"bare {milliseconds(other)}",
                    f"{ratio:.2f}, bound {EXACT[0]}",
                    said,
                ]
            )
            both.append((mine, other, floor))

    table.row(["rate, matrix product", "", "", "", f"{product / 1e9:,.0f} GFLOP/s"])
    table.row(
        [
            "rate, convolution 128 to 64, 28 x 28",
            "",
            "",
            "",
            f"{convolution / 1e9:,.0f} GFLOP/s, the floor's",
        ]
    )

    b, B = world.method.b, world.method.B
    mine, other, floor = (minutes(g, d, b, B) for g, d in zip(*both, strict=True))
    said = f"floor {floor:,.1f} min"
    table.row(
        [
            f"DENSE, T = {T}, T_G = {T_G}",
            f"{mine:,.1f} min",
            f"bare {other:,.1f} min",
            f"{mine / other:.2f}",
            said,
        ]
    )


def bench_bf16(options: argparse.Namespace, table: alternate.Table) -> None:
    more = [f"aggregator.T_G={options.steps}"]
    exact, rounded = (
        World("dense", options, options.steps, *more, f"aggregator.precision={p}")
        for p in ("float32", "bf16")
    )

    one, other = rounded.ensemble(bf16=True), exact.ensemble()
    x = samples_of(exact.bank[:1], exact.env.domain).inputs(slice(None))
    with torch.no_grad():
        d = other(x)
        apart = float((one(x) - d).norm() / d.norm())

    pairs = {
        "generator": (
            partial(generator_step, rounded, options.steps, one),
            partial(generator_step, exact, options.steps, other),
        ),
        "distillation": (
            partial(distillation_step, rounded, one),
            partial(distillation_step, exact, other),
        ),
    }

    both: list[tuple[float, float]] = []
    for name, (ours, theirs) in pairs.items():
        mine, base, ratio = beside(ours, theirs, options.turns)
        table.row(
            [
                f"DENSE in bf16, {name} step",
                milliseconds(mine),
                f"float32 {milliseconds(base)}",
                f"{ratio:.2f}",
                f"D(x) within {apart:.1e}",
            ]
        )
        both.append((mine, base))
    mine, base = (minutes(g, d, options.batch, options.batch) for g, d in zip(*both, strict=True))
    product, convolution = rates(options, torch.bfloat16)
    said = f"product {product / 1e9:,.0f}, convolution {convolution / 1e9:,.0f} GFLOP/s in bf16"
    table.row(
        [
            f"DENSE in bf16, T = {T}, T_G = {T_G}",
            f"{mine:,.1f} min",
            f"float32 {base:,.1f} min",
            f"{mine / base:.2f}",
            said,
        ]
    )


def models(name: str, count: int, device: torch.device) -> list[Weights]:
    """Return `count` models of network `name`: the same start plus separate noise."""
    spec = ModelSpec.of(compose([f"model={name}"])["model"], SHAPES.get(name, (3, 32, 32)), 10)
    start = Weights.init(spec, 0, torch.device("cpu"), torch.float32)
    on = lambda tree: {key: value.to(device) for key, value in tree.items()}  # noqa: E731
    return [
        Weights(spec, on(noisy(start.params, k)), on(trees.clone(start.buffers)))
        for k in range(count)
    ]


def bench_ensemble(options: argparse.Namespace, table: alternate.Table) -> None:
    for name in options.models:
        teachers = models(name, options.teachers, options.device)

        x = drawn(options.batch, *SHAPES.get(name, (3, 32, 32)), device=options.device)
        looped, stacked = TeacherEnsemble(teachers), TeacherEnsemble(teachers, stacked=True)
        mine, other, ratio = beside(
            partial(seconds, stacked, x, 1), partial(seconds, looped, x, 1), options.turns
        )
        chosen = stacks("auto", teachers, None, x)
        rule = (mine if chosen else other) / min(mine, other)

        what = f"{options.teachers} x {name}, b = {options.batch}, with input gradient: stacked"
        said = (
            f"auto: {'stacked' if chosen else 'looped'}, {rule:.2f} of the better, bound {EXACT[1]}"
        )
        table.row([what, milliseconds(mine), f"looped {milliseconds(other)}", f"{ratio:.2f}", said])


def bench_weights(options: argparse.Namespace, table: alternate.Table) -> None:
    world = World("co_boosting", options, options.bank, f"aggregator.T_G={options.steps}")
    logits = [
        drawn(options.clients, options.batch, 10, device=options.device) for _ in world.bank[1:]
    ]
    # Logits of one batch are missing, because the teachers process the images of the
    # previous epoch in this epoch
    own = {**world.state["own"], "bank": world.bank, "logits": logits}

    state: State = {**world.state, "own": own}

    spent, whole = list[float](), co_boosting.reweighted

    def watched(*args: Any) -> Tensor:
        found: list[Tensor] = []
        spent.append(clock(lambda: found.append(whole(*args)), options.device))
        return found[0]

    method: DataFree = world.method
    env: Env = world.env.at(0, options.bank + 1)
    co_boosting.reweighted = watched
    try:
        epochs = [
            clock(
                lambda: method.epoch(state, world.ensemble(), method.lr_student, env),
                options.device,
            )
            for _ in range(1 + options.turns)
        ]
    finally:
        co_boosting.reweighted = whole

    shares = [part / epoch for part, epoch in zip(spent[1:], epochs[1:], strict=True)]
    what = f"Co-Boosting, weights' steps on {options.bank} batches, m = {options.clients}"
    said = f"epoch of {options.steps} generator steps {statistics.median(epochs[1:]):.1f} s"
    share = f"{statistics.median(shares):.2%}, bound {EXACT[2]:.0%}"
    table.row([what, milliseconds(statistics.median(spent[1:])), said, share, ""])


def bench_checkpoint(options: argparse.Namespace, table: alternate.Table) -> None:
    world = World("dense", options, options.bank, f"aggregator.T_G={options.steps}")
    method, env, ensemble = world.method, world.env.at(0, options.bank), world.ensemble()

    logits = [drawn(options.batch, 10, device=options.device) for _ in world.bank[1:]]
    state: State = {
        **world.state,
        "teachers": [],
        "own": {"bank": world.bank[1:], "logits": logits},
    }

    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(Path(folder), options.device)
        checkpoint.save(Snapshot(options.bank, state), set(), {})
        for turn in range(1 + options.turns):
            after = list[State]()

            def once(after: list[State] = after) -> None:
                after.append(method.epoch(state, ensemble, method.lr_student, env)[0])

            epoch = clock(once, options.device)
            saved = partial(checkpoint.save, Snapshot(options.bank + 1 + turn, after[0]), set(), {})
            pairs.append((clock(saved, options.device), epoch))
        checkpoint.close()

    save, epoch = map(statistics.median, zip(*pairs[1:], strict=True))
    what = (
        f"DENSE, checkpoint after epoch {options.bank}, m = {options.clients}, b = {options.batch}"
    )
    share = f"{statistics.median(a / b for a, b in pairs[1:]):.2%}, bound {EXACT[4]:.0%}"
    table.row(
        [
            what,
            milliseconds(save),
            f"epoch of {options.steps} generator steps {epoch:.1f} s",
            share,
            "",
        ]
    )


def worker(options: argparse.Namespace) -> dict[str, float]:
    """Measure a forward pass of all teachers and its gradient.

    Returns:
        Seconds, and peak GPU memory in MB (0 on a CPU).
    """
    ensemble = TeacherEnsemble(models("resnet18_bn_cifar", options.many, options.device))
    leaf = drawn(options.batch, 3, 32, 32, device=options.device).requires_grad_()

    def once() -> None:
        shown = ensemble.show(leaf, norms=True)
        torch.autograd.grad(shown.logits.square().sum() + shown.statistics, leaf)

    return {
        "seconds": clock(once, options.device),
        "gpu": peak_memory(options.device).get("gpu", 0) / 1e6,
    }


def bench_memory(options: argparse.Namespace, table: alternate.Table) -> None:
    size = [f"--many={options.many}", f"--batch={options.batch}"]
    text, _, peak = child(
        [__file__, *size, f"--threads={options.threads}", f"--device={options.device}", "--worker"]
    )

    row = json.loads(text.splitlines()[-1])
    what = f"{options.many} x ResNet-18 looped, b = {options.batch}, with input gradient"
    share = f"{row['gpu'] or peak:,.0f} MB, bound {EXACT[3]:,}"
    table.row(
        [
            what,
            f"{row['seconds']:.1f} s",
            "",
            share,
            "of the GPU" if row["gpu"] else "of the process",
        ]
    )


CASES: dict[str, Callable[[argparse.Namespace, alternate.Table], None]] = {
    "steps": bench_steps,
    "bf16": bench_bf16,
    "ensemble": bench_ensemble,
    "weights": bench_weights,
    "checkpoint": bench_checkpoint,
    "memory": bench_memory,
}


def main() -> None:
    parser = alternate.parser(__doc__)
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)"
    )

    alternate.add_device(parser)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128, help="b")
    parser.add_argument(
        "--clients", type=int, default=5, help="m of steps, bf16, weights and checkpoint"
    )
    parser.add_argument(
        "--steps", type=int, default=T_G, help="generator steps and distillation steps per turn"
    )
    parser.add_argument(
        "--product", type=int, default=2048, help="rows and columns of the matrix product"
    )
    parser.add_argument("--teachers", type=int, default=10, help="m of the case ensemble")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["cnn_mnist", "cnn2", "resnet18_bn_cifar"],
        help="models of the case ensemble",
    )
    parser.add_argument(
        "--bank", type=int, default=T // 2, help="batches of the cases weights and checkpoint"
    )
    parser.add_argument("--many", type=int, default=100, help="teachers of the case memory")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)

    options = parser.parse_args()
    options.device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    if options.worker:
        print(json.dumps(worker(options)))
        return

    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]}: choose from {', '.join(CASES)}")

    facts = (
        f"{options.threads} threads, {options.device}, medians of {options.turns} turns. "
        "`scripts/bench_distillation.py`"
    )
    table = alternate.Table(
        options.write,
        alternate.heading(facts, str(options.device)),
        ["what", "time", "beside", "ratio", ""],
    )

    for case in options.cases or CASES:
        CASES[case](options, table)


if __name__ == "__main__":
    main()
