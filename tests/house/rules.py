"""The rules of the house, each a function from ``{path: source}`` to findings, ``file:line: rule: what to do``.

Paths look like ``src/oars/engine/world.py``. Everything is read with ``ast``; nothing is imported.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping

Sources = Mapping[str, str]

# Rooms from the lowest to the highest. Rooms that share a floor may import each other (rule_cycles still holds).
FLOORS = (
    ("records", "arguments", "runfolder", "kept", "debug", "plan"),
    ("engine",), ("exchange",), ("evolve",), ("data",), ("label",), ("hosts",), ("cluster",),
    ("adapt.python", "adapt.files", "adapt.replay", "adapt.meet"),
    ("adapt.torch", "adapt.tensorflow"), ("adapt.jax", "adapt.tf1"), ("adapt.keras",), ("adapt",),
    ("rank",), ("watch",), ("supervisor",), ("commands",), ("cli",), ("__main__", ""),
)

# Typed objects that several modules write to by design; everything else is written by its own module only.
SHARED_OBJECTS = ("oars.adapt.torch.context.ctx", "oars.adapt.meet.meet", "oars.adapt.replay.tape.tape")

# Files that may assign to what other packages define: the tables, and what puts them in place.
SEAMS = re.compile(r"/seams\.py$|^src/oars/adapt/python/patching\.py$")
# Files outside the tables that may use what puts patches in place: for a while, or with what only they know. The
# docstring of the table beside them says what each replaces.
REPLACE_TOO = frozenset(f"src/oars/adapt/{file}.py" for file in (
    "tf1/numpy_names", "torch/lazy_dynamo", "torch/refuse_ddp", "torch/async_modes/lost_samples",
    "torch/backward/gradients", "torch/batches/loaders", "torch/batches/memory", "torch/model/trace",
    "torch/replay/player"))
_REPLACES = {"", "patching", "install", "put", "put_in_type", "remove", "replaced"}  # of adapt/python/patching.py
# Attributes that the standard library and mpi4py tell programs to assign; this is no patch.
SETTINGS = re.compile(r"sys\.(argv|std\w+|__std\w+__|last_\w+)$|mpi4py\.rc\.\w+$")
# Functions get frameworks as parameters, under these names or annotated as ModuleType.
FRAMEWORKS = {"torch", "tf", "tensorflow", "old", "keras", "jax", "numpy", "np"}

LIMIT = 500  # lines
WIDTH = 120  # characters


def rule_rooms(sources: Sources) -> list[str]:
    """Rooms import downwards only; imports for type checking do not count."""
    return [f"{path}:{line}: rooms: {module_of(path)} is below {imported}: move what both need to the lower room"
            for path in sources for imported, line in _imports(path, sources).items()
            if _floor(imported) > _floor(module_of(path))]


@functools.cache
def _floor(module: str) -> int:
    name = module.removeprefix("oars").removeprefix(".")
    found = [(len(room), floor) for floor, rooms in enumerate(FLOORS) for room in rooms
             if name == room or (room and name.startswith(room + "."))]
    if not found:
        raise LookupError(f"{module} is in no room: give it a place in FLOORS ({__file__})")
    return max(found)[1]


def rule_cycles(sources: Sources) -> list[str]:
    """No import cycles, imports inside functions included."""
    graph = {module_of(path): _imports(path, sources) for path in sources}
    paths = {module_of(path): path for path in sources}
    findings = []
    for knot in _knots(graph):
        first = min(knot)
        way = _way_round(first, knot, graph)
        findings.append(f"{paths[first]}:{graph[first][way[1]]}: cycles: {' -> '.join(way)}"
                        f"{f' ({len(knot)} modules in all)' if len(knot) > len(way) - 1 else ''}: "
                        "move what both need to a module that imports neither")
    return sorted(findings)


def _knots(graph: Mapping[str, Mapping[str, int]]) -> list[set[str]]:
    """Sets of modules that reach each other."""
    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for nxt in graph.get(ahead.pop(), ()):
                if nxt not in seen:
                    seen.add(nxt)
                    ahead.append(nxt)
        return seen
    reached = {module: reach(module) for module in graph}
    knots = {frozenset(other for other in reached[module] if module in reached.get(other, ()))
             for module in graph if module in reached[module]}
    return [set(knot) for knot in knots]


def _way_round(first: str, knot: set[str], graph: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The shortest cycle through ``first``."""
    ways = [[first]]
    while True:
        ways = [[*way, nxt] for way in ways for nxt in sorted(graph[way[-1]])
                if nxt == first or (nxt in knot and nxt not in way)]
        for way in ways:
            if way[-1] == first:
                return way


