"""DanceGRPO's trainers of the shared shape: which module-level names are wrapped, by what, and how their arguments are read."""

import functools
import inspect
from dataclasses import dataclass

import torch

from ..contract import CONTRACTS
from ..method.cost import StepCost
from ..errors import JaggError
from .intercept import NO_RECORDS, call_lines, require_module, require_parameters
from ..method.plan import Steps
from ..loop.step import Step
from . import wrap


@dataclass(frozen=True)
class DanceGrpoTrainer:
    """A trainer of the shared shape; the names that are wrapped, and what the wrappers rely on, are its `contract`.

    The loop runs one training step, the rollout is all of its samples', `run_sample_step` a batch of it.
    """

    name: str
    backward_cost: float = 2.0  # in forwards: the gradients of the activations and of the weights
    always_checkpoints: bool = False  # its --gradient_checkpointing is read by nobody
    best_of_n: bool = False  # it trains --bestofn of each --num_generations samples

    in_main = False

    @property
    def contract(self):
        return CONTRACTS[self.name]

    def check(self, namespace):
        """Raise `JaggError` unless `namespace` has what the wrappers rely on."""
        for function, parameters in self.contract.parameters.items():
            require_parameters(namespace, function, parameters)
        require_module(namespace, "torch")
        self._permutation_lines(namespace)

    def _permutation_lines(self, namespace):
        return call_lines(namespace[self.contract.loop], self.contract.permutation, "randperm")

    def defaults(self, args):
        """Settings whose default isn't JaggConfig's."""
        return {}

    def steps(self, args):
        """The `Steps` of a sample under the trainer's parsed `args`; its last step is never trained."""
        if args.sampling_steps is None:
            raise JaggError("--sampling_steps is not set\nthe steps of a trajectory can't be planned without it: pass it")
        trainable = args.sampling_steps - 1
        sampled = args.sampling_steps * (args.num_generations / args.bestofn if self.best_of_n and args.bestofn else 1)
        return Steps(sampled, trainable, int(trainable * args.timestep_fraction))

    def no_placement(self, args):
        """Why knots can't be placed by noise levels under the trainer's parsed `args`, or None."""
        return None

    no_retaining = None  # why graphs can't be retained, if they can't

    def step_cost(self, args):
        """A step's cost for the cost model, with the share of blocks under activation checkpointing."""
        checkpoints = self.always_checkpoints or args.gradient_checkpointing
        return StepCost(backward=self.backward_cost, recompute=float(args.selective_checkpointing) if checkpoints else 0.0)

    def first_samples(self, args):
        """Of a rank's trained samples: how many come before their rollout's first optimizer step, and how many there are."""
        n_samples = args.train_batch_size * (args.bestofn if self.best_of_n and args.bestofn else args.num_generations)
        return min(args.gradient_accumulation_steps, n_samples), n_samples

    def start(self, namespace, begin):
        """`{name: replacement}` that calls `begin()` before the first training step, when the ranks can talk."""
        return wrap.start_with(namespace, self.contract.loop, begin, before=True)

    def wrappers(self, namespace, session):
        """`{name: replacement}` for `namespace`; every replacement calls the original."""
        contract = self.contract
        train_one_step = namespace[contract.loop]

        @functools.wraps(train_one_step)
        def wrapped_train_one_step(*args, **kwargs):
            with session.training_step():
                session.rollout_begins()
                return train_one_step(*args, **kwargs)

        sample_reference_model = namespace[contract.rollout]
        bind_rollout = inspect.signature(sample_reference_model).bind

        @functools.wraps(sample_reference_model)
        def wrapped_sample_reference_model(*args, **kwargs):
            result = sample_reference_model(*args, **kwargs)
            steps = self.steps(bind_rollout(*args, **kwargs).arguments["args"])
            session.plan(steps.trainable, steps.visited)
            return result

        def read(arguments):
            timesteps, sigmas = arguments["timesteps"], arguments["sigma_schedule"]

            def timesteps_at(indices):
                return torch.full_like(timesteps, int(sigmas[indices[0]] * 1000))

            following = functools.partial(elements_from, arguments["i"])
            step = Step(arguments["i"], timesteps, arguments["transformer"], timesteps_at, following=following)
            if not session.recording.is_on:
                return step
            latents = arguments["latents"]

            def at(indices, other_latents):
                return {"i": indices[0], "timesteps": timesteps_at(indices), "latents": other_latents.to(latents.dtype)}

            return step._replace(latents=latents, next_latents=arguments["pre_latents"], at=at)

        wrapped = {
            contract.loop: wrapped_train_one_step,
            contract.rollout: wrapped_sample_reference_model,
            contract.forward: wrap.training_forward(namespace[contract.forward], session, read),
            **wrap.solver_steps(namespace, contract.solvers, session, "latents"),
            "torch": wrap.torch_with_order(
                namespace["torch"],
                self._permutation_lines(namespace),
                session.sort,
                "samples" if self.best_of_n and session.retaining.is_on else None,
            ),
        }
        if session.recording.is_on:
            for function, parameters in contract.recording.items():
                require_parameters(namespace, function, parameters, without=NO_RECORDS)
            wrapped["run_sample_step"] = wrap.within(namespace["run_sample_step"], session.sampling)
        return wrapped


def elements_from(element, n_elements):
    """`n_elements` of a tensor from `element` on, which is a view of one of them; None if it isn't, or if there are fewer."""
    if not torch.is_tensor(element) or element._base is None:
        return None
    try:
        return element.as_strided([n_elements], [1]).tolist()
    except RuntimeError:
        return None


# A trainer of the shared shape is one row; what differs from the defaults is an argument.
TRAINERS = {
    trainer.name: trainer
    for trainer in (
        DanceGrpoTrainer("train_grpo_flux"),
        DanceGrpoTrainer("train_grpo_flux_lora", backward_cost=1.0),  # frozen weights get no gradient
        DanceGrpoTrainer("train_grpo_qwenimage", always_checkpoints=True),
        DanceGrpoTrainer("train_grpo_qwenimage_edit", always_checkpoints=True),
        DanceGrpoTrainer("train_grpo_hunyuan", best_of_n=True),
        DanceGrpoTrainer("train_grpo_skyreels_i2v"),
        DanceGrpoTrainer("train_grpo_wan_2_1"),
    )
}
