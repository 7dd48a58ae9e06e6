"""A kernel's source, rewritten so that plain Python runs it as Triton's compiler reads it."""

import ast
import re
import types
import weakref
from typing import Any

PREFIX = "_fusedops_"
_code: weakref.WeakKeyDictionary[Any, tuple[str, types.CodeType]] = weakref.WeakKeyDictionary()


def rewritten(jit: Any, names: dict[str, Any]) -> types.FunctionType:
    """The Python function of a `triton.jit` function, with `names` as its globals.

    They hold what the rewritten source calls: `_fusedops_tensor` (values assigned), `_fusedops_truth`
    (conditions), `_fusedops_logical` and `_fusedops_not`, `_fusedops_value` (for x.value).
    """
    fn = jit.fn
    source, code = _code.get(fn, ("", None))
    if code is None or source != jit.src:
        code = _compiled(jit)
        _code[fn] = (jit.src, code)
    made = types.FunctionType(code, names, fn.__name__, fn.__defaults__)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


def _compiled(jit: Any) -> types.CodeType:
    tree = ast.fix_missing_locations(_Rewriter().visit(jit.parse()))
    first = next(i for i, line in enumerate(jit.raw_src) if re.match(r"\s*def\s", line))
    ast.increment_lineno(tree, jit.starting_line_number + first - 1)
    module = compile(tree, jit.fn.__code__.co_filename, "exec", dont_inherit=True)
    return next(c for c in module.co_consts if isinstance(c, types.CodeType))


def _call(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(PREFIX + name, ast.Load()), list(args), [])


def _later(value: ast.expr) -> ast.expr:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(nothing, value)


class _Rewriter(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        made = super().visit(node)
        return ast.copy_location(made, node) if isinstance(made, ast.AST) and made is not node else made

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Decorators, annotations and defaults go: they have been evaluated, in another scope."""
        node.decorator_list = []
        node.returns = None
        for argument in [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]:
            argument.annotation = None
        node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
        node.args.kw_defaults = [d and ast.Constant(None) for d in node.args.kw_defaults]
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call("tensor", node.value)
        return node

    visit_NamedExpr: Any = visit_Assign

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Only a constexpr stays a Python value."""
        self.generic_visit(node)
        if node.value is None:
            return node
        constant = ast.unparse(node.annotation).endswith("constexpr")
        return ast.Assign([node.target], node.value if constant else _call("tensor", node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.Assign([node.target], _call("tensor", value))

    def _visit_test(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = _call("truth", node.test)
        return node

    visit_If = visit_While = visit_IfExp = _visit_test

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        kind = ast.Constant(isinstance(node.op, ast.And))
        return _call("logical", kind, *(_later(value) for value in node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call("not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """a < b < c is (a < b) and (b < c), element by element."""
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        values = [node.left, *node.comparators]
        pairs = [ast.Compare(values[i], [op], [values[i + 1]]) for i, op in enumerate(node.ops)]
        return _call("logical", ast.Constant(True), *(_later(pair) for pair in pairs))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """x.value of a constexpr, which may be a Python value here."""
        self.generic_visit(node)
        return _call("value", node.value) if node.attr == "value" and isinstance(node.ctx, ast.Load) else node