def rule_size(sources: Sources) -> list[str]:
    """No file over 500 lines."""
    return [f"{path}:{lines}: size: {lines} lines, at most {LIMIT}: divide it by subject"
            for path, source in sources.items() if (lines := source.count("\n")) > LIMIT]


def rule_width(sources: Sources) -> list[str]:
    """No line of C over 120 characters; ruff sees to those of Python."""
    return [f"{path}:{number}: width: {len(line)} characters, at most {WIDTH}: break the line"
            for path, source in sources.items()
            for number, line in enumerate(source.splitlines(), 1) if len(line) > WIDTH]


def rule_assignments(sources: Sources) -> list[str]:
    """No module of ours assigns an attribute of another module of ours, nor of its classes and functions."""
    return [f"{path}:{line}: assignments: {target} belongs to another module: "
            "pass a value, or add a function there"
            for path, source in sources.items() for target, line, direct in _assigned(source)
            if target.startswith("oars.") and not (direct and _shared(target))]


def _shared(target: str) -> bool:
    return any(target.startswith(name + ".") for name in SHARED_OBJECTS)


def rule_patches(sources: Sources) -> list[str]:
    """Only seam files assign attributes of other people's modules and classes, also by ``patching.put``."""
    return [f"{path}:{line}: patches: {target} is assigned outside a seams.py: move the assignment there"
            for path, source in sources.items() if not SEAMS.search(path)
            for target, line, _ in _assigned(source)
            if not target.startswith("oars.") and not SETTINGS.match(target)] + [
        f"{path}:{line}: patches: {name or module} is used outside a seams.py: add a row to the table there"
        for path, source in sources.items() if not SEAMS.search(path) and path not in REPLACE_TOO
        for module, name, line in _imported(source)
        if f"{module}.{name}".startswith("oars.adapt.python.patching") and name in _REPLACES]


def rule_run_folder(sources: Sources) -> list[str]:
    """File names of a run folder stand in runfolder.py only.

    A name is a string constant of that module, or an f-string in it: ``f"rank-{rank}.log"`` stands for every
    ``rank-*.log``. A name without a dot or a dash (``"stacks"``) is looked for where a path is put together. What is
    joined to a ``folder`` is such a name, known or not; in ``data`` a folder is one of data.
    """
    home = "src/oars/runfolder.py"
    names = _defined_names(_nodes(sources[home]))
    findings = []
    for path, source in sources.items():
        for node, text in _strings(_nodes(source)) if path != home else ():
            last = text.rpartition("/")[2]
            if last in names and ({".", "-"} & set(last) or node in _parts_of_paths(source)):
                findings.append(f"{path}:{node.lineno}: run folder: {text.replace('*', '{}')!r} is a name of "
                                "runfolder.py: import it from there")
            elif not path.startswith("src/oars/data/") and node in _parts_of_paths(source, in_folder=True):
                findings.append(f"{path}:{node.lineno}: run folder: {text.replace('*', '{}')!r} is joined to a folder: "
                                "give it a name in runfolder.py")
    return findings


def _defined_names(nodes: list[ast.AST]) -> set[str]:
    names = {text for node, text in _strings(nodes) if isinstance(node, ast.JoinedStr)}
    for node in nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if target is not None and all(n.id.isupper() for n in ast.walk(target) if isinstance(n, ast.Name)):
            names |= {text for _, text in _strings(list(ast.walk(node)))}
    return {name for name in names if re.search("[a-z]", name) and not re.search(r"[\s/]", name)}


def _strings(nodes: list[ast.AST]) -> Iterator[tuple[ast.expr, str]]:
    """The strings without blanks, with ``*`` for every hole."""
    inside = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        text = " "
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            text = re.sub(r"\{\w*\}", "*", node.value) if "{" in node.value else node.value
        if not re.search(r"\s", text):
            yield node, text


@functools.cache
def _parts_of_paths(source: str, in_folder: bool = False) -> set[ast.expr]:
    """The last parts of paths; or only of those ``folder / part``, whatever holds the folder."""
    parts = set()
    for node in _nodes(source):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if not in_folder or re.search(r"\bfolder(\.resolve\(\))?$", ast.unparse(node.left)):
                parts.add(node.right)
        elif not in_folder and isinstance(node, ast.Call) and \
                re.search(r"\bPath$|path\.join$|\bjoinpath$", ast.unparse(node.func)):
            parts.update(node.args)
    return parts


