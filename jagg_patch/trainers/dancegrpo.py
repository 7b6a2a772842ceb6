"""DanceGRPO's trainers: which module-level names are wrapped, by what, and how their arguments are read."""

import functools
import inspect
from dataclasses import dataclass

import torch

from ..cost import StepCost
from ..errors import JaggError
from ..intercept import ForwardingModule, call_lines, called_from, require_module, require_parameters


@dataclass(frozen=True)
class DanceGrpoTrainer:
    """The names of a trainer of the shared shape, with the parameters that the wrappers rely on.

    `train_one_step` runs one training step, `sample_reference_model` the rollout, `grpo_one_step` one training forward,
    `flux_step` the solver step inside it; `permutation` is the variable in `train_one_step` that orders the timesteps.
    """

    name: str
    permutation: str = "perms"
    backward_cost: float = 2.0  # in forwards: the gradients of the activations and of the weights

    parameters = {
        "train_one_step": ("args",),
        "sample_reference_model": ("args",),
        "grpo_one_step": ("timesteps", "i"),
        "flux_step": ("model_output",),
    }

    def check(self, namespace):
        """Raise `JaggError` unless `namespace` has what the wrappers rely on."""
        for function, parameters in self.parameters.items():
            require_parameters(namespace, function, parameters)
        require_module(namespace, "torch")
        self._permutation_lines(namespace)

    def _permutation_lines(self, namespace):
        return call_lines(namespace["train_one_step"], self.permutation, "randperm")

    def visited_steps(self, args):
        """`(T - 1, k)`: steps of a trajectory that can be trained (never the last one), and how many of them are."""
        if args.sampling_steps is None:
            raise JaggError("--sampling_steps is not set\nthe steps of a trajectory can't be planned without it: pass it")
        n_trajectory = args.sampling_steps - 1
        return n_trajectory, int(n_trajectory * args.timestep_fraction)

    def step_cost(self, args):
        """A step's cost for the cost model, with the share of blocks under activation checkpointing."""
        recompute = float(args.selective_checkpointing) if args.gradient_checkpointing else 0.0
        return StepCost(backward=self.backward_cost, recompute=recompute)

    def wrappers(self, namespace, session):
        """`{name: replacement}` for `namespace`; every replacement calls the original."""
        permutation_lines = self._permutation_lines(namespace)

        def with_binder(name):
            return namespace[name], inspect.signature(namespace[name]).bind

        train_one_step = namespace["train_one_step"]

        @functools.wraps(train_one_step)
        def wrapped_train_one_step(*args, **kwargs):
            with session.training_step():
                return train_one_step(*args, **kwargs)

        sample_reference_model, bind_rollout = with_binder("sample_reference_model")

        @functools.wraps(sample_reference_model)
        def wrapped_sample_reference_model(*args, **kwargs):
            result = sample_reference_model(*args, **kwargs)
            session.rollout_done(*self.visited_steps(bind_rollout(*args, **kwargs).arguments["args"]))
            return result

        grpo_one_step, bind_step = with_binder("grpo_one_step")

        @functools.wraps(grpo_one_step)
        def wrapped_grpo_one_step(*args, **kwargs):
            arguments = bind_step(*args, **kwargs).arguments
            forward = functools.partial(grpo_one_step, *args, **kwargs)
            return session.run_step(arguments["i"], arguments["timesteps"], forward)

        flux_step, bind_solver = with_binder("flux_step")

        @functools.wraps(flux_step)
        def wrapped_flux_step(*args, **kwargs):
            bound = bind_solver(*args, **kwargs)
            with session.solver_input(bound.arguments["model_output"]) as model_output:
                bound.arguments["model_output"] = model_output
                return flux_step(*bound.args, **bound.kwargs)

        def wrapped_randperm(*args, **kwargs):
            permutation = torch.randperm(*args, **kwargs)
            return session.order(permutation) if called_from(permutation_lines) else permutation

        return {
            "train_one_step": wrapped_train_one_step,
            "sample_reference_model": wrapped_sample_reference_model,
            "grpo_one_step": wrapped_grpo_one_step,
            "flux_step": wrapped_flux_step,
            "torch": ForwardingModule(namespace["torch"], randperm=wrapped_randperm),
        }


# A trainer of the shared shape is one row; what differs from the defaults is an argument.
TRAINERS = {
    trainer.name: trainer
    for trainer in (
        DanceGrpoTrainer("train_grpo_flux"),
        DanceGrpoTrainer("train_grpo_flux_lora", backward_cost=1.0),  # frozen weights get no gradient
    )
}
