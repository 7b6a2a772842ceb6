"""The questions, and the answers of a model that runs on no engine."""

ACCUMULATORS = "main_grad", "grad_acc"  # of Megatron, TransformerEngine and apex, and of ColossalAI


class Engine:
    """`model` is what the training forward calls. A subclass has `find(model)` as well: the engine in it, or None."""

    # Whether the backward of a micro-step that reduces gradients needs a forward in that micro-step.
    prepares_sync_in_forward = False
    # Whether it looks for parameters that a backward won't reach, in the last forward's graph alone.
    looks_for_unused_parameters = False
    # Whether a backward has to bring a gradient for every weight that is trained.
    waits_for_all_weights = False
    # Whether each forward may write into the model's buffers.
    broadcasts_buffers = False
    # Whether modules have views of weights as plain attributes.
    has_views_in_attributes = False
    # Whether the next backward writes its gradients into the memory of those before.
    reuses_gradients = False
    # Whether the loop has it run the backward, after which it goes on with the gradients of its own model.
    runs_backward = False
    # Whether gradients stay in `.grad` from a backward pass to the optimizer's step.
    leaves_gradients = True
    # The parameter that every backward pass has to reach, or None where none has to.
    link = None

    def __init__(self, model):
        self.model = model

    def parameters(self):
        """The parameters in whose `.grad` an optimizer finds gradients."""
        return list(self.model.parameters())

    @property
    def has_hooks(self):
        """Whether somebody's hooks run at each gradient that a parameter is given."""
        return any(one._backward_hooks or getattr(one, "_post_accumulate_grad_hooks", None) for one in self.parameters())

    @property
    def no_replay(self):
        """Why forwards and backwards that are no part of the update can't be run without changing it, or None."""
        parameters = self.parameters()
        if self.has_hooks:
            return "hooks run at each gradient that a parameter is given, and may keep it"
        if any(hasattr(parameter, name) for parameter in parameters for name in ACCUMULATORS):
            return "gradients are added up beside .grad (main_grad), where they can't be set aside"
        return None

    @property
    def rounds_gradients(self):
        """Whether gradients are reduced in less than float32."""
        return False

    def is_own(self, leaf):
        """Whether `leaf`, to which a graph leads, stands for some of `parameters()`, which are given its gradient."""
        return False

    def syncs_gradients(self):
        """Whether the backward of a forward that begins now reduces gradients; True where the forward doesn't matter."""
        return True

    # Why graphs of a rollout can't wait here for the update, or None.
    no_retaining = None

    def arm(self):
        """Before a backward pass through a graph that isn't the last forward's."""

    def leaves_whole_gradients(self):
        """Whether a backward pass that ends now leaves in `.grad` what the optimizer would be given."""
        return self.syncs_gradients()

    def hold_micro_step(self):
        """A function that puts the engine's count of micro-steps back to what it is now, where that matters."""
        return lambda: None

    def begin_without_pass(self):
        """In a backward that reaches no graph of the model, as those of a group's steps between: what begins one elsewhere.

        Raises `JaggError` where the engine can't have that.
        """

    def drop_gradients(self):
        """Drop all gradients and return True; False where some are kept that `zero_grad()` doesn't reach."""
        self.model.zero_grad()
        return True

    def waiting_bytes(self):
        """Bytes of the whole gradients, and of the gathered weights, that wait in a joint backward for its second graph.

        On every engine autograd adds up a parameter's gradients from both graphs before the engine gets to see them.
        """
        # A DTensor counts as a whole.
        return sum(self.n_elements(p) * p.element_size() * p.requires_grad for p in self.model.parameters()), 0

    def n_elements(self, parameter):
        return parameter.numel()

    def gathered_weights(self):
        """The storages into which weights are gathered, some of which stay full between a forward and its backward."""
        return []
