"""A check that a network fits a data set. It runs before the data set is loaded."""

from __future__ import annotations

import torch

from fedexp.core.errors import ConfigError
from fedexp.core.net import Net
from fedexp.core.seeds import seed_of
from fedexp.core.weights import ModelSpec, Weights, computes_channels_last, with_layout


def check_model(
    spec: ModelSpec,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    device: str = "cpu",
) -> bool:
    """Check a network by running it on two samples of zeros.

    Args:
        spec: Architecture of the network.
        input_shape: Shape of one sample.
        output_shape: Shape of one sample's output.
        device: Kind of device on which the network will run later. The check itself
            runs on the CPU.

    Returns:
        Whether the network has BatchNorm, which cannot train on one sample.

    Raises:
        ConfigError: The network does not fit the data set. The message names the
            reason.
    """
    try:
        weights = Weights.init(spec, seed_of("check"), torch.device("cpu"), torch.float32)
        net = Net(spec, torch.device("cpu"), torch.float32)
        net.train()
        net.set_noise(lambda name, shape: torch.full(shape, 0.5))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before = torch.random.get_rng_state()
            output = net(weights.params, weights.buffers, torch.zeros(2, *input_shape))
            drawn = not torch.equal(before, torch.random.get_rng_state())
        if len(input_shape) == 3 and computes_channels_last(spec, device):
            _check_channels_last(net, weights, torch.zeros(2, *input_shape))
    except (RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"the model cannot take the data set's inputs: {error}",
            where="model",
            expected=f"inputs of shape (batch, {', '.join(map(str, input_shape))})",
            got=spec.arch,
            do="choose another model or data set",
        ) from error
    if drawn:
        raise ConfigError(
            "the model's forward pass draws from torch's global generator: its runs could "
            "not be resumed or compared",
            where="model",
            got=spec.arch,
            do="use fedexp.core.dropout.Dropout in place of torch.nn.functional.dropout",
        )
    is_tensor = isinstance(output, torch.Tensor)
    if not is_tensor or output.shape != (2, *output_shape):
        got = tuple(output.shape) if is_tensor else f"a {type(output).__name__}"
        raise ConfigError(
            "the model's output does not fit the data set",
            where="model",
            expected=f"(batch, {', '.join(map(str, output_shape))}) logits",
            got=f"{got} for a batch of 2 from {spec.arch}",
            do="choose another model (unet for masks). Your own constructors receive "
            "num_classes and input_shape",
        )
    return net.has_batch_norm


def _check_channels_last(net: Net, weights: Weights, x: torch.Tensor) -> None:
    net.train(False)
    try:
        with torch.no_grad():
            net(
                with_layout(weights.params, channels_last=True),
                weights.buffers,
                x.contiguous(memory_format=torch.channels_last),
            )
    except RuntimeError as error:
        raise ConfigError(
            "the model cannot take feature maps that lie channels last, as they do on "
            f"CUDA: {error}",
            where="model",
            got=weights.spec.arch,
            do="use x.flatten(1) or x.reshape(...) in place of x.view(...), or set "
            "`channels_last = False` on the class",
        ) from error
