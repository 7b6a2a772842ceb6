"""What a session tells of, in the order in which it comes."""

from contextlib import nullcontext


class Watcher:
    """A session calls these on everyone who watches it, itself as the first argument. A watcher that raises ends the step."""

    def training_step_begins(self, session):
        """The loop is entered."""

    def rollout_begins(self, session):
        """A batch of it; no update is going on."""

    def evaluation_ends(self, session):
        """Samples that aren't trained on have been drawn."""

    def plan_comes(self, session):
        """A rollout is over, and what its update visits is about to be planned."""

    def update_begins(self, session, step):
        """Before the first training forward on a rollout; `session.order` has the plan."""

    def step_begins(self, session, visit):
        """Before a training forward; the group that it goes on with, if there is one, is in `session.group`."""

    def group_begins(self, session, visit):
        """The first knot of a group is about to be run; `session.group` is new."""

    def around_forward(self, session, visit):
        """A context for the forward of a group's first knot."""
        return nullcontext()

    def model_output(self, session, visit, output):
        """The solver step of a grouped step is about to be given a proxy of `output`."""

    def proxy_given(self, session, visit, value):
        """The solver step gets `value`: the model output's proxy, in an exact step the output itself."""

    def solver_ends(self, session, visit):
        """The solver step of a grouped step has returned."""

    def gradient_comes(self, session, group, place, ready):
        """In the backward of the loss of the step at `place`; the passes of the knots in `ready` run in it as well."""

    def backward_begins(self, session):
        """`torch.autograd.backward` is called, from an update's first group to the update's end."""

    def backward_ends(self, session):
        """`torch.autograd.backward` has returned, from an update's first group to the update's end."""

    def passes_begin(self, session, group, knots, gradients):
        """The passes of `knots` are about to run, with `gradients` `[B, ...]` of their outputs."""

    def step_ends(self, session, visit, result):
        """After a training forward, which returned `result`."""

    def step_returns(self, session, visit):
        """The loop goes on. With skipped forwards, the knot after may have been run since `step_ends`."""

    def forwards_skipped(self, session, n):
        """`n` forwards that the unpatched trainer runs weren't run; negative where one was run that it doesn't."""

    def forwards_retained(self, session, n):
        """`n` forwards weren't run that the rollout has run, with their graphs where those are needed."""

    def group_ends(self, session, group):
        """The backward passes of all its knots have run."""

    def optimizer_steps(self, session, optimizer):
        """Before any optimizer's step."""

    def update_ends(self, session):
        """At the next rollout, or at the training step's end."""

    def fails(self, session, where):
        """An exception leaves what `where` names."""

    def training_step_ends(self, session):
        """Nothing has failed."""

    def training_step_fails(self, session, error):
        """`error` has left it; what was open still is."""

    def forget(self, session):
        """A training step begins, or it has ended, in whatever way."""
