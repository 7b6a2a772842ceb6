"""What backward passes bring to a model's weights on this rank, before an engine adds it up and reduces it."""

from collections import Counter
from functools import partial
from itertools import chain

import torch

from ..engines.gradients import own_part, plain
from ..loop.weights import is_weight
from ..method.proxy import graph_nodes
from ..method.quality import sums

MOST = 1 << 16  # elements of one leaf that are kept, drawn at random: an engine's may be the whole of a block


class LocalGradient:
    """Of each leaf of the graphs that are watched, in host memory, of the backward passes that run while `is_counting`."""

    def __init__(self, is_counting=True):
        self.is_counting = is_counting
        self._parts, self._hooks = {}, {}
        self._unseen = Counter()  # of each leaf, gradients that have come without their hook

    def watch(self, output):
        for node in graph_nodes([output]):
            if is_weight(node) and node not in self._hooks:  # two graphs may have it
                leaf = node.variable
                hooks = node.register_prehook(partial(self._add, leaf)), node.register_hook(partial(self._added, leaf))
                self._hooks[node] = hooks

    def _add(self, leaf, gradients):
        (gradient,) = gradients
        if gradient is not None and self.is_counting:
            whole = plain(own_part(gradient)).flatten()
            if len(whole) > MOST:
                places = torch.randint(len(whole), (MOST,), generator=torch.Generator().manual_seed(0))
                whole = whole[places.to(whole.device)]
            part = whole.to("cpu", torch.float32, copy=True)
            self._parts[leaf] = self._parts[leaf] + part if leaf in self._parts else part
            self._unseen[leaf] -= 1

    def _added(self, leaf, _, gradients):
        """torch 2.6 drops a leaf's own hooks where a Python autograd function gets it from hooks on what is saved."""
        (gradient,) = gradients
        if gradient is not None and self.is_counting:
            self._unseen[leaf] += 1

    def close(self):
        for hook in chain.from_iterable(self._hooks.values()):
            hook.remove()
        self._hooks.clear()

    def squares(self, exact):
        """|a - e|² and |e|² of every leaf all of whose gradients have been seen."""
        leaves = [leaf for leaf in self._parts | exact._parts if not self._unseen[leaf] and not exact._unseen[leaf]]
        pairs = [([self._parts.get(leaf)], [exact._parts.get(leaf)]) for leaf in leaves]
        found = [sums(*pair) for pair in pairs]
        return [one[3] for one in found], [one[2] for one in found]
