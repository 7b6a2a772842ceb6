"""Which names of which trainer are relied on: `CONTRACTS`, by the trainer's name."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Contract:
    """The shape of a training loop.

    `loop` is the function that has it. It calls `rollout`, and then `forward` once in every pass of an innermost `for` loop,
    whose variable selects the argument `step` of that call (a parameter's name, or a position where `forward` is no function of
    the trainer's); a `backward()` follows in the same loop. `permutation` is the variable in `loop` that orders the steps, and
    `permuted_loops` how many loops run between it and the forward. `forward` calls one of the `solvers` once.
    """

    loop: str
    rollout: str
    forward: str
    step: str | int
    hook: tuple  # the calls, one of them, before whose statement it stands
    solvers: tuple = ()
    permutation: str | None = None
    permuted_loops: int = 2  # over the samples, over the steps
    permuted_step: str | None = None  # the parameter of `forward` that is given the step as an element of `permutation`
    steps_optimizer: bool = False  # in the loop over steps, where accelerate counts
    parameters: dict = field(default_factory=dict)  # of functions, by name
    recording: dict = field(default_factory=dict)  # what is needed as well where a rollout is recorded
    plans_at_start: bool = False  # so the rollout is looked for in `recording` alone


DANCEGRPO = Contract(
    loop="train_one_step",
    rollout="sample_reference_model",
    forward="grpo_one_step",
    step="timesteps",
    hook=("parser.parse_args", "parser.parse_known_args"),
    solvers=("flux_step",),
    permutation="perms",
    permuted_step="i",
    parameters={
        "train_one_step": ("args",),
        "sample_reference_model": ("args",),
        "grpo_one_step": ("transformer", "timesteps", "i", "sigma_schedule"),
        "flux_step": ("model_output",),
    },
    recording={
        "run_sample_step": (),
        "grpo_one_step": ("latents", "pre_latents"),
        "flux_step": ("latents", "prev_sample"),
    },
)
DANCEGRPO_SD = Contract(
    loop="main",
    rollout="pipeline_with_logprob",
    forward="unet",
    step=1,
    hook=("app.run",),
    permutation="perms",
    steps_optimizer=True,
    parameters={"main": (), "pipeline_with_logprob": ("self",)},
)
FLOW_GRPO = Contract(
    loop="main",
    rollout="pipeline_with_logprob",
    forward="compute_log_prob",
    step="j",
    hook=("app.run",),
    solvers=("sde_step_with_logprob",),
    steps_optimizer=True,
    parameters={
        "main": (),
        "compute_log_prob": ("transformer", "sample", "j"),
        "sde_step_with_logprob": ("model_output",),
    },
    recording={"pipeline_with_logprob": (), "sde_step_with_logprob": ("model_output", "sample", "prev_sample")},
    plans_at_start=True,
)
WAN = replace(
    FLOW_GRPO,
    rollout="wan_pipeline_with_logprob",
    recording={"wan_pipeline_with_logprob": ()} | {k: v for k, v in FLOW_GRPO.recording.items() if k != FLOW_GRPO.rollout},
)
QWEN = replace(FLOW_GRPO, parameters=FLOW_GRPO.parameters | {"init_distributed": ()})

CONTRACTS = {
    **dict.fromkeys(
        [
            f"train_grpo_{name}"
            for name in ("flux", "flux_lora", "qwenimage", "qwenimage_edit", "hunyuan", "skyreels_i2v", "wan_2_1")
        ],
        DANCEGRPO,
    ),
    "train_grpo_sd": DANCEGRPO_SD,
    **dict.fromkeys(
        [f"train_{name}" for name in ("sd3", "sd3_fast", "sd3_GRPO_Guard", "flux", "flux_fast", "flux_kontext")],
        FLOW_GRPO,
    ),
    "train_wan2_1": WAN,
    **dict.fromkeys(["train_qwenimage", "train_qwenimage_edit"], QWEN),
}
