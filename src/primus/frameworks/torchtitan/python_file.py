"""Read a Python configuration of torchtitan 0.3 as a tree of settings, without importing or running it."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from typing import Any

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.source import ConfigValue
from primus.errors import UsageError, find_nearest

_PLACES = {"profiler": "profiling", "validator": "validation", "dataloader": "training"}
"""Places of torchtitan 0.2 for the components of 0.3."""
_AC_MODES = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}


class _Unreadable(ValueError):
    """A value that only running the file can tell."""


def is_titan_python(text: str) -> bool:
    """Whether a Python file is a configuration of torchtitan."""
    return "torchtitan" in text or "Trainer.Config(" in text


def read_titan_functions(text: str, origin: str) -> dict[str, ast.FunctionDef]:
    """Functions of a file that return a configuration, by name.

    Raises:
        UsageError: The file is not Python, or has no such function.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's own spelling
            module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise UsageError(f"{origin}{f':{line}' if line else ''}: not Python: {getattr(error, 'msg', error)}") from None
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    found = {name: node for name, node in functions.items() if any(isinstance(each, ast.Return) for each in node.body)}
    configs = {
        name: node
        for name, node in found.items()
        if "Config" in ast.unparse(node.returns or ast.Constant("")) or "Trainer.Config(" in ast.unparse(node)
    }
    if not configs:
        raise UsageError(
            f"{origin}: no function returns a torchtitan configuration (Trainer.Config)",
            f"its functions: {', '.join(functions) or 'none'}",
        )
    return configs


def read_titan_python(text: str, origin: str, function: str | None, target: ForeignConfig) -> dict[str, ConfigValue]:
    """The configuration tree of one function, in the places of torchtitan 0.2.

    Args:
        text: The file.
        origin: Its name in messages.
        function: Function that returns the configuration; the only one when None.
        target: Where statements that only a run can evaluate are reported.

    Raises:
        UsageError: The file is not Python, or the function is not found or not named among several.
    """
    functions = read_titan_functions(text, origin)
    # Others build a part that several configurations share.
    public = [name for name in functions if not name.startswith("_")] or list(functions)
    if function is None and len(public) > 1:
        raise UsageError(
            f"{origin}: it has {len(public)} configurations: {', '.join(public)}",
            f"choose one: --function {public[0]}",
        )
    name = function or public[0]
    if name not in functions:
        close = find_nearest(name, functions)
        hint = f"did you mean '{close}'?" if close else f"it has {', '.join(functions)}"
        raise UsageError(f"{origin}: no configuration '{name}'", hint)
    tree = _FunctionReader(functions, target).read_function(name)
    module = _find_model_module(text, origin, name)
    return _move_settings(tree, module)


class _FunctionReader:
    """Evaluates the statements of a function that are plain data."""

    def __init__(self, functions: dict[str, ast.FunctionDef], target: ForeignConfig) -> None:
        self.functions = functions
        self.target = target
        self.active: list[str] = []

    def read_function(self, name: str) -> dict[str, ConfigValue]:
        if name in self.active:
            raise _Unreadable(name)
        self.active.append(name)
        variables: dict[str, ConfigValue] = {}
        result: Any = {}
        for statement in self.functions[name].body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                result = self.read_value(statement.value, variables, name)
                break
            self.run_statement(statement, variables)
        self.active.pop()
        return result if isinstance(result, dict) else {}

    def run_statement(self, statement: ast.stmt, variables: dict[str, ConfigValue]) -> None:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return  # a docstring
        if isinstance(statement, (ast.Assert, ast.Pass, ast.Import, ast.ImportFrom)):
            return
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            place = ast.unparse(statement.targets[0])
            value = self.read_value(statement.value, variables, place)
            if self.assign(place, value, variables):
                return
        self.target.add_other(f"line {statement.lineno}", ast.unparse(statement).split("\n")[0], _NOT_READ)

    def assign(self, place: str, value: Any, variables: dict[str, ConfigValue]) -> bool:
        """`name = value`, or `name.section.key = value`; whether the place could be understood."""
        parts = place.split(".")
        if not all(part.isidentifier() for part in parts):
            return False
        tree = variables
        for part in parts[:-1]:
            inner = tree.setdefault(part, {})
            if not isinstance(inner, dict):
                return False
            tree = inner
        tree[parts[-1]] = value
        return True

    def read_value(self, node: ast.expr, variables: dict[str, ConfigValue], place: str) -> Any:
        """Value of an expression; what only a run can tell is reported and None."""
        try:
            return self.evaluate(node, variables)
        except _Unreadable:
            self.target.add_other(place, ast.unparse(node).split("\n")[0][:80], _NOT_READ)
            return None

    def evaluate(self, node: ast.expr, variables: dict[str, ConfigValue]) -> Any:
        if isinstance(node, ast.Call):
            return self.evaluate_call(node, variables)
        if isinstance(node, ast.Name) and node.id in variables:
            return variables[node.id]
        if isinstance(node, ast.BinOp):
            return _calculate(node.op, self.evaluate(node.left, variables), self.evaluate(node.right, variables))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "DATASETS":
            return self.evaluate(node.slice, variables)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.evaluate(item, variables) for item in node.elts]
        if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {str(self.evaluate(key, variables)): self.evaluate(value, variables) for key, value in pairs if key}
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            raise _Unreadable(ast.unparse(node)) from None

    def evaluate_call(self, node: ast.Call, variables: dict[str, ConfigValue]) -> Any:
        """A configuration class as a mapping of its arguments; functions of torchtitan that are known."""
        name = ast.unparse(node.func)
        leaf = name.removesuffix(".Config").rpartition(".")[2]
        if leaf == "model_registry":
            flavor = node.args[0] if node.args else next((each.value for each in node.keywords), ast.Constant(None))
            extra = {each.arg: True for each in node.keywords if each.arg == "converters"}
            return {"flavor": self.evaluate(flavor, variables), "module": name.rpartition(".")[0]} | (
                {"converters": _list_converters(node)} if extra else {}
            )
        if leaf in self.functions:
            return self.read_function(leaf)
        if leaf in _AC_MODES:
            return {"mode": _AC_MODES[leaf]}
        if name == "cast" and len(node.args) == 2:
            return self.evaluate(node.args[1], variables)
        if not (name.endswith((".Config", "Config")) or leaf == "default_adamw"):
            raise _Unreadable(name)
        if leaf == "ChatDataLoader":
            reason = "fine-tuning on conversations is another task; fine-tune by `train posttrain`"
            self.target.add_other("dataloader", leaf, reason)
        found: dict[str, ConfigValue] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise _Unreadable("**")
            if keyword.arg == "loss":
                continue  # cross-entropy in all files; how its logits are cut is the backend's choice
            found[keyword.arg] = self.read_value(keyword.value, variables, keyword.arg)
        return {leaf: found} if leaf.endswith("Converter") else found


