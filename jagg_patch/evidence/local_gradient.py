"""What backward passes bring to a model's weights on this rank, before an engine adds it up and reduces it."""

from functools import partial

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

    def watch(self, output):
        for node in graph_nodes([output]):
            if is_weight(node) and node not in self._hooks:  # two graphs may have it
                self._hooks[node] = node.register_prehook(partial(self._add, node.variable))

    def _add(self, leaf, gradients):
        (gradient,) = gradients
        if gradient is not None and self.is_counting:
            whole = plain(own_part(gradient)).flatten()
            if len(whole) > MOST:
                places = torch.randint(len(whole), (MOST,), generator=torch.Generator().manual_seed(0))
                whole = whole[places.to(whole.device)]
            part = whole.to("cpu", torch.float32, copy=True)
            self._parts[leaf] = self._parts[leaf] + part if leaf in self._parts else part

    def close(self):
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def squares(self, exact):
        """|a - e|² and |e|² of every leaf."""
        pairs = [([self._parts.get(leaf)], [exact._parts.get(leaf)]) for leaf in self._parts | exact._parts]
        found = [sums(*pair) for pair in pairs]
        return [one[3] for one in found], [one[2] for one in found]