def rule_tests(sources: Sources) -> list[str]:
    """No test imports another test: what several need stands in a module of its own."""
    return [f"{path}:{node.lineno}: tests: {name} is a test: move what both need to a file without tests"
            for path, source in sources.items() for node in _nodes(source)
            for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                         [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            if name.rpartition(".")[2].startswith("test_")]


@functools.cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def _nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(_tree(source)))


# --- what a file imports ---

def module_of(path: str) -> str:
    return re.sub(r"(/__init__)?\.py$", "", path).removeprefix("src/").replace("/", ".")


@functools.cache
def _imported(source: str) -> list[tuple[str, str, int]]:
    """``(module, name, line)`` of every import of ours, wherever it stands, except for type checking."""
    skipped = {inner for node in _nodes(source) if isinstance(node, ast.If)
               and ast.unparse(node.test).endswith("TYPE_CHECKING") for part in node.body for inner in ast.walk(part)}
    found = []
    for node in _nodes(source):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, "", node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            found += [(node.module or "", alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(name := node.args[0], ast.Constant) \
                and "import_module" in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
            found.append((name.value, "", node.lineno))
    return [each for each in found if each[0].partition(".")[0] == "oars"]


def _imports(path: str, sources: Sources) -> dict[str, int]:
    """The modules of ours that a file imports, with the line: ``from oars.data import csv`` imports ``oars.data.csv``.

    A file may name itself (a module that is run imports itself under its own name) and the package (``oars.__file__``).
    """
    modules, found = _modules(tuple(sources)), {}
    for module, name, line in _imported(sources[path]):
        whole = f"{module}.{name}"
        imported = whole if whole in modules else module
        if imported != module_of(path) and (imported != "oars" or name.strip("_") == name != ""):
            found.setdefault(imported, line)
    return found


@functools.cache
def _modules(paths: tuple[str, ...]) -> set[str]:
    return {module_of(path) for path in paths}


# --- what a file assigns ---

@functools.cache
def _assigned(source: str) -> list[tuple[str, int, bool]]:
    """Attributes of imported things that a file sets or deletes: ``(dotted name, line, by an assignment)``.

    By ``x.y = …``, ``x.y += …``, ``del x.y``, ``for x.y in …``, ``setattr(x, …)``, ``delattr(x, …)``,
    ``vars(x)[…] = …``, ``x.__dict__[…] = …`` and ``vars(x).update(…)``. Local names for imported things are followed.
    """
    if not any(map(_may_matter, _nodes(source))):
        return []
    given: dict[tuple[str, int], str] = {}
    for _ in range(2):  # so that what a function is called with is known inside it
        found: list[tuple[str, int, bool]] = []
        _Scope(_tree(source), None, found, given)
    return sorted(found, key=lambda each: each[1])


def _may_matter(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "__dict__" or not (isinstance(node.ctx, ast.Load) or ast.unparse(node.value) == "self")
    return isinstance(node, ast.Name) and node.id in ("setattr", "delattr", "vars")


_BINDING = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.Delete, ast.For,
            ast.comprehension, ast.withitem, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler,
            ast.Call)


class _Scope:
    """One function or module: what its names stand for, if that was imported."""

    def __init__(self, node: ast.AST, outer: _Scope | None, found: list[tuple[str, int, bool]],
                 given: dict[tuple[str, int], str]):
        self.outer, self.found, self.given = outer, found, given
        self.names: dict[str, str | None] = {}
        self.made: set[str] = set()
        inner: list[ast.AST] = []
        own = [each for each in _own_nodes(node, inner) if isinstance(each, _BINDING)]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            self._parameters(node.args, getattr(node, "name", ""))
        for _ in range(2):  # so that a local name for a local name is known
            for each in own:
                self._bind(each)
        for each in own:
            self._look(each)
        for each in inner:
            _Scope(each, self, found, given)

    def _parameters(self, args: ast.arguments, function: str) -> None:
        every = (*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg)))
        for place, arg in enumerate(every):
            module = arg.annotation is not None and ast.unparse(arg.annotation).endswith("ModuleType")
            self.names[arg.arg] = self.given.get((function, place)) or \
                (f"<{arg.arg}>" if module else arg.arg if arg.arg in FRAMEWORKS else None)

    def _give(self, call: ast.Call) -> None:
        """Note what a function of this file is called with; ``when_imported(name, f)`` calls it with a module."""
        if not isinstance(call.func, ast.Name):
            return
        if call.func.id == "when_imported" and isinstance(call.args[1], ast.Name):
            self.given[call.args[1].id, 0] = _module_called(call.args[0])
        for place, argument in enumerate(call.args):
            if origin := self.origin(argument):
                self.given[call.func.id, place] = origin

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.names[alias.asname or alias.name.partition(".")[0]] = \
                    alias.name if alias.asname else alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                self._bind_name(target, node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            holders = _each_of(node.iter)
            known = next((name for holder in holders if (name := self.origin(holder))), None)
            if isinstance(node.target, ast.Name):
                self.names[node.target.id] = self.names.get(node.target.id) or known
            else:
                self._bind_name(node.target, None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind_name(node.optional_vars, None)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name:
            self.names.setdefault(node.name, None)
            self.made.add(node.name)

    def _bind_name(self, target: ast.AST, value: ast.expr | None) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) \
                else [None] * len(target.elts)
            for one, its in zip(target.elts, values, strict=True):
                self._bind_name(one, its)
        elif isinstance(target, ast.Starred):
            self._bind_name(target.value, None)
        elif isinstance(target, ast.Name):
            self.names[target.id] = self.names.get(target.id) or (self.origin(value) if value is not None else None)
            if isinstance(value, ast.Call):
                self.made.add(target.id)

    def origin(self, node: ast.expr) -> str | None:
        """The imported thing that an expression stands for, dotted; None for everything else."""
        if isinstance(node, ast.Name):
            scope: _Scope | None = self
            while scope is not None and node.id not in scope.names:
                scope = scope.outer
            return scope.names[node.id] if scope is not None else None
        if isinstance(node, ast.Attribute):
            base = self.origin(node.value)
            return base and f"{base}.{node.attr}"
        if isinstance(node, ast.Subscript):
            base = self.origin(node.value)
            return _module_called(node.slice) if base == "sys.modules" else base if base and "__mro__" in base else None
        if isinstance(node, ast.Call) and node.args and \
                self.origin(node.func) in ("sys.modules.get", "importlib.import_module"):
            return _module_called(node.args[0])
        return None

    def _look(self, node: ast.AST) -> None:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Call):
            self._give(node)
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.comprehension)):
            targets = [node.target] if not isinstance(node, ast.AnnAssign) or node.value is not None else []
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            self._found_by_name(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update" and \
                (holder := _dictionary_of(node.func.value)) is not None:
            self._note((name := self.origin(holder)) and f"{name}.*", node, False)
        for target in targets:
            for each in ast.walk(target) if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load):
                    self._note(self.origin(each), each, True)
                elif isinstance(each, ast.Subscript) and (holder := _dictionary_of(each.value)) is not None:
                    self._note((name := self.origin(holder)) and f"{name}.{ast.unparse(each.slice)}", each, False)

    def _found_by_name(self, call: ast.Call) -> None:
        owner, name = call.args[:2]
        origin = self.origin(owner) or (None if isinstance(owner, ast.Name) and self._made_here(owner.id)
                                        else f"<{ast.unparse(owner)}>")
        self._note(origin and f"{origin}.{name.value if isinstance(name, ast.Constant) else '*'}", call, False)

    def _made_here(self, name: str) -> bool:
        """``self``, classes and functions of this file, and what a call gave."""
        scope: _Scope | None = self
        while scope is not None and name not in scope.names:
            scope = scope.outer
        return name in ("self", "cls") or (scope is not None and name in scope.made)

    def _note(self, origin: str | None, node: ast.expr, direct: bool) -> None:
        if origin is not None:
            self.found.append((origin, node.lineno, direct))


def _own_nodes(node: ast.AST, inner: list[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of one scope; functions inside it go to ``inner``. A class body counts as the scope it stands in."""
    for each in ast.iter_child_nodes(node):
        yield each
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inner.append(each)
        else:
            yield from _own_nodes(each, inner)


def _each_of(node: ast.expr) -> list[ast.expr]:
    """What a loop goes over, where it is written out; for ``vars(x).values()``, ``x``."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return node.elts
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and \
            (holder := _dictionary_of(node.func.value)) is not None:
        return [holder]
    return []


def _module_called(name: ast.expr) -> str:
    return str(name.value) if isinstance(name, ast.Constant) else f"<{ast.unparse(name)}>"


def _dictionary_of(node: ast.expr) -> ast.expr | None:
    """``x`` of ``vars(x)`` and ``x.__dict__``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args:
        return node.args[0]
    return node.value if isinstance(node, ast.Attribute) and node.attr == "__dict__" else None
