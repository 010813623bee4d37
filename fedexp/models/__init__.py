"""Networks: torch modules that a YAML of `conf/model` names by `_target_`.

Constructors take keyword arguments: `input_shape` and `num_classes` from the data set,
the rest from the YAML. They raise ValueError for networks that cannot be built. The
last layer of each network is called `output`, and its inputs are the features. Losses
and metrics are in `fedexp.tasks`.
"""
