"""Reading what flow_cells.py and flow_qwen_cells.py wrote."""

import torch


def pairs(ranks, *endings):
    """`(cell, its record, the unpatched one's)` of every rank and cell whose name ends so."""
    for rank in ranks:
        for cell, record in rank["cells"].items():
            if cell.endswith(endings):
                yield cell, record, rank["cells"][rank["sources"][cell]]


def check_self_checks(ranks):
    """That of the default cell was made, agreed, and changed no bit."""
    for rank in ranks:
        checked, default = (rank["cells"][cell] for cell in ("default, checked", "default"))
        ((error, _),) = checked["checks"]
        assert error <= 1e-6
        assert all(map(torch.equal, checked["gradients"], default["gradients"]))
        assert torch.equal(checked["rng"], default["rng"]) and checked["random"] == default["random"]
