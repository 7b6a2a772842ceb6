"""Wrappers that the adapters share. Each calls the original, with what JAGG has put in some of its arguments' places."""

import functools
import inspect
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from ..engines.deepspeed import NO_REPLAY
from ..errors import JaggError, no_probe
from .intercept import ForwardingModule, called_from, local_of_caller
from ..method.plan import plan_groups

KNOWN_ENGINES = ("NO", "FSDP", "DEEPSPEED")  # and MULTI_GPU and so on, which are DDP


def training_forward(function, session, read):
    """`function` runs one training forward; `read(arguments)` gives its `Step`."""
    bind = inspect.signature(function).bind

    @functools.wraps(function)
    def wrapped_forward(*args, **kwargs):
        def forward(model=None, **changed):
            bound = bind(*args, **kwargs)
            bound.arguments.update(changed if model is None else {"transformer": model})
            return function(*bound.args, **bound.kwargs)

        return session.run_step(read(bind(*args, **kwargs).arguments), forward)

    return wrapped_forward


def solver_step(function, session, latents):
    """`function` is the solver step inside a training forward; its parameter `model_output` becomes the proxy.

    A rollout's solver step is recorded; the parameter `latents` has what the model was given, and one with a `prev_sample`
    belongs to no rollout.
    """
    bind = inspect.signature(function).bind

    @functools.wraps(function)
    def wrapped_solver_step(*args, **kwargs):
        bound = bind(*args, **kwargs)
        if bound.arguments.get("prev_sample") is None:
            is_trained = bound.arguments.get("noise_level") != 0  # outside of a window it adds no noise
            bound.arguments["model_output"] = session.sampled(
                bound.arguments.get(latents), bound.arguments["model_output"], is_trained
            )
        with session.solver_input(bound.arguments["model_output"]) as model_output:
            bound.arguments["model_output"] = model_output
            return function(*bound.args, **bound.kwargs)

    return wrapped_solver_step


def solver_steps(namespace, names, session, latents):
    """`{name: replacement}`. Where the trainer compiles any of its functions, the graph breaks at them: Python decides there."""
    wrapped = {name: solver_step(namespace[name], session, latents) for name in names}
    if not any(hasattr(function, "_torchdynamo_orig_callable") for function in namespace.values()):
        return wrapped
    for function in wrapped.values():
        for name in [name for name in vars(function) if name.startswith("_torchdynamo")]:
            delattr(function, name)  # `wraps` has copied it from a compiled one, which torch would call instead
    return {name: torch.compiler.disable(function) for name, function in wrapped.items()}


def within(function, *contexts):
    """`function`, each call of it inside `context()` of all `contexts`."""

    @functools.wraps(function)
    def wrapped_function(*args, **kwargs):
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return function(*args, **kwargs)

    return wrapped_function


@contextmanager
def replaced(namespace, name, replacement):
    original = namespace[name]
    namespace[name] = replacement
    try:
        yield
    finally:
        namespace[name] = original


def torch_with_order(torch, lines, order, selected=None):
    """The module `torch`, but `randperm` called from `lines` returns `order(permutation)`.

    Where `selected` is given, the name of a dict in the function with these lines, `order` gets its latents as well.
    """

    def wrapped_randperm(*args, **kwargs):
        permutation = torch.randperm(*args, **kwargs)
        if not called_from(lines):
            return permutation
        samples = local_of_caller(lines, selected) if selected else None
        return order(permutation) if samples is None else order(permutation, samples.get("latents"))

    return ForwardingModule(torch, randperm=wrapped_randperm)


def whole_main(main, session, plan=lambda: None, undo=nullcontext()):
    """`main` as one long training step, planned at once; `undo` is left when it ends."""

    @functools.wraps(main)
    def wrapped_main(*args, **kwargs):
        with undo, session.training_step():
            plan()
            return main(*args, **kwargs)

    return wrapped_main


def accelerator(cls, after_init, after_prepare=lambda made, prepared: None):
    """A subclass of accelerate's `Accelerator` that reports when it is made, and with what `prepare` returned."""

    def __init__(self, *args, **kwargs):
        super(subclass, self).__init__(*args, **kwargs)
        after_init(self)

    def prepare(self, *args, **kwargs):
        prepared = super(subclass, self).prepare(*args, **kwargs)
        after_prepare(self, prepared if isinstance(prepared, tuple) else (prepared,))
        return prepared

    subclass = type(cls.__name__, (cls,), {"__init__": __init__, "prepare": prepare, "__doc__": cls.__doc__})
    return subclass


def start_with_accelerator(namespace, begin):
    """`{name: replacement}` that calls `begin()` once accelerate has started the process group."""
    if not inspect.isclass(namespace.get("Accelerator")):
        return {}
    return {"Accelerator": accelerator(namespace["Accelerator"], lambda made: begin())}


def start_with(namespace, name, begin, before=False):
    """`{name: replacement}` that calls `begin()` after the first call of that function, or before it."""
    if name not in namespace:
        return {}
    function, begun = namespace[name], False

    @functools.wraps(function)
    def started_function(*args, **kwargs):
        nonlocal begun
        first, begun = not begun, True
        if first and before:
            begin()
        result = function(*args, **kwargs)
        if first and not before:
            begin()
        return result

    return {name: started_function}


def require_fit(accelerator, n_visited, config):
    """Raise `JaggError` if groups are planned and accelerate's engine, or when it syncs gradients, doesn't suit them."""
    engine = accelerator.distributed_type.value
    if config.probe_every and engine == "DEEPSPEED":
        raise no_probe(NO_REPLAY)
    if not (plan_groups(n_visited, config) or config.is_auto):
        return
    if engine not in KNOWN_ENGINES and not engine.startswith("MULTI_"):
        raise JaggError(
            f"accelerate runs {engine} here, and JAGG hasn't been shown to be right on it\n"
            "launch with an accelerate configuration for DDP, FSDP or DeepSpeed, or run with JAGG_ENABLED=0"
        )
    n_micro_steps = accelerator.gradient_accumulation_steps
    if n_micro_steps % n_visited:
        raise JaggError(
            f"accelerate syncs gradients every {n_micro_steps} steps, not a multiple of the {n_visited} trained per sample\n"
            "that could be inside a group: unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS, or run with JAGG_ENABLED=0"
        )
