"""Networks: torch modules that a YAML file in `conf/model` names by `_target_`.

Constructors take keyword arguments. `input_shape` and `num_classes` come from the data
set, the other arguments from the YAML file. A constructor raises ValueError if the
network cannot be built. Except in the conditional VAE, the last layer of a network is
called `output`, and the inputs of this layer are the features. Losses and metrics are
in `fedexp.tasks`.
"""
