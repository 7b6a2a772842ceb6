"""DanceGRPO's Stable Diffusion trainer: everything inside `main`, a UNet under accelerate, batches of several samples.

Its forward isn't a function of its own, so the UNet that `Accelerator.prepare` returns is followed instead, and the proxy
stands for the UNet's own output, before guidance.
"""

import functools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType

import torch

from ..contract import DANCEGRPO_SD
from ..method.cost import StepCost
from ..errors import JaggError
from .intercept import call_lines, changed, require_class, require_module, require_parameters
from ..method.plan import Steps
from ..loop.step import Step
from . import wrap


class _Rollout:
    """Which trajectory step stands where in each sample: a pass permutes what the passes before it have permuted.

    Two arrangements a sample, since ours differs from the one that upstream would have by now, and its draws refer to that.
    """

    def __init__(self):
        self.index_of = {}  # timestep: trajectory step
        self._upstream, self._ours = [], []  # one `[T - 1]` a sample
        self._is_ordered = False

    def add(self, n_samples, timesteps):
        """`timesteps` `[T]` of the scheduler, of which the last is never trained."""
        if self._is_ordered:
            self.__init__()
        self.index_of = {t: index for index, t in enumerate(timesteps[:-1].tolist())}
        steps = torch.arange(len(timesteps) - 1)
        self._upstream += [steps] * n_samples
        self._ours += [steps] * n_samples

    def order(self, session, permutation):
        """The permutation that puts into our arrangement the steps that `permutation` selects from upstream's, in order."""
        self._is_ordered = True
        if not session.order.routes:
            return permutation
        sample = session.order.n_ordered
        if sample >= len(self._ours):
            raise JaggError(
                f"the trainer orders more samples than the {len(self._ours)} of its rollout before it has visited them\n"
                "the plan would be wrong: run with JAGG_ENABLED=0 and report this upstream version"
            )
        self._upstream[sample] = self._upstream[sample][permutation.cpu()]
        ordered = session.order.sort(self._upstream[sample])
        place_of = self._ours[sample].argsort()
        self._ours[sample] = ordered
        return place_of[ordered].to(permutation)

    def indices(self, timesteps):
        """The trajectory steps of `[B]` timesteps; a timestep that the scheduler doesn't have is -1."""
        return [self.index_of.get(t, -1) for t in timesteps.tolist()]

    def timesteps(self, indices):
        """The inverse: a list of timesteps."""
        timesteps = list(self.index_of)
        return [timesteps[index] for index in indices]


