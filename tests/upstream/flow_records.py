"""Reading what flow_cells.py and flow_qwen_cells.py wrote."""


def pairs(ranks, *endings):
    """`(cell, its record, the unpatched one's)` of every rank and cell whose name ends so."""
    for rank in ranks:
        for cell, record in rank["cells"].items():
            if cell.endswith(endings):
                yield cell, record, rank["cells"][rank["sources"][cell]]
