"""Training forwards that can be run again, right before an optimizer step, so that training goes on as if nothing had been."""

import random
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..engines import engine_of
from ..engines.gradients import GradientsSetAside
from ..errors import JaggError
from ..loop.weights import hides_weights, leaves
from ..method.plan import passes
from ..method.proxy import graph_nodes
from ..method.quality import SAME, sums
from .settings import attributes_of, modules_of, put_attributes, put_settings, settings_of


@dataclass(eq=False)
class KeptForward:
    """A training forward as it was called: in what autocast and random state, with which settings, and which weights trained.

    versions: of what else it might change.
    output: what the model gave, `[B, ...]`. upstream_grad: its loss's s_j, once that has come.
    was_run: whether it has been, or its output been estimated.
    result: copies of the tensors in what it returned, if they are kept. again: the same of when it was run last.
    """

    visit: object
    autocast: list
    random: list
    trained: list
    versions: list
    settings: list
    output: torch.Tensor | None = None
    upstream_grad: torch.Tensor | None = None
    was_run: bool = True
    result: list | None = None
    again: list | None = None

    @classmethod
    def of(cls, visit):
        cached = torch.is_autocast_cache_enabled()
        autocast = [
            dict(
                device_type=device,
                dtype=torch.get_autocast_dtype(device),
                enabled=torch.is_autocast_enabled(device),
                cache_enabled=cached,
            )
            for device in ("cpu", "cuda")
        ]
        model = visit.step.model
        return cls(visit, autocast, random_state([model]), which_are_trained(model), versions_of(model), settings_of(model))

    def keep_gradient(self, value):
        """`value` stands for the model output in the solver step, so its gradient is s_j."""
        value.register_hook(self._add)

    def _add(self, grad):
        # A copy: autograd may give a parameter this memory for its gradient.
        self.upstream_grad = grad.clone() if self.upstream_grad is None else self.upstream_grad + grad

    @property
    def step(self):
        return self.visit.step

    def run(self, session):
        """The model output again, `[B, ...]`, with a graph where gradients are on."""
        put_settings(self.settings)
        train_these(self.trained)
        with session.capturing() as outputs, ExitStack() as stack:
            for state in self.autocast:
                if state["enabled"]:
                    stack.enter_context(torch.autocast(**state))
            put_back(self.random)
            self.again = copies(self.visit.forward())
        if len(outputs) != 1:
            raise JaggError(
                f"{self.visit.where}: the solver step ran {len(outputs)} times in one training forward, not once\n"
                "its gradient can't be told apart for the probe: run without JAGG_PROBE_EVERY"
            )
        return outputs[0]

    def was(self, output, same=SAME):
        """Whether `run` gave again what the update had; it doesn't if the loop changes its samples in place, say."""
        return is_alike(self.output, output.detach(), same)

    def returned_again(self, same=SAME):
        """Whether `run` has returned what the training forward did, besides the model output; as far as that is known."""
        if self.result is None:
            return True
        pairs = zip(self.result, self.again, strict=False)
        return len(self.result) == len(self.again) and all(is_alike(*pair, same) for pair in pairs)

    def backward(self, session, grad, aside):
        """Run it, and the backward pass from its output with `grad`. Whether it `was` the same."""
        return self.backward_from(self.run(session), grad, aside)

    def backward_from(self, output, grad, aside, same=SAME):
        """The same, of what `run` has returned."""
        aside.also(leaves([output], engine_of(self.step.model)))
        torch.autograd.backward(output, grad)
        return self.was(output, same)


def backward_as_trained(session, forwards, plan, folded, aside):
    """Run a group as training does, with the gradients `folded` at its knots. Whether every forward `was` the same.

    `plan` is its `Group`, `forwards` are those of its steps.
    """
    engine = engine_of(forwards[0].step.model)
    gradients = dict(zip(plan.knots, folded, strict=True))
    ready = passes(plan, session.schedule.name == "joint")
    outputs, known = {}, True
    for position, forward in zip(plan, forwards, strict=True):
        with torch.set_grad_enabled(position in gradients):
            output = forward.run(session)
        known &= forward.was(output)
        if position in gradients:
            outputs[position] = output
            aside.also(leaves([output], engine))
        del output
        if position in ready:
            knots = ready[position]
            torch.autograd.backward([outputs.pop(knot) for knot in knots], [gradients[knot] for knot in knots])
    return known


def compare(approximate, exact):
    """`quality.sums` of two gradients by parameter, on the exact one's devices; what one of them lacks is zero.

    Of weights alone: a loop may ask for the gradient of its latents as well.
    """
    parameters = [tensor for tensor in approximate | exact if isinstance(tensor, torch.nn.Parameter)]
    return sums(map(approximate.get, parameters), map(exact.get, parameters))


def is_low(output):
    """Whether anything in the graph of `output` is less than float32."""
    dtypes = {one.dtype for node in graph_nodes([output]) for one in node._input_metadata}
    return bool(dtypes & {torch.bfloat16, torch.float16})


