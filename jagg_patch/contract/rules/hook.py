"""The hook: it has one place, is there if it is anywhere, and what starts after it comes to the loop."""

import ast

from ..difference import Difference
from ..tree import FUNCTIONS

HOOK = "jagg_patch.install(globals()"


def check_hook(source, contract):
    found = source.hooks(contract)
    if contract.hook and len(found) != 1:
        yield Difference(
            f"{len(found)} statements under `if __name__ …` call {' or '.join(contract.hook)}()",
            "the hook goes before the one that does",
        )
    loop = source.defined.get(contract.loop)
    if (
        contract.hook
        and loop is not None
        and not any(
            isinstance(node, ast.Name)
            and node.id == contract.loop
            and isinstance(node.ctx, ast.Load)
            and loop not in source.around(node, FUNCTIONS)
            for node in ast.walk(source.tree)
        )
    ):
        yield Difference(f"nothing calls {contract.loop}()", "JAGG would never see a step")
    if len(found) == 1 and HOOK in ast.unparse(source.tree):
        starts = [
            node
            for node in ast.walk(source.parents[found[0]])
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) == HOOK.partition("(")[0]
            and not source.around(node, FUNCTIONS)
        ]
        if not starts or starts[0].lineno > found[0].lineno:
            yield Difference(f"the hook isn't among the statements before {contract.hook[0]}()", "JAGG would never start")
