"""Networks. Each is a torch module that a YAML of `conf/model` names by `_target_`.

Constructors take keyword arguments: `input_shape` and `num_classes` from the data set, the rest from the YAML; they
raise ValueError for what cannot be built. The last layer of each is called `output`: its inputs are the features.
"""
