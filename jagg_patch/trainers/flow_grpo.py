"""Flow-GRPO's trainers: the loop is inside `main`, the training forward and the solver step are functions of their own."""

import functools
import inspect
from dataclasses import dataclass, replace

from ..contract import CONTRACTS, settings_behind_steps
from ..method.cost import StepCost
from .intercept import NO_RECORDS, all_call_lines, require_class, require_parameters
from ..method.plan import Steps
from ..loop.step import Step
from . import wrap

OLDER_WINDOW = "train_num_steps"  # of train_sd3_fast in August and September 2025


@dataclass(frozen=True)
class FlowGrpoTrainer:
    """The names of a trainer of this shape: `compute_log_prob` is one training forward, `sde_step_with_logprob` its solver step.

    `trains_window` says that it trains the SDE window where one is set, else all steps but the last, and not
    `timestep_fraction` of them; `window` is the setting of its size. `is_accelerate` says who starts the process group:
    accelerate, or the trainer itself with `init_distributed`.
    """

    name: str
    trains_window: bool = False
    window: str = "sde_window_size"
    checkpoints: bool | str = False  # or the name of the setting that says so
    is_accelerate: bool = True

    in_main = True

    @property
    def contract(self):
        return CONTRACTS[self.name]

    def as_written(self, text):
        """This trainer, planned by the window that the loop in `text` runs over: newer settings have both."""
        is_older = OLDER_WINDOW in settings_behind_steps(text, self.contract)
        return replace(self, trains_window=True, window=OLDER_WINDOW) if is_older else self

    def check(self, namespace):
        """Raise `JaggError` unless `namespace` has what the wrappers rely on."""
        for function, parameters in self.contract.parameters.items():
            require_parameters(namespace, function, parameters)
        if self.is_accelerate:
            require_class(namespace, "Accelerator")

    def _window(self, config):
        return max(getattr(config.sample, self.window, 0), 0) if self.trains_window else 0

    def defaults(self, config):
        """Settings whose default isn't JaggConfig's: a window is too short for a fraction of it: all of it is routed."""
        return {"frac": 1.0} if self._window(config) else {}

    def steps(self, config):
        """The `Steps` of a sample under `FLAGS.config`."""
        sampled = config.sample.num_steps
        if self.trains_window:
            trained = self._window(config) or sampled - 1
        else:
            trained = int(sampled * config.train.timestep_fraction)
        return Steps(sampled, trained, trained)

    def no_placement(self, config):
        """Why knots can't be placed by noise levels under `FLAGS.config`, or None."""
        return "each rollout trains a window of its own, at other noise levels" if self._window(config) else None

    no_retaining = None  # why graphs can't be retained, if they can't

    def step_cost(self, config):
        """A step's cost for the cost model, with the forward of the reference model."""
        checkpoints = getattr(config, self.checkpoints, False) if isinstance(self.checkpoints, str) else self.checkpoints
        return StepCost(
            backward=1.0 if config.use_lora else 2.0, recompute=float(checkpoints), reference=float(config.train.beta > 0)
        )

    def first_samples(self, config):
        """How many of a rank's trained batches come before the first optimizer step after their rollout, and how many there are.

        In later passes over the same samples none do.
        """
        n_batches = config.sample.num_batches_per_epoch
        return min(config.train.gradient_accumulation_steps, n_batches), n_batches * config.train.num_inner_epochs

    def start(self, namespace, begin):
        """`{name: replacement}` that calls `begin()` once the ranks can talk."""
        if self.is_accelerate:
            return wrap.start_with_accelerator(namespace, begin)
        return wrap.start_with(namespace, "init_distributed", begin)

    def wrappers(self, namespace, session):
        """`{name: replacement}` for `namespace`; every replacement calls the original."""
        flags, contract = namespace["FLAGS"], self.contract

        def plan():
            steps = self.steps(flags.config)
            session.plan(steps.trainable, steps.visited, shuffled=False)

        def read(arguments):
            timesteps, j = arguments["sample"]["timesteps"], arguments["j"]
            step = Step(j, timesteps[:, j], arguments["transformer"], lambda indices: timesteps[:, indices[0]])
            if not session.recording.is_on:
                return step
            latents, next_latents = (arguments["sample"][name][:, j] for name in ("latents", "next_latents"))
            return step._replace(latents=latents, next_latents=next_latents, at=lambda indices, latents: {"j": indices[0]})

        around_rollout = [session.rollout]
        if session.recording.is_on:
            # The rollout's solver step is that of its own module.
            require_parameters(namespace, contract.rollout, (), without=NO_RECORDS)
            pipeline = inspect.unwrap(namespace[contract.rollout]).__globals__
            for where in (namespace, pipeline):
                for function, parameters in contract.recording.items():
                    require_parameters(where, function, parameters, without=NO_RECORDS)
            for name in contract.solvers:
                recorded = wrap.solver_step(pipeline[name], session, "sample")
                around_rollout.append(functools.partial(wrap.replaced, pipeline, name, recorded))

        def require_fit(accelerator, prepared=()):  # where DeepSpeed may still change how many steps it accumulates
            wrap.require_fit(accelerator, self.steps(flags.config).visited, session.config)

        wrapped = {
            "main": wrap.whole_main(namespace["main"], session, plan),
            contract.forward: wrap.training_forward(namespace[contract.forward], session, read),
            **wrap.solver_steps(namespace, contract.solvers, session, "sample"),
        }
        if session.retaining.is_on:
            for lines in all_call_lines(namespace["main"], "perm", "randperm"):  # the Fast trainers and Qwen-Image's have none
                session.retaining.orders_samples = True
                wrapped["torch"] = wrap.torch_with_order(namespace["torch"], lines, session.retaining.ordered_samples)
        if contract.rollout in namespace:  # else nothing is on that needs it
            wrapped[contract.rollout] = wrap.within(namespace[contract.rollout], *around_rollout)
        if "eval" in namespace:
            wrapped["eval"] = wrap.within(namespace["eval"], session.evaluation)
        if self.is_accelerate:
            wrapped["Accelerator"] = wrap.accelerator(namespace["Accelerator"], require_fit, require_fit)
        return wrapped


TRAINERS = {
    trainer.name: trainer
    for trainer in (
        FlowGrpoTrainer("train_sd3"),
        FlowGrpoTrainer("train_sd3_fast", trains_window=True),
        FlowGrpoTrainer("train_sd3_GRPO_Guard"),
        FlowGrpoTrainer("train_flux"),
        FlowGrpoTrainer("train_flux_fast", trains_window=True),
        FlowGrpoTrainer("train_flux_kontext"),
        FlowGrpoTrainer("train_wan2_1", checkpoints=True),
        FlowGrpoTrainer("train_qwenimage", trains_window=True, checkpoints="activation_checkpointing", is_accelerate=False),
        FlowGrpoTrainer("train_qwenimage_edit", trains_window=True, checkpoints="activation_checkpointing", is_accelerate=False),
    )
}
