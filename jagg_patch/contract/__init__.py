"""What the interception relies on in a trainer's source text, and where a text differs from it. Nothing is imported or run.

The standard library alone, so that apply.sh can ask any Python 3.
"""

import ast
import hashlib
import platform
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple

from .dataflow import COMPREHENSIONS, LOOPS, TRIES, Pass, affected, assignments, counters, targets

HOOK = "jagg_patch.install(globals()"
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
MAY_NOT_RUN = (ast.If, ast.IfExp, ast.BoolOp, ast.Match, *TRIES, *COMPREHENSIONS)
WITHOUT_GRADIENT = ("no_grad", "inference_mode", "set_grad_enabled(False)", "set_grad_enabled(mode=False)")
USES_GRADIENTS = ("grad", "clip_grad_norm_", "clip_grad_value_", "unscale_", "zero_grad", "register_hook")


@dataclass(frozen=True)
class Contract:
    """The shape of a training loop.

    `loop` is the function that has it. It calls `rollout`, and then `forward` once in every pass of an innermost `for` loop,
    whose variable selects the argument `step` of that call (a parameter's name, or a position where `forward` is no function of
    the trainer's); a `backward()` follows in the same loop. `permutation` is the variable in `loop` that orders the steps, and
    `permuted_loops` how many loops run between it and the forward. `forward` calls `solver` once.
    """

    loop: str
    rollout: str
    forward: str
    step: str | int
    hook: tuple  # the calls, one of them, before whose statement it stands
    solver: str | None = None
    permutation: str | None = None
    permuted_loops: int = 2  # over the samples, over the steps
    steps_optimizer: bool = False  # in the loop over steps, where accelerate counts
    parameters: dict = field(default_factory=dict)  # of functions, by name
    skipping: dict = field(default_factory=dict)  # what skipped forwards need as well


DANCEGRPO = Contract(
    loop="train_one_step",
    rollout="sample_reference_model",
    forward="grpo_one_step",
    step="timesteps",
    hook=("parser.parse_args", "parser.parse_known_args"),
    solver="flux_step",
    permutation="perms",
    parameters={
        "train_one_step": ("args",),
        "sample_reference_model": ("args",),
        "grpo_one_step": ("transformer", "timesteps", "i", "sigma_schedule"),
        "flux_step": ("model_output",),
    },
    skipping={
        "run_sample_step": (),
        "grpo_one_step": ("latents", "pre_latents"),
        "flux_step": ("latents", "prev_sample"),
    },
)
DANCEGRPO_SD = Contract(
    loop="main",
    rollout="pipeline_with_logprob",
    forward="unet",
    step=1,
    hook=("app.run",),
    permutation="perms",
    steps_optimizer=True,
    parameters={"main": (), "pipeline_with_logprob": ("self",)},
)
FLOW_GRPO = Contract(
    loop="main",
    rollout="pipeline_with_logprob",
    forward="compute_log_prob",
    step="j",
    hook=("app.run",),
    solver="sde_step_with_logprob",
    steps_optimizer=True,
    parameters={
        "main": (),
        "pipeline_with_logprob": (),
        "compute_log_prob": ("transformer", "sample", "j"),
        "sde_step_with_logprob": ("model_output",),
    },
    skipping={"sde_step_with_logprob": ("model_output", "sample", "prev_sample")},
)
WAN = replace(
    FLOW_GRPO,
    rollout="wan_pipeline_with_logprob",
    parameters={"wan_pipeline_with_logprob": ()} | {k: v for k, v in FLOW_GRPO.parameters.items() if k != FLOW_GRPO.rollout},
)
QWEN = replace(FLOW_GRPO, parameters=FLOW_GRPO.parameters | {"init_distributed": ()})

CONTRACTS = {
    **dict.fromkeys(
        [
            f"train_grpo_{name}"
            for name in ("flux", "flux_lora", "qwenimage", "qwenimage_edit", "hunyuan", "skyreels_i2v", "wan_2_1")
        ],
        DANCEGRPO,
    ),
    "train_grpo_sd": DANCEGRPO_SD,
    **dict.fromkeys(
        [f"train_{name}" for name in ("sd3", "sd3_fast", "sd3_GRPO_Guard", "flux", "flux_fast", "flux_kontext")],
        FLOW_GRPO,
    ),
    "train_wan2_1": WAN,
    **dict.fromkeys(["train_qwenimage", "train_qwenimage_edit"], QWEN),
}


