"""Whether the code that the contract is about is what it was. Comments, formatting and docstrings don't count."""

import ast
import hashlib

from .tree import Source


def fingerprints(text, contract, find=lambda module: None):
    """`{symbol: fingerprint}` of what the contract is about. Comments, formatting and docstrings don't count."""
    source = Source(text, find)
    found = {}
    for name in sorted(contract.parameters | contract.recording | {contract.loop: ()}):
        definition = source.definition(name)
        found[name] = fingerprint(definition) if definition is not None else None
    statements = source.hooks(contract)
    found["hook"] = fingerprint(statements[0]) if statements else None
    return found


def fingerprint(node):
    """16 hex digits of the syntax tree below `node`, the same for Python 3.10 to 3.13."""
    return hashlib.sha256(ascii(_plain(node)).encode()).hexdigest()[:16]


def _plain(node):
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment", "type_params")}
    if isinstance(node, ast.JoinedStr):  # 3.12 adds empty strings
        fields["values"] = [one for one in node.values if not (isinstance(one, ast.Constant) and one.value == "")]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return type(node).__name__, [(name, _plain(value)) for name, value in fields.items() if value not in (None, [])]