def reach(output, engine):
    """`leaves` of a graph; with all the model's weights, where some may be hidden in it."""
    hidden = engine.parameters() if any(map(hides_weights, graph_nodes([output]))) else ()
    return dict.fromkeys([*leaves([output], engine), *hidden])


def why_no_replay(optimizer, model, reached):
    """Why a forward whose output's graph leads to what is `reached` can't be run again, with its backward, or None.

    Another network's gradients may be on their way through an engine of its own, and whoever steps them may have done so by now.
    """
    engine = engine_of(model)
    held, own = {parameter for group in optimizer.param_groups for parameter in group["params"]}, set(engine.parameters())
    reached = {leaf for leaf in reached if isinstance(leaf, torch.nn.Parameter)}
    if reached - held - own:
        return "the training forward trains weights that are neither the model's nor, as they are, the optimizer's"
    if engine.waits_for_all_weights and {weight for weight in own if weight.requires_grad} - reached:
        return "DDP waits for weights that the model's output doesn't depend on, but another term of the loss may"
    return None


def copies(result):
    """The tensors in what a forward returns, also in an object's attributes."""
    values = tree_leaves(result)
    values += tree_leaves([vars(value) for value in values if not torch.is_tensor(value) and hasattr(value, "__dict__")])
    return [value.detach().clone() for value in values if torch.is_tensor(value)]


def is_alike(one, other, same):
    if one.shape != other.shape:
        return False
    return not bool((other.float() - one.float()).norm() > same * one.float().norm())  # NaN is what it was


def random_state(models):
    """For `put_back`: the state of every source of random numbers that a forward of `models` may draw from."""
    found = [(torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate())]
    for device in accelerators(models):
        generators = torch.get_device_module(device)
        found.append((partial(generators.set_rng_state, device=device), generators.get_rng_state(device)))
    if "numpy" in sys.modules:
        numbers = sys.modules["numpy"].random
        found.append((numbers.set_state, numbers.get_state()))
    return found


def accelerators(models):
    """Devices that the `models` may compute on, but for the host: those of their weights, and CUDA's current one."""
    found = [weight.device for model in models for weight in engine_of(model).parameters()]
    if torch.cuda.is_initialized():
        found.append(torch.device("cuda", torch.cuda.current_device()))
    return [device for device in dict.fromkeys(found) if device.type not in ("cpu", "meta")]


def put_back(states):
    for put, state in states:
        put(state)


def which_are_trained(model):
    return [(parameter, parameter.requires_grad) for parameter in engine_of(model).parameters()]


def versions_of(model):
    """Tensors besides buffers that a forward may change in place, with their versions: weights, modules' attributes."""
    engine = engine_of(model)
    found = engine.parameters()
    if not engine.has_views_in_attributes:
        found += [value for module in modules_of(model) for value in vars(module).values() if torch.is_tensor(value)]
    return [(tensor, version(tensor)) for tensor in dict.fromkeys(found)]


def version(tensor):
    return None if tensor.is_inference() else tensor._version


def is_expanded(tensor):
    """Whether elements share memory: torch lets nobody change them in place."""
    return 0 in tensor.stride() and tensor.numel() > 1


def train_these(trained):
    """Undo `which_are_trained` of other moments."""
    for parameter, is_trained in trained:
        if parameter.requires_grad != is_trained:
            parameter.requires_grad_(is_trained)


@contextmanager
def nothing_changed(forwards, optimizer):
    """Inside, kept `forwards` may be run, and backward passes from their outputs.

    After it gradients, which weights are trained, buffers, modules' attributes and random states are as before. Yields the
    `GradientsSetAside`.
    """
    models = list(dict.fromkeys(forward.step.model for forward in forwards))
    trained = [pair for model in models for pair in which_are_trained(model)]
    parameters = [parameter for parameter, _ in trained]
    parameters += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    engines = [engine_of(model) for model in models]
    state, attributes = random_state(models), [entry for model in models for entry in attributes_of(model)]
    settings = [entry for model in models for entry in settings_of(model)]  # a list may have changed, and a generator's state
    changing = [buffer for model in models for buffer in model.buffers()]  # running statistics, say
    before = WeakIdKeyDictionary(forwards[0].versions)
    # Others may be large. What has been made since then may be changed by the next forward.
    changing += [tensor for model in models for tensor, now in versions_of(model) if before.get(tensor, -1) != now]
    buffers = [(tensor, tensor.detach().clone()) for tensor in dict.fromkeys(changing) if not is_expanded(tensor)]
    try:
        with torch.enable_grad(), GradientsSetAside(parameters, engines) as aside:
            yield aside
    finally:
        put_back(state)
        put_attributes(attributes)
        put_settings(settings)
        train_these(trained)
        for buffer, kept in buffers:
            buffer.detach().copy_(kept)