_NOT_READ = "not read: only running the file would show its value"


def _calculate(kind: ast.operator, left: Any, right: Any) -> Any:
    if not all(isinstance(each, (int, float)) for each in (left, right)):
        raise _Unreadable("not numbers")
    if isinstance(kind, ast.Mult):
        return left * right
    if isinstance(kind, ast.Add):
        return left + right
    if isinstance(kind, ast.Sub):
        return left - right
    if isinstance(kind, ast.Pow) and abs(right) < 100:
        return left**right
    if isinstance(kind, (ast.Div, ast.FloorDiv)) and right:
        return left / right if isinstance(kind, ast.Div) else left // right
    raise _Unreadable("not arithmetic")


def _list_converters(node: ast.Call) -> list[str]:
    """Names of the converters of a model, in the spelling of 0.2."""
    text = " ".join(ast.unparse(each.value) for each in node.keywords if each.arg == "converters")
    return ["float8" if "Float8" in name else name for name in re.findall(r"\b(\w+)Converter", text)]


def _find_model_module(text: str, origin: str, function: str) -> str:
    """Family of the model: of an absolute import, the folder of the file, or the function's name."""
    match = re.search(r"from torchtitan\.models\.(\w+)(\.\w+)? import", text)
    imported = match[1] if match and match[1] != "common" else ""
    folder = re.search(r"models/(\w+)/\w+\.py$", origin.replace("\\", "/"))
    by_name = next((each for each in _FAMILIES if function.startswith(each)), "")
    return imported or (folder[1] if folder else "") or by_name


_FAMILIES = ("llama3", "llama4", "qwen3", "deepseek_v3", "deepseekv3", "gpt_oss", "gptoss")


def _move_settings(tree: dict[str, ConfigValue], module: str) -> dict[str, ConfigValue]:
    """The tree of 0.3 in the places of 0.2."""
    sections: defaultdict[str, dict[str, ConfigValue]] = defaultdict(dict)
    others: dict[str, ConfigValue] = {}
    for key, value in tree.items():
        if value is None and key != "activation_checkpoint":
            continue
        if key == "model_spec" and isinstance(value, dict):
            named = str(value.get("module", "")).rpartition(".")[2]
            name = (named or module).replace("deepseekv3", "deepseek_v3").replace("gptoss", "gpt_oss")
            sections["model"] |= {"name": name or None, "flavor": value.get("flavor")}
            if value.get("converters"):
                sections["model"]["converters"] = value["converters"]
        elif key == "model_converters" and isinstance(value, dict):
            _move_converters(value.get("converters"), sections)
        elif key == "activation_checkpoint":
            sections[key] = value if isinstance(value, dict) else {"mode": "none"}
        elif key == "hf_assets_path":
            sections["model"][key] = value
        elif key == "validator" and isinstance(value, dict):
            sections["validation"] = {"enable": True, **value}
            sections["validation"].pop("dataloader", None)
        elif isinstance(value, dict):
            sections[_PLACES.get(key, key)] |= value
        else:
            others[key] = value
    _move_optimizer(sections["optimizer"])
    return {**sections, **others}


def _move_converters(converters: ConfigValue, sections: dict[str, dict[str, ConfigValue]]) -> None:
    """Converters of the model, whose options have a section of their own in 0.2."""
    written = converters if isinstance(converters, list) else []
    options = {name: value for each in written if isinstance(each, dict) for name, value in each.items()}
    names = [name.removesuffix("Converter") for name in options]
    sections["model"]["converters"] = ["float8" if "Float8" in name else name for name in names]
    if options.get("Float8LinearConverter"):
        sections["quantize"] = {"linear": {"float8": options["Float8LinearConverter"]}}


def _move_optimizer(optimizer: dict[str, ConfigValue]) -> None:
    """Settings of AdamW from the parameter group for all weights, the last one."""
    groups = optimizer.pop("param_groups", None)
    if isinstance(groups, list) and groups and isinstance(groups[-1], dict):
        arguments = groups[-1].get("optimizer_kwargs")
        optimizer.update(arguments if isinstance(arguments, dict) else {})
        optimizer["name"] = groups[-1].get("optimizer_name", "AdamW")
    betas = optimizer.pop("betas", None)
    if isinstance(betas, list) and len(betas) == 2:
        optimizer["beta1"], optimizer["beta2"] = betas