class Difference(NamedTuple):
    """`what` differs from the contract, and what that `means`.

    Not `is_fatal`: for skipped forwards alone. Not `is_readable`: to this Python, and nothing is known of the contract.
    """

    what: str
    means: str
    is_fatal: bool = True
    is_readable: bool = True

    def __str__(self):
        return f"{self.what}: {self.means}"


def differences(text, contract, find=lambda module: None):
    """Where a trainer's source differs from `contract`: a list of `Difference`.

    Args:
        text: the source, or its bytes.
        find: gives the text of a module by its dotted name, or None; for functions that the trainer imports.
    """
    try:
        return _differences(Source(text, find), contract)
    except UNREADABLE as error:
        means = f"Python {platform.python_version()} can't read it; is it whole, and does it train with a newer one?"
        return [Difference(str(error), means, is_readable=False)]


def _differences(source, contract):
    found = [*source.functions(contract.parameters, contract), *source.hook(contract)]
    found += [
        Difference(one.what, f"{one.means} where forwards are skipped (JAGG_SKIP_FORWARDS)", is_fatal=False)
        for one in source.functions(contract.skipping, contract)
        if one.what not in {other.what for other in found}
    ]
    if contract.loop in source.defined:
        found += source.loop(contract)
    if contract.solver and contract.forward in source.defined:
        found += source.solver(contract)
    return found


def fingerprints(text, contract, find=lambda module: None):
    """`{symbol: fingerprint}` of what the contract is about. Comments, formatting and docstrings don't count."""
    source = Source(text, find)
    found = {}
    for name in sorted(contract.parameters | contract.skipping | {contract.loop: ()}):
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


def calls_in_assignments(tree, variable, method):
    """The statement, for each call of `….method(…)` in one that assigns to `variable`."""
    return [
        statement
        for statement in ast.walk(tree)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None
        for target in getattr(statement, "targets", None) or [statement.target]
        if isinstance(target, ast.Name) and target.id == variable
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Attribute) and node.attr == method
    ]


def not_one(function, found, variable, method):
    return f"{function}() has {len(found)} calls of {method}() in statements `{variable} = …`, not one"


def modules(read, folder):
    """A `find`, for functions that a trainer in `folder` imports from its checkout; `read` gives a file's text or None."""

    def find(module):
        path = module.replace(".", "/") + ".py"
        text = read(path)
        return read(f"{folder}/{path}") if text is None else text

    return find


def _names(node):
    """The variables that select what `node` is: of `samples[i]["x"][:, j]` that is j."""
    if isinstance(node, ast.Name):
        return {node.id}
    parts = [node.slice] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
    return {name for part in parts for name in _names(part)}


