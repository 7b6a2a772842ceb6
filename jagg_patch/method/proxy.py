"""What stands for a model output in the solver step.

The backward of the trainer's own loss arrives here, and goes on from here.
"""

import torch
from torch.autograd.function import once_differentiable


class _Proxy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, receive, value, *targets):
        ctx.receive = receive
        return value.clone()  # which the solver step may change in place

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, None, *ctx.receive(grad)


def proxy(output, targets, receive):
    """What stands for a model output in the solver step: its value, and none of its graph.

    Args:
        output: the model output `[B, ...]`.
        targets: what the backward of the step's loss goes on to: model outputs with their graphs, or parameters; may be empty.
        receive: called in that backward with the step's upstream gradient `[B, ...]`; returns one gradient for each target.
    """
    value = output.clone() if output.is_inference() else output.detach()
    return _Proxy.apply(receive, value if targets else value.requires_grad_(), *targets)


def graph_nodes(tensors):
    """The nodes that backward passes from `tensors` would run, up to proxies and without those, once each."""
    return nodes_from(tensor.grad_fn for tensor in tensors)


def nodes_from(nodes):
    """`nodes`, and those that they lead to, as `graph_nodes` has them."""
    seen, nodes = set(), list(nodes)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or isinstance(node, _Proxy._backward_cls):
            continue
        seen.add(node)
        yield node
        nodes += [following for following, _ in node.next_functions]
