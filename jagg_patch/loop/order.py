"""Which steps of which samples an update visits, in which order, and how far it is."""

from ..errors import JaggError
from ..method.plan import Place, places, with_exact_groups
from .step import Visit


class Order:
    """The plan of an update and the order of each sample's steps.

    `planner` is a `Routing`: `groups(n_steps)` are the groups that are routed, and `is_auto` says that these may change.

    planned: those. groups: the same, and while `retaining` is on, groups of the other steps too.
    """

    def __init__(self, planner, retaining):
        self.planner, self._retaining = planner, retaining
        self.forget()

    def forget(self):
        self.places = self.groups = self.planned = ()
        self.n_trajectory = 0
        self._orders = []  # one a sample, or None: every sample's visited steps come in trajectory order
        self._sample = 0  # the first one of the batch that is being visited
        self.position = 0  # how many of its visited steps are done
        self._batch_size = 0

    def plan(self, n_trajectory, n_visited, shuffled):
        """As `Session.plan`."""
        self.forget()
        self.n_trajectory = n_trajectory
        self.route(n_visited)
        self._orders = [] if shuffled else None

    def route(self, n_visited):
        self.planned = self.planner.groups(n_visited)
        self.groups = with_exact_groups(n_visited, self.planned) if self._retaining.is_on else self.planned
        self.places = places(n_visited, self.groups)

    def group_nothing(self):
        """In this update."""
        self.groups = self.planned = ()
        self.places = places(self.n_visited, ())

    @property
    def n_visited(self):
        return len(self.places)

    @property
    def is_shuffled(self):
        """Whether each sample has an order of its own."""
        return self._orders is not None

    @property
    def routes(self):
        """Whether anything of this rollout is grouped, or could be; if not, nothing of the trainer is touched."""
        return bool(self.groups) or (self.planner.is_auto and self.n_visited > 1)

    @property
    def n_ordered(self):
        """How many samples have an order in this pass over the rollout; a new pass begins when all of them are visited."""
        return 0 if self._sample == len(self._orders) else len(self._orders)

    def sort(self, permutation):
        """The same permutation `[T]` of trajectory steps with its visited entries, the first k, sorted."""
        if not self.routes:
            return permutation
        if len(permutation) != self.n_trajectory:
            raise JaggError(
                f"the trainer orders {len(permutation)} steps of a sample, but its settings say {self.n_trajectory}\n"
                "the plan would be wrong: run with JAGG_ENABLED=0 and report this upstream version"
            )
        if not self.n_ordered:
            self._orders, self._sample = [], 0
        permutation = permutation.clone()
        permutation[: self.n_visited] = permutation[: self.n_visited].sort().values
        self._orders.append(permutation[: self.n_visited].tolist())
        return permutation

    def visit(self, step, forward):
        """The `Visit` of the step that the loop has come to."""
        indices = step.indices
        if not self.routes:  # in the trainer's own order, about which nothing is known
            return Visit(step, forward, Place(self.position), indices, self._sample, indices)
        if not self.position:
            self._sample = self._find(step)
        expected = self.expected(len(indices), self.position)
        if self.position and len(indices) != self._batch_size:
            expected = None  # other samples than those that have begun
        self._batch_size = len(indices)
        return Visit(step, forward, self.places[self.position], indices, self._sample, expected)

    def _find(self, step):
        """Which sample the loop has come to: it may leave some out, and each has steps of its own where not all are visited."""
        if self._orders is None:
            return self._sample
        if self.n_visited == self.n_trajectory:  # of every sample, and some may come again
            return self._sample if self._sample < len(self._orders) else 0
        order = step.following(self.n_visited)
        later = range(self._sample, len(self._orders))  # first: two samples may have the same steps
        return next((n for n in (*later, *range(self._sample)) if self._orders[n] == order), self._sample)

    def expected(self, n_samples, position):
        """Trajectory steps that the plan has for a batch at that position, one a sample; None where there are no more samples."""
        if self._orders is None:
            return [position] * n_samples
        orders = self._orders[self._sample : self._sample + n_samples]
        return [order[position] for order in orders] if len(orders) == n_samples else None

    def advance(self):
        """The step at `position` is over."""
        if not self.routes:
            return
        self.position += 1
        if self.position == self.n_visited:
            self.position = 0
            self._sample += self._batch_size