class Source:
    """A trainer's syntax tree, and questions about it."""

    def __init__(self, text, find=lambda module: None):
        self._tree, self._find = ast.parse(text), find
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        scopes = (*FUNCTIONS, ast.ClassDef)
        globals_ = [node for node in ast.walk(self._tree) if not self._around(node, scopes)]
        definitions = [node for node in globals_ if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self.defined = {node.name: node for node in definitions}
        self._imported = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in globals_
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        }
        relative = [alias for node in globals_ if isinstance(node, ast.ImportFrom) and node.level for alias in node.names]
        self._bindings = Counter(
            [node.name for node in definitions]
            + [*self._imported]
            + [alias.asname or alias.name for alias in relative]
            + [node.id for node in globals_ if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        )

    def _around(self, node, kinds):
        """The nodes of `kinds` that hold `node`, innermost first."""
        found = []
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, kinds):
                found.append(node)
        return found

    def definition(self, name):
        """The definition of the global function `name`, here or where it is imported from; None if it isn't found."""
        if name in self.defined:
            return self.defined[name]
        module, original = self._imported.get(name, (None, None))
        text = self._find(module) if module else None
        try:
            return Source(text).definition(original) if text is not None else None
        except UNREADABLE:
            return None

    def functions(self, parameters, contract):
        for name, wanted in parameters.items():
            is_read = name in (contract.loop, contract.forward)
            if not self._bindings[name]:
                if is_read or not self._bindings["*"]:
                    yield Difference(f"there is no function {name}()", "JAGG has nothing to wrap")
                continue
            if is_read and self._bindings[name] > 1:
                yield Difference(
                    f"{name} is defined or assigned in {self._bindings[name]} places",
                    "JAGG would read one, and train with another",
                )
            if is_read and name not in self.defined:
                module, _ = self._imported.get(name, ("elsewhere", None))
                yield Difference(f"{name}() comes from {module} now", "JAGG wraps this file's names, and it uses that one's")
            definition = self.definition(name)
            if definition is None:
                continue  # looked at when training starts
            if isinstance(definition, ast.AsyncFunctionDef) or self._yields(definition):
                yield Difference(f"{name}() has become a generator", "JAGG can't tell when a call of it is over")
            arguments = definition.args
            has = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            missing = [parameter for parameter in wanted if parameter not in has]
            if missing:
                yield Difference(f"{name}() has no parameter {', '.join(missing)} any more", "JAGG goes by that name")

    @staticmethod
    def _yields(definition):
        inner = {
            node
            for other in ast.walk(definition)
            if isinstance(other, FUNCTIONS) and other is not definition
            for node in ast.walk(other)
        }
        return any(isinstance(node, (ast.Yield, ast.YieldFrom)) and node not in inner for node in ast.walk(definition))

    def hooks(self, contract):
        """The statements in the `__main__` guard, on lines of their own, with one of the calls before which the hook stands."""
        guards = [node for node in self._tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
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

    def hook(self, contract):
        found = self.hooks(contract)
        if contract.hook and len(found) != 1:
            yield Difference(
                f"{len(found)} statements under `if __name__ …` call {' or '.join(contract.hook)}()",
                "the hook goes before the one that does",
            )
        loop = self.defined.get(contract.loop)
        if (
            contract.hook
            and loop is not None
            and not any(
                isinstance(node, ast.Name)
                and node.id == contract.loop
                and isinstance(node.ctx, ast.Load)
                and loop not in self._around(node, FUNCTIONS)
                for node in ast.walk(self._tree)
            )
        ):
            yield Difference(f"nothing calls {contract.loop}()", "JAGG would never see a step")
        if len(found) == 1 and HOOK in ast.unparse(self._tree):
            starts = [
                node
                for node in ast.walk(self._parents[found[0]])
                if isinstance(node, ast.Call)
                and ast.unparse(node.func) == HOOK.partition("(")[0]
                and not self._around(node, FUNCTIONS)
            ]
            if not starts or starts[0].lineno > found[0].lineno:
                yield Difference(f"the hook isn't among the statements before {contract.hook[0]}()", "JAGG would never start")

    def _calls(self, function, name):
        """Calls by `name`, or by a name with `name` as an argument, in `function` itself where gradients are recorded."""
        return [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and (node.func.id == name or any(isinstance(one, ast.Name) and one.id == name for one in node.args))
            and self._around(node, FUNCTIONS)[0] is function
            and not any(
                word in ast.unparse(item.context_expr)
                for block in self._around(node, ast.With)
                for item in block.items
                for word in WITHOUT_GRADIENT
            )
        ]

    def _may_both_run(self, nodes):
        return any(not self._are_alternatives(*pair) for pair in combinations(nodes, 2))

    def _are_alternatives(self, one, other):
        """Whether they stand in different branches, or one in a branch that leaves the function before the other."""
        first, second = sorted((one, other), key=lambda node: (node.lineno, node.col_offset))
        of_first, of_second = ([node, *self._around(node, ast.AST)] for node in (first, second))
        below = [node for node in of_first if node not in of_second]
        if not below or first in of_second or second in of_first:
            return False
        for node in below:
            parent = self._parents[node]
            body = getattr(parent, "body", None)
            if isinstance(parent, (ast.If, ast.match_case)) and parent in below and isinstance(body, list):
                branch = body if node in body else getattr(parent, "orelse", [])
                if node in branch and isinstance(branch[-1], (ast.Return, ast.Raise)):
                    return True
        fork = self._parents[below[-1]]
        sides = below[-1], next(node for node in of_second if self._parents.get(node) is fork)
        if isinstance(fork, ast.Match):
            return fork.subject not in sides
        if isinstance(fork, ast.IfExp):
            return fork.test not in sides
        return isinstance(fork, ast.If) and sides[0] in fork.body and sides[1] in fork.orelse

    def solver(self, contract):
        calls = self._calls(self.defined[contract.forward], contract.solver)
        if not calls or self._may_both_run(calls):
            yield Difference(
                f"{contract.forward}() calls {contract.solver}() in {len(calls)} places",
                "that call is where JAGG stands in for the model's output, once a step",
            )

    def loop(self, contract):
        function = self.defined[contract.loop]
        forwards = self._calls(function, contract.forward)
        inner = {self._around(call, (*LOOPS, *FUNCTIONS))[0] for call in forwards}
        if len(inner) != 1 or self._may_both_run(forwards):
            means = "JAGG follows one training forward a step" if forwards else "JAGG would never see a step"
            yield Difference(f"{contract.loop}() calls {contract.forward}() in {len(forwards)} places", means)
            return
        (steps,) = inner
        if not isinstance(steps, ast.For):
            yield Difference(f"{contract.forward}() isn't called in a for loop", "JAGG groups the steps of one")
            return
        yield from self._backward(contract, function, steps, forwards)
        yield from self._selection(contract, steps, forwards)
        yield from self._samples(steps)
        if contract.permutation:
            yield from self._permutation(contract, function, steps)
        yield from self._rollout(contract, function, steps)

    @staticmethod
    def _backwards(tree):
        return [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
        ]

    def _backward(self, contract, function, steps, forwards):
        backwards = self._backwards(function)
        mine = [node for node in backwards if self._around(node, (*LOOPS, *FUNCTIONS))[0] is steps]
        loop = f"the loop over steps (line {steps.lineno})"
        if not mine:
            yield Difference(
                f"there is no backward() in {loop}",
                "the losses of several steps share one, or none; JAGG needs one after each forward",
            )
        elif self._may_both_run(mine):
            yield Difference(f"there are {len(mine)} calls of backward() in {loop}", "JAGG takes one gradient a step")
        elif mine[0].lineno < max(call.lineno for call in forwards):
            yield Difference(f"backward() comes before the forward in {loop}", "a step's loss would meet another step's graph")
        elif any(
            steps in self._around(one, LOOPS) and self._may_pass_by(mine, one)
            for node in mine
            for one in self._around(node, MAY_NOT_RUN)
        ):
            yield Difference(f"backward() is conditional in {loop}", "a step without it would leave a group open")
        for node in backwards:
            if node not in mine:
                yield Difference(
                    f"line {node.lineno}: backward() outside {loop}", "JAGG can't tell which steps' losses that one is about"
                )
        for node in ast.walk(steps):
            if isinstance(node, (ast.Continue, ast.Break)) and self._around(node, LOOPS)[0] is steps:
                yield Difference(f"line {node.lineno}: {loop} may leave steps out", "the plan counts all of them")
        yield from self._gradients(contract, steps, loop)

    def _may_pass_by(self, nodes, branch):
        """Whether a pass through `branch` may run none of `nodes`."""
        if isinstance(branch, TRIES):
            return not all(isinstance(handler.body[-1], ast.Raise) for handler in branch.handlers)
        if isinstance(branch, ast.If):
            return not all(
                any(node in ast.walk(one) for one in block for node in nodes) for block in (branch.body, branch.orelse)
            )
        return True

    def _gradients(self, contract, steps, loop):
        """What the loop over steps does to gradients, itself or in a function of this file that it calls."""
        for node in ast.walk(steps):
            name = getattr(node, "id", None)
            function = self.defined.get(name) if name != contract.loop else None
            # Where accelerate counts, the optimizer knows when a sample isn't over, and the condition of an `if` has to.
            is_conditional = any(steps in self._around(branch, LOOPS) for branch in self._around(node, ast.If))
            for part in [node] if function is None else ast.walk(function):
                name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", None)
                if name not in USES_GRADIENTS and ast.unparse(part) != "optimizer.step":
                    continue
                if not (contract.steps_optimizer and (is_conditional or name in ("step", "zero_grad"))):
                    yield Difference(
                        f"line {part.lineno}: {ast.unparse(part)} in {loop}", "a group's gradients aren't there before its end"
                    )

    def _selection(self, contract, steps, forwards):
        variables = _names(steps.target)
        for statement in ast.walk(steps):
            if isinstance(statement, ast.Assign) and variables & _names(statement.value):
                variables |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        for call in forwards:
            if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
                continue  # seen when it runs
            argument = self._argument(call, contract)
            if argument is None:
                yield Difference(f"{contract.forward}() isn't given {contract.step}", "JAGG reads the step from it")
                continue
            if not variables & _names(argument):
                yield Difference(
                    f"the innermost loop (line {steps.lineno}) doesn't run over the steps of a sample",
                    "consecutive forwards would be of several samples, and a group is one's",
                )

    def _argument(self, call, contract):
        named = [keyword.value for keyword in call.keywords if keyword.arg == contract.step]
        if named:
            return named[0]
        position = contract.step
        if isinstance(position, str):
            arguments = self.defined[contract.forward].args if contract.forward in self.defined else None
            names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)] if arguments else []
            position = names.index(contract.step) if contract.step in names else len(call.args)
        return call.args[position] if position < len(call.args) else None

    def _permutation(self, contract, function, steps):
        found = calls_in_assignments(function, contract.permutation, "randperm")
        if len(found) != 1:
            yield Difference(
                not_one(contract.loop, found, contract.permutation, "randperm"), "JAGG sorts the steps that it draws"
            )
            return
        around = [loop for loop in (steps, *self._around(steps, LOOPS)) if loop not in self._around(found[0], LOOPS)]
        if len(around) != contract.permuted_loops:
            yield Difference(
                f"{len(around)} loops run between {contract.permutation} and the forward, not {contract.permuted_loops}",
                "the plan is for one pass over the samples, each with the steps in its order",
            )
        yield from self._order(contract, function, steps, found[0])

    def _sets(self, node):
        return isinstance(node.ctx, ast.Store) and not self._around(node, COMPREHENSIONS)

    def _samples(self, steps):
        samples = {name for loop in self._around(steps, LOOPS) if isinstance(loop, ast.For) for name in targets(loop.target)}
        samples &= {node.id for node in ast.walk(steps) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        for node in ast.walk(steps):
            if isinstance(node, ast.Name) and node.id in samples and self._sets(node):
                yield Difference(
                    f"line {node.lineno}: {node.id} changes in the loop over steps (line {steps.lineno})",
                    "its steps would be of several samples, and a group is one's",
                )

    def _order(self, contract, function, steps, drawn):
        """JAGG visits the drawn steps in another order, so a loss may depend on the step, but not on its place."""
        later = assignments(node for node in ast.walk(function) if getattr(node, "lineno", 0) >= drawn.lineno)
        permuted = affected(later, {contract.permutation}, sizes=False)
        losses = [
            part
            for node in self._backwards(steps)
            for part in (node.func.value, *node.args, *(keyword.value for keyword in node.keywords))
        ]
        one_pass = Pass(steps, function)
        for names, means in (
            (counters(steps.target, steps.iter, permuted), "the step's place in the loop"),
            (one_pass.carried, "what the steps before left"),
        ):
            for name in sorted(names):
                if one_pass.decides(name, losses, permuted):
                    yield Difference(
                        f"the loss depends on {name}, {means} (line {steps.lineno})", "JAGG visits the steps in another order"
                    )

    def _rollout(self, contract, function, steps):
        calls = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == contract.rollout
        ]
        if not calls or max(call.lineno for call in calls) > steps.lineno or self._may_both_run(calls):
            yield Difference(
                f"{contract.loop}() calls {contract.rollout}() in {len(calls)} places, or after the loop over steps",
                "JAGG plans the update when the rollout ends",
            )
