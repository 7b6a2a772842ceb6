"""One source text as a syntax tree: its global names, where its nodes stand, where the hook goes. Nothing is imported or run."""

import ast
from collections import Counter

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))  # from Python 3.11 on
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def modules(read, folder):
    """A `find`, for functions that a trainer in `folder` imports from its checkout; `read` gives a file's text or None."""

    def find(module):
        path = module.replace(".", "/") + ".py"
        text = read(path)
        return read(f"{folder}/{path}") if text is None else text

    return find


class Source:
    """A source's syntax tree, its global names, and where its nodes stand.

    `find` gives the text of a module by its dotted name, or None; for functions that the source imports.
    """

    def __init__(self, text, find=lambda module: None):
        self.tree, self._find = ast.parse(text), find
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        scopes = (*FUNCTIONS, ast.ClassDef)
        globals_ = [node for node in ast.walk(self.tree) if not self.around(node, scopes)]
        definitions = [node for node in globals_ if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self.defined = {node.name: node for node in definitions}
        self.imported = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in globals_
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        }
        relative = [alias for node in globals_ if isinstance(node, ast.ImportFrom) and node.level for alias in node.names]
        self.bindings = Counter(
            [node.name for node in definitions]
            + [*self.imported]
            + [alias.asname or alias.name for alias in relative]
            + [node.id for node in globals_ if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        )

    def around(self, node, kinds):
        """The nodes of `kinds` that hold `node`, innermost first."""
        found = []
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, kinds):
                found.append(node)
        return found

    def definition(self, name):
        """The definition of the global function `name`, here or where it is imported from; None if it isn't found."""
        if name in self.defined:
            return self.defined[name]
        module, original = self.imported.get(name, (None, None))
        text = self._find(module) if module else None
        try:
            return Source(text).definition(original) if text is not None else None
        except UNREADABLE:
            return None

    def hooks(self, contract):
        """The statements in the `__main__` guard, on lines of their own, with one of the calls before which the hook stands."""
        guards = [node for node in self.tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
        return [
            statement
            for guard in guards
            for statement in guard.body
            if statement.lineno > guard.lineno
            and not any(
                isinstance(node, ast.Name) and node.id == "parser" and isinstance(node.ctx, ast.Store)
                for node in ast.walk(statement)
            )
            and any(isinstance(node, ast.Call) and ast.unparse(node.func) in contract.hook for node in ast.walk(statement))
        ]