@dataclass(frozen=True)
class StableDiffusionTrainer:
    """`main` is the whole trainer."""

    name: str

    in_main = True
    contract = DANCEGRPO_SD

    def check(self, namespace):
        """Raise `JaggError` unless `namespace` has what the wrappers rely on."""
        for function, parameters in self.contract.parameters.items():
            require_parameters(namespace, function, parameters)
        require_class(namespace, "Accelerator")
        require_module(namespace, "torch")
        call_lines(namespace["main"], self.contract.permutation, "randperm")

    def defaults(self, config):
        """Settings whose default isn't JaggConfig's."""
        return {}

    def steps(self, config):
        """The `Steps` of a sample under `FLAGS.config`; its last step is never trained."""
        trainable = config.sample.num_steps - 1
        return Steps(config.sample.num_steps, trainable, int(trainable * config.train.timestep_fraction))

    def no_placement(self, config):
        """Why knots can't be placed by noise levels, or None."""
        return "a timestep of Stable Diffusion's scheduler isn't a noise level, as one of flow matching is"

    no_retaining = "a batch of its update is of samples of several batches of the rollout, each of them at a step of its own"

    def step_cost(self, config):
        """A step's cost for the cost model; the UNet isn't checkpointed."""
        return StepCost(backward=1.0 if config.use_lora else 2.0, recompute=0.0)

    def start(self, namespace, begin):
        """`{name: replacement}` that calls `begin()` once the `Accelerator` has started the process group."""
        return wrap.start_with_accelerator(namespace, begin)

    def wrappers(self, namespace, session):
        """`{name: replacement}` for `namespace`; every replacement calls the original."""
        rollout, undo = _Rollout(), ExitStack()
        flags, lines = namespace["FLAGS"], call_lines(namespace["main"], self.contract.permutation, "randperm")
        pipeline_with_logprob = namespace[self.contract.rollout]

        @functools.wraps(pipeline_with_logprob)
        def wrapped_pipeline_with_logprob(pipeline, *args, **kwargs):
            with session.rollout(), self._recorded(pipeline.unet, session, flags):
                result = pipeline_with_logprob(pipeline, *args, **kwargs)
            _, _, _, log_probs = result
            rollout.add(len(log_probs[0]), pipeline.scheduler.timesteps)
            steps = self.steps(flags.config)
            session.plan(steps.trainable, steps.visited)
            return result

        def after_init(accelerator):
            wrap.require_fit(accelerator, self.steps(flags.config).visited, session.config)

        def after_prepare(made, prepared):
            models = [item for item in prepared if isinstance(item, torch.nn.Module)]
            if len(models) > 1:
                raise changed(namespace, f"Accelerator.prepare() is given {len(models)} models, not the UNet alone")
            for model in models:
                if "forward" in vars(model):  # accelerate's, for mixed precision
                    undo.callback(setattr, model, "forward", model.forward)
                else:
                    undo.callback(delattr, model, "forward")
                model.forward = MethodType(self._forward(model.forward, session, rollout, flags), model)

        return {
            "main": wrap.whole_main(namespace["main"], session, undo=undo),
            self.contract.rollout: wrapped_pipeline_with_logprob,
            "Accelerator": wrap.accelerator(namespace["Accelerator"], after_init, after_prepare),
            "torch": wrap.torch_with_order(namespace["torch"], lines, functools.partial(rollout.order, session)),
        }

    @contextmanager
    def _recorded(self, unet, session, flags):
        """The rollout's calls of the UNet, which may be the one that `prepare` has wrapped or not."""

        def record(unet, args, kwargs, output):
            copies = 2 if flags.config.sample.guidance_scale > 1 else 1
            sample = args[0] if args else kwargs["sample"]
            output = output[0] if isinstance(output, tuple) else output.sample
            session.recording.records.add(sample.chunk(copies)[0], output)

        hook = unet.register_forward_hook(record, with_kwargs=True) if session.recording.is_recording else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _forward(self, forward, session, rollout, flags):
        call = getattr(forward, "__func__", lambda model, *args, **kwargs: forward(*args, **kwargs))

        @functools.wraps(call)
        def wrapped_forward(model, sample, timestep, *args, **kwargs):
            def forward_to_proxy(model=model, sample=sample, timestep=timestep):
                run = functools.partial(call, model) if isinstance(model, torch.nn.Module) else model
                output = run(sample, timestep, *args, **kwargs)
                session.model_returned(output)
                with session.solver_input(output.sample) as proxy:
                    return type(output)(sample=proxy)  # of which a loss can use nothing but the proxy

            if not session.trains:
                return call(model, sample, timestep, *args, **kwargs)
            copies = 2 if flags.config.train.cfg else 1  # with guidance the batch is there twice

            def timesteps_at(indices):
                return timestep.new_tensor(rollout.timesteps(indices) * copies)

            def at(indices, latents):
                return {"sample": torch.cat([latents.to(sample)] * copies), "timestep": timesteps_at(indices)}

            indices = rollout.indices(timestep.chunk(copies)[0])
            latents = sample.chunk(copies)[0]
            return session.run_step(Step(indices, timestep, model, timesteps_at, latents, None, at), forward_to_proxy)

        return wrapped_forward


TRAINERS = {trainer.name: trainer for trainer in (StableDiffusionTrainer("train_grpo_sd"),)}
