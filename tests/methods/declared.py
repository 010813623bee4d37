"""The contracts that every method declares.

The tests in `test_contracts` refuse a method without a declaration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reduction:
    """The overrides under which a method is FedAvg.

    Args:
        against: Overrides added to FedAvg.
        tolerance: Relative tolerance. 0 requires bit-identical results.
    """

    overrides: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    tolerance: float = 0.0


@dataclass(frozen=True)
class Exempt:
    """A contract that a method cannot keep.

    Args:
        why: Reason.
        instead: The test that checks another property of the method, as
            ``module.function`` of this folder.
    """

    why: str
    instead: str


@dataclass(frozen=True)
class Declared:
    """The contracts of one method.

    All other tests of `test_contracts` hold for all methods.

    Args:
        reduction: Reduction to FedAvg.
        order: Exemption if the order of the clients matters. `test_contracts` checks
            that it does.
        copies: Exemption if identical clients differ from one of them. It is checked
            too.
        descent: Exemption if training raises the loss. It is checked too.
        images: Whether the method needs samples with a range of pixels.
        small: Overrides that reduce the server's work, so that the method is fast
            enough for tests.
        fewest: Smallest number of participants.
    """

    reduction: Reduction | Exempt
    order: Exempt | None = None
    copies: Exempt | None = None
    descent: Exempt | None = None
    images: bool = False
    small: tuple[str, ...] = ()
    fewest: int = 1


MATCHED = Declared(
    Exempt(
        "posterior means of matched units, of as many as there are",
        "test_pfnm.test_without_hidden_layers_and_prior_it_is_the_average",
    ),
    copies=Exempt(
        "the prior counts as sigma / sigma0 models",
        "test_pfnm.test_pfnm_of_copies_is_shrunk_by_the_prior",
    ),
)

NO_PRIOR = Exempt(
    "posterior means of matched units; with fixed widths and no prior it is the average",
    "test_fedma.test_with_fixed_widths_and_no_prior_it_is_the_average",
)
SHRUNK = Exempt(
    "the prior counts as sigma / sigma0 models",
    "test_fedma.test_fedma_of_permuted_copies_is_shrunk_by_the_prior",
)
LAYERWISE = Declared(
    NO_PRIOR,
    order=Exempt(
        "units have the order of the clients who opened them",
        "test_fedma.test_the_order_of_the_models_orders_the_units",
    ),
    copies=SHRUNK,
)

UNIFORM = ("aggregator.weights=uniform",)
NO_MOMENTUM_SAM = ("trainer.alpha=1.0", "trainer.rho=0.0")
MOMENTUM_SAM = Declared(Reduction(NO_MOMENTUM_SAM, against=UNIFORM))
MRUR = Declared(
    Reduction((*NO_MOMENTUM_SAM, "trainer.gamma=0.0", "aggregator=mean"), against=UNIFORM)
)
FEW_STEPS = ("limit.server_steps=3",)
OWN_DRAWS = "every client draws features of its own"


def distilled(test: str, *small: str) -> Declared:
    """Declare a method whose student learns from clients' models on generated images.

    The string `test` names the test that states what the method equals.
    """
    why = "the student is taught by the clients' models, on images that are generated"
    return Declared(
        Exempt(why, test),
        images=True,
        small=("aggregator.T=1", "aggregator.student_start=fedavg", *small),
    )


GENERATED = (
    "aggregator.T_G=2",
    "aggregator.b=6",
    "aggregator.B=4",
    "aggregator.nz=3",
    "aggregator.ngf=2",
)
DENSE = distilled("test_dense.test_dense_epochs_equal_a_torch_loop", *GENERATED)
ADI = distilled(
    "test_fed_adi.test_fed_adi_epochs_equal_a_torch_loop",
    *("aggregator.N_inv=2", "aggregator.b=6", "aggregator.B=4"),
)

DECLARED = {
    "fedavg": Declared(Reduction()),
    "fedprox": Declared(Reduction(("trainer.mu=0.0",))),
    "ldam": Declared(Reduction(("trainer.M=0.0",))),
    "scaffold": Declared(
        Reduction(("rounds=1",), against=("rounds=1", "aggregator.weights=uniform"))
    ),
    "fednova": Declared(
        Reduction(
            ("local.epochs=null", "local.steps=3"), against=("local.steps=3",), tolerance=1e-12
        )
    ),
    "fedavgm": Declared(Reduction(("server_optimizer.beta=0.0",))),
    "fedadam": Declared(
        Reduction(
            (
                "server_optimizer.beta_1=0",
                "server_optimizer.beta_2=0",
                "server_optimizer.lr=1e9",
                "server_optimizer.tau=1e9",
            ),
            tolerance=1e-6,
        )
    ),
    "fedyogi": Declared(
        Exempt(
            "beta_2=0 leaves v at tau^2 - U^2 sign(tau^2 - U^2); the limit is FedAdam's",
            "test_server_steps.test_adaptive_steps_follow_algorithm_2",
        )
    ),
    "fedexp": Declared(Reduction(("server_optimizer.eps=1e12",))),
    "feddyn": Declared(
        Exempt(
            "its server applies the clients' drift a second time",
            "test_feddyn.test_the_first_round_trains_as_fedprox_and_moves_twice_as_far",
        )
    ),
    "moon": Declared(Reduction(("trainer.mu=0.0",))),
    "fedcda": Declared(Reduction(("aggregator.warm_up=1.0",))),
    "fedcm": Declared(Reduction(("trainer.alpha=1.0",), against=UNIFORM)),
    "fedsam": Declared(Reduction(("trainer.rho=0.0",))),
    "mofedsam": MOMENTUM_SAM,
    "mofedsam_closest_code": MOMENTUM_SAM,
    "fedmrur_h": Declared(Reduction((*NO_MOMENTUM_SAM, "trainer.gamma=0.0"), against=UNIFORM)),
    "fedmrur_n": Declared(Reduction((*NO_MOMENTUM_SAM, "aggregator=mean"), against=UNIFORM)),
    "fedmrur": MRUR,
    "fedmrur_closest_code": MRUR,
    "fedmrur_printed": Declared(
        Exempt(
            "the server goes uphill", "test_fedmrur.test_fedmrur_three_rounds_equal_a_plain_loop"
        ),
        descent=Exempt(
            "the server goes uphill", "test_fedmrur.test_fedmrur_three_rounds_equal_a_plain_loop"
        ),
    ),
    "median": Declared(
        Exempt("no mean of its clients", "test_robust.test_robust_rules_equal_their_formulas")
    ),
    "trimmed_mean": Declared(
        Reduction(("aggregator.beta=0.0",), against=UNIFORM, tolerance=1e-12), fewest=3
    ),
    "krum": Declared(Reduction(("aggregator.m=4",), against=UNIFORM, tolerance=1e-12), fewest=3),
    "average": Declared(Reduction(against=("aggregator.weights=uniform",), tolerance=1e-12)),
    "ot_fusion": Declared(
        Exempt(
            "the mean of models that alignment moved",
            "test_ot_fusion.test_ot_fusion_without_hidden_units_equals_average",
        )
    ),
    "ot_fusion_nafi": Declared(
        Exempt(
            "sequential halves weigh later models more",
            "test_ot_fusion.test_the_fold_determines_the_weights",
        ),
        order=Exempt(
            "sequential halves weigh later models more",
            "test_ot_fusion.test_the_fold_determines_the_weights",
        ),
    ),
    "git_rebasin": Declared(
        Exempt(
            "the mean of models that matching moved",
            "test_git_rebasin.test_git_rebasin_without_hidden_units_equals_average",
        )
    ),
    "gamf": Declared(
        Exempt(
            "the mean of models that matching moved",
            "test_gamf.test_gamf_without_hidden_units_equals_average",
        )
    ),
    "ma_echo": Declared(
        Reduction(
            ("aggregator.T=0", "aggregator.last_layer=plain"),
            against=("aggregator.weights=uniform",),
            tolerance=1e-12,
        )
    ),
    "ma_echo_ot": Declared(
        Exempt(
            "models are moved first; with nothing to move it is ma_echo",
            "test_ma_echo.test_alignment_of_models_that_agree_changes_nothing",
        )
    ),
    "ma_echo_algorithm1": Declared(
        Reduction(("aggregator.T=0",), against=("aggregator.weights=uniform",), tolerance=1e-12)
    ),
    "pfnm": MATCHED,
    "pfnm_nafi": MATCHED,
    "nafi": MATCHED,
    "nafi_paper": MATCHED,
    "fedma": LAYERWISE,
    "fedma_fixed": Declared(Reduction((), against=UNIFORM, tolerance=1e-6)),
    "nafi_layerwise": LAYERWISE,
    "feddf": Declared(Reduction(("aggregator.epochs=0",)), small=FEW_STEPS),
    # If the student equals its teachers, the gradient is a rounding error. With its
    # default eps of 1e-8, Adam turns such a gradient into whole steps.
    "feddf_paper": Declared(
        Reduction(("aggregator.steps=0",), against=UNIFORM),
        small=(*FEW_STEPS, "+aggregator.optimizer.eps=1e-3"),
    ),
    "feddf_matched": Declared(
        Reduction(("aggregator.epochs=0",), against=UNIFORM), small=FEW_STEPS
    ),
    "fedlaw": Declared(Reduction(("aggregator.epochs=0",)), small=FEW_STEPS),
    "fedbe": Declared(
        Reduction(("aggregator.epochs=0",)),
        copies=Exempt(
            "the more clients there are, the less do drawn models and the mean count among "
            "the teachers",
            "test_distilling.test_fedbes_teachers_count_alike",
        ),
        small=(*FEW_STEPS, "aggregator.samples=2", "aggregator.lr=0.1"),
    ),
    "fedgen": Declared(
        Reduction(("trainer.alpha=0", "trainer.beta=0")),
        order=Exempt(
            OWN_DRAWS, "test_fedgen.test_fedgen_generator_does_not_depend_on_client_order"
        ),
        copies=Exempt(
            OWN_DRAWS, "test_fedgen.test_fedgen_generator_of_copied_clients_equals_that_of_one"
        ),
        small=(
            *FEW_STEPS,
            "aggregator.hidden=8",
            "aggregator.noise=4",
            "trainer.alpha=0.01",
            "trainer.beta=0.01",
        ),
    ),
    "dense": DENSE,
    "dense_authors_readme": DENSE,
    "dense_paper_literal": DENSE,
    "dense_coboost": DENSE,
    "fed_dafl": distilled(
        "test_fed_dafl.test_fed_dafl_epochs_equal_a_torch_loop",
        *("aggregator.iterations=2", "aggregator.b=6", "aggregator.nz=3", "aggregator.ngf=2"),
    ),
    "fed_adi": ADI,
    "fed_adi_full": ADI,
    "co_boosting": distilled(
        "test_co_boosting.test_co_boosting_without_its_parts_equals_dense", *GENERATED
    ),
    "local": Declared(
        Exempt(
            "nothing is averaged", "test_reference_points.test_local_with_one_client_equals_fedavg"
        )
    ),
    "ensemble": Declared(
        Exempt(
            "nothing is averaged",
            "test_reference_points.test_ensemble_has_the_models_of_local_training",
        )
    ),
    "centralized": Declared(
        Exempt(
            "one pooled client",
            "test_reference_points.test_centralized_full_batch_step_equals_fedavg",
        )
    ),
}
