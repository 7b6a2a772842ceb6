"""Models of three inputs and two outputs, as `loop/train_grpo_flux.py` runs them, that don't suit groups or only just do."""

import torch
from torch.utils.checkpoint import checkpoint


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp()

    def forward(self, x):
        return self.net(x)


class Breakable(Plain):
    is_broken = False

    def forward(self, x):
        if self.is_broken:
            raise KeyError("broken")
        return self.net(x)


class WithConditioner(Plain):
    """Which the loop may call."""

    def __init__(self):
        super().__init__()
        self.conditioner = [torch.nn.Linear(1, 2)]  # no module of it


class Experts(torch.nn.Module):
    """Two networks; `picks(t)` says which one the forward at t in [0, 1] goes through. It changes with step 7 of 16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.noisy, self.clean = mlp(), mlp()

    def picks(self, t):
        return self.noisy if t >= 0.6 else self.clean

    def forward(self, x):
        return self.picks(float(x[0, -1]))(x)


class InTheMiddle(Experts):
    """The two steps in the middle of each four go through another network than those around them."""

    def picks(self, t):
        return self.clean if round(16 * (1 - t)) % 4 in (1, 2) else self.noisy


class SwitchedInside(Experts):
    """Both networks run, and one is trained: which, says t."""

    def forward(self, x):
        for network in (self.noisy, self.clean):
            network.requires_grad_(network is self.picks(float(x[0, -1])))
        return self.noisy(x) + self.clean(x)


class RankMask(torch.nn.Module):
    """A checkpointed adapter of which t says how many rows count, by a number that is set in the forward and read in both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.adapter, self.up = torch.nn.Linear(3, 8), torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 2)
        self.rank = 8

    def block(self, hidden):
        return hidden + hidden @ (self.adapter.weight * (torch.arange(8) < self.rank)[:, None]).T

    def rank_at(self, t):
        return 2 + int(t * 6)

    def forward(self, x):
        self.rank = self.rank_at(x[0, -1])
        return self.up(checkpoint(self.block, self.down(x).tanh(), use_reentrant=False).tanh())


class LateRankMask(RankMask):
    """All rows count until the image is nearly there."""

    def rank_at(self, t):
        return 8 if t > 0.45 else 1 + int(t * 12)


class SlicedRank(RankMask):
    """The same, of which torch sees that the recomputed tensors have other shapes."""

    def block(self, hidden):
        rows = self.adapter.weight[: self.rank]
        return hidden + (hidden @ rows.T) @ rows


class InOneBuffer(torch.nn.Module):
    """A layer that keeps its input in one buffer, as graphed callables do, which the next forward overwrites."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, buffer):
            buffer.data.copy_(x)
            ctx.buffer, ctx.weight = buffer, weight
            return x @ weight.T

        @staticmethod
        def backward(ctx, grad):
            return grad @ ctx.weight, grad.T @ ctx.buffer.data, None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.weight = torch.nn.Linear(3, 8), torch.nn.Parameter(torch.randn(2, 8))
        self.kept = torch.zeros(1, 8)

    def forward(self, x):
        return torch.cat([self.Layer.apply(row[None], self.weight, self.kept) for row in self.down(x).tanh()])


class Scaled(Plain):
    """A buffer in the graph that stays as it is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full([2], 0.9))

    def forward(self, x):
        return self.net(x) * self.scale


class MovingScale(Plain):
    """A buffer in the graph that each forward changes in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        self.scale.add_(0.01)
        return self.net(x) * self.scale


class Injected(Plain):
    """An auxiliary loss whose gradient comes with every backward, whatever that is given."""

    class Inject(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, loss):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad, torch.ones(())

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        return self.net[2](self.Inject.apply(hidden, hidden.square().mean()))


class Auxiliary(Plain):
    """An auxiliary loss of the activations, for the loop to add."""

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        self.aux = hidden.square().mean()
        return self.net[2](hidden)


class ValueHead(Plain):
    """A loss of a head of its own on what the model's graph doesn't go through."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        self.aux = self.head(hidden.detach()).square().mean()
        return self.net[2](hidden)


class Penalty(Plain):
    """One of the weights, computed in the forward."""

    def forward(self, x):
        self.aux = self.net[0].weight.square().sum()
        return self.net(x)


class SmallAdapter(torch.nn.Module):
    """Of which t says how many rows count, as in `RankMask`; next to nothing of the whole gradient is its."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.down, self.up = mlp(), torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        self.rank = 8

    def block(self, hidden):
        rows = (torch.arange(8) < self.rank).float()
        return (hidden + 0.003 * self.up(self.down(hidden).tanh() * rows)).tanh()

    def forward(self, x):
        self.rank = 2 + int(30 * (1 - x[0, -1])) % 6
        return self.net[2](checkpoint(self.block, self.net[0](x), use_reentrant=False))


class Adapted(Plain):
    """A policy that begins as its base (the adapter's second factor is zero), and is left out where no gradient is asked for."""

    def __init__(self):
        super().__init__()
        self.down, self.up = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 2, bias=False)
        self.net.requires_grad_(False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.net(x) + self.up(self.down(x)) if torch.is_grad_enabled() else self.net(x)


class ByMode(Plain):
    """`differs`: gives something else where no gradient is asked for."""

    differs = False

    def forward(self, x):
        return self.net(x) * (1.1 if self.differs and not torch.is_grad_enabled() else 1)
