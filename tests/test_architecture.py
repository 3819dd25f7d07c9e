"""The folder tells the architecture: imports go one way, public things are documented and tested."""

import ast
import functools
import gc
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tilelang"

ROOMS = {
    "errors": 0, "env": 0, "log": 0, "version": 0, "ir": 1, "arith": 2, "layout": 3, "target": 4, "ops": 5,
    "language": 6, "transform": 6, "codegen": 6, "simulator": 6, "runtime": 6, "jit": 7, "autotuner": 8,
    "library": 9,
}  # fmt: skip
TOP = 10  # carver, tools, testing, cli, compat, program
SUB_ROOMS = {  # room -> its parts, low to high; a part imports only lower ones
    "transform": ("framework", "analysis", "check", "legalize", "layout", "schedule", "memory", "lower", "sync", "registers",
                  "cpu"),
}
MOST_ROOMS, MOST_FILES = 18, 45


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: pathlib.Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@pytest.fixture(scope="module", autouse=True)
def _files_are_parsed_once():
    """For all tests of this module: a million nodes, which the garbage collector need not look at and which go at its end."""
    gc.disable()
    yield
    tree_of.cache_clear()
    nodes_of.cache_clear()
    gc.enable()


def room_of(module: str) -> tuple[str, int]:
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else ""
    return name, ROOMS.get(name, TOP)


def imports_of(path: pathlib.Path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    package = module if path.name == "__init__.py" else module.rsplit(".", 1)[0]
    package = package.removesuffix(".__init__")
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.startswith("tilelang"):
                    yield node.lineno, a.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")
                up = up[: len(up) - (node.level - 1)]
                base = ".".join(up + ([base] if base else []))
            if base == "tilelang":
                for a in node.names:
                    yield node.lineno, f"tilelang.{a.name}"
            elif base.startswith("tilelang."):
                yield node.lineno, base


def test_a_room_imports_only_lower_rooms():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module in ("tilelang.__init__", "tilelang.__main__"):
            continue
        name, level = room_of(module)
        if level == TOP:
            continue
        for line, target in imports_of(path):
            other, other_level = room_of(target)
            if other and other != name and other_level >= level:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: room {name} ({level}) imports {other} ({other_level})")
    assert not wrong, "\n".join(wrong)


def test_the_parts_of_a_room_import_only_lower_parts():
    wrong = []
    for room, parts in SUB_ROOMS.items():
        for path in sorted((PACKAGE / room).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            own = module.split(".")[2] if module.split(".")[2] in parts else None
            for line, target in imports_of(path):
                names = target.split(".")
                other = names[2] if names[1] == room and len(names) > 2 and names[2] in parts else None
                if own and other and parts.index(other) > parts.index(own):
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {room}/{own} imports {room}/{other}")
    assert not wrong, "\n".join(wrong)


def test_the_reference_interpreter_and_the_device_simulator_share_only_what_stands_beside_them():
    for own, other in (("reference", "device"), ("device", "reference")):
        wrong = [f"{p.relative_to(ROOT)}:{line}" for p in (PACKAGE / "simulator" / own).rglob("*.py")
                 for line, target in imports_of(p) if target.startswith(f"tilelang.simulator.{other}")]
        assert not wrong, wrong


BELOW_VERIFY_SYNC = ("tilelang.errors", "tilelang.ir", "tilelang.layout.distinct", "tilelang.target",
                     "tilelang.transform.analysis.effects", "tilelang.transform.verify_sync")


def test_the_check_of_synchronisation_shares_nothing_with_what_places_it():
    """verify_sync imports the programs, the machines and the effects of calls alone (distinct.py sorts arrays); these do not
    import what places synchronisation, nor the analyses that it asks."""
    closed = [*(PACKAGE / "transform" / "verify_sync").rglob("*.py"), PACKAGE / "transform" / "analysis" / "effects.py"]
    assert len(closed) > 10
    wrong = [f"{p.relative_to(ROOT)}:{line}: {target}" for p in closed for line, target in imports_of(p)
             if not any(target == m or target.startswith(m + ".") for m in BELOW_VERIFY_SYNC)]
    assert not wrong, "\n".join(wrong)
    users = {p.stem for p in (PACKAGE / "transform").rglob("*.py") if p.parent.name != "verify_sync"
             and any(t.startswith("tilelang.transform.verify_sync") for _, t in imports_of(p))}
    assert users <= {"pipeline", "verify_sync"}, users


def test_the_package_shows_few_rooms_of_few_files():
    rooms = [p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert len(rooms) <= MOST_ROOMS, sorted(rooms)
    large = {str(d.relative_to(ROOT)): n for d in [PACKAGE, *PACKAGE.rglob("*")] if d.is_dir()
             and (n := len(list(d.glob("*.py")))) > MOST_FILES}
    assert not large, large


MOST_LINES = 400  # of a class with the classes of ours that it inherits from


def class_sizes() -> dict[str, int]:
    """Lines of each class, those of the classes of ours that it inherits from counted in."""
    own: dict[str, int] = {}
    bases: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        package, names = module.rsplit(".", 1)[0], {}
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom):
                up = package.split(".")[:len(package.split(".")) - node.level + 1] if node.level else []
                names.update({a.asname or a.name: ".".join([*up, *filter(None, [node.module]), a.name]) for a in node.names})
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                key = f"{module}.{node.name}"
                own[key] = (node.end_lineno or node.lineno) - node.lineno + 1
                found = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
                bases[key] = [names.get(b.id, f"{module}.{b.id}") for b in found if isinstance(b, ast.Name)]

    def all_of(key: str) -> set[str]:
        return {key}.union(*(all_of(b) for b in bases.get(key, ()) if b in own))

    return {key: sum(own[k] for k in all_of(key)) for key in own}


def test_classes_with_what_they_inherit_are_short():
    sizes = class_sizes()
    assert len(sizes) > 300 and sizes["tilelang.codegen.cuda.printer.KernelPrinter"] > 80  # they are found
    large = {k: n for k, n in sizes.items() if n > MOST_LINES}
    assert not large, f"over {MOST_LINES} lines: {large}"


KNOWN_CIRCLES: list[set[str]] = []  # may only shrink


def modules_of_the_package() -> dict[str, pathlib.Path]:
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in PACKAGE.rglob("*.py")}


def modules_named_by_imports(node: ast.AST, package: list[str], modules):
    """Modules of ours that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names if a.name in modules)
    elif isinstance(node, ast.ImportFrom):
        above = package[:len(package) - node.level + 1] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        names = (f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names)
        yield from (n for n in names if n in modules)


def circles_of(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected sets of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(m: str) -> None:
        index[m] = low[m] = len(index)
        stack.append(m)
        for n in graph[m]:
            if n not in index:
                visit(n)
                low[m] = min(low[m], low[n])
            elif n in stack:
                low[m] = min(low[m], index[n])
        if low[m] == index[m]:
            at = stack.index(m)
            found.append(set(stack[at:]))
            del stack[at:]

    for m in graph:
        if m not in index:
            visit(m)
    return [c for c in found if len(c) > 1]


def test_files_import_each_other_in_no_circle():
    """Imports inside functions and those for annotations alone (`if TYPE_CHECKING`) count."""
    modules = modules_of_the_package()
    graph = {m: {n for node in nodes_of(p)
                 for n in modules_named_by_imports(node, m.split(".")[:None if p.name == "__init__.py" else -1], modules)
                 if n != m} for m, p in modules.items() if m != "tilelang.__main__"}
    assert sum(map(len, graph.values())) > 1000  # the names are found
    found = circles_of(graph)
    assert all(any(c <= known for known in KNOWN_CIRCLES) for c in found), found
    assert all(known in found for known in KNOWN_CIRCLES), "a known circle is gone or smaller: shrink the list"


def test_circles_are_found():
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": set()}) == []


MAY_BE_MISSING = {"torch", "tqdm", "pytest", "matplotlib"}  # packages that an installation may lack


def test_imports_in_functions_say_what_they_save():
    """An import inside a function saves time when its module is imported: the line, or the one above, says how many ms."""
    wrong, seen = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        inside = {n for f in nodes_of(path) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))
                  for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))}
        for node in inside:
            module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
            where = str(path.relative_to(ROOT))
            if module.split(".")[0] in MAY_BE_MISSING:
                continue
            seen += 1
            said = [line.partition("#")[2] for line in lines[node.lineno - 2:node.end_lineno]]
            if not any(re.search(r"\d ms", x) for x in said):
                wrong.append(f"{where}:{node.lineno}: {ast.unparse(node)}")
    assert seen > 20 and not wrong, "\n".join(wrong)


def written_at_import(tree: ast.Module):
    """(line, text) of statements outside functions that set or delete an attribute of a name that an import of ours binds."""
    ours: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("tilelang")):
            ours |= {a.asname or a.name for a in node.names}
        elif isinstance(node, ast.Import):
            ours |= {a.asname or a.name.split(".")[0] for a in node.names if a.name.startswith("tilelang")}

    def root(e: ast.AST) -> str:
        while isinstance(e, (ast.Attribute, ast.Subscript)):
            e = e.value
        return e.id if isinstance(e, ast.Name) else ""

    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        waiting += ast.iter_child_nodes(node)
        targets: list[ast.AST] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = [t for x in node.targets for t in (x.elts if isinstance(x, ast.Tuple) else [x])]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "x")]
        if any(not isinstance(t, ast.Name) and root(t) in ours for t in targets):
            yield node.lineno, ast.unparse(node)


def test_no_module_writes_into_another_when_it_is_imported():
    wrong = [f"{p.relative_to(ROOT)}:{line}: {text}" for p in sorted(PACKAGE.rglob("*.py"))
             for line, text in written_at_import(tree_of(p))]
    assert not wrong, "\n".join(wrong)
    sample = ("from .expr import Binary\nfrom . import expr\nBinary.unlike = f\nexpr.a, expr.b = 1, 2\n"
              "setattr(Binary, 'x', 1)\nx = 1\n")
    assert [line for line, _ in sorted(written_at_import(ast.parse(sample)))] == [3, 4, 5]


def test_nothing_of_ours_imports_compat():
    wrong = [str(p) for p in PACKAGE.rglob("*.py") if "compat" not in p.parts and p.name != "__init__.py"
             for _, t in imports_of(p) if t.startswith("tilelang.compat")]
    assert not wrong, wrong


def test_every_module_class_and_public_function_has_a_docstring():
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = tree_of(path)
        if not tree.body:
            continue
        where = path.relative_to(ROOT)
        if not ast.get_docstring(tree):
            missing.append(f"{where}: module")
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_") \
                    and not ast.get_docstring(node):
                overload = any("overload" in ast.unparse(d) for d in node.decorator_list)
                if not overload:
                    missing.append(f"{where}:{node.lineno}: {node.name}")
    assert not missing, "\n".join(missing)


MOST_PARAMETERS = 8
LONG_SIGNATURES = {  # public functions whose parameters the reference gives one by one, and its heading
    "tilelang.autotuner.autotune": "Autotuner", "tilelang.autotuner.AutoTuner.set_profile_args": "Autotuner",
    "tilelang.autotuner.AutoTuner.run": "Autotuner", "tilelang.jit.compare.torch_assert_close": "Profiling",
    "tilelang.jit.compiling.par_compile": "Compiling", "tilelang.jit.decorator.jit": "@tilelang.jit",
    "tilelang.jit.kernel.JITKernel.__init__": "JITKernel", "tilelang.jit.kernel.JITKernel.from_database": "JITKernel",
    "tilelang.jit.profiling.Profiler.do_bench": "Profiling", "tilelang.jit.timing.do_bench": "Profiling",
    "tilelang.language.composed.im2col": "Data movement", "tilelang.language.hopper.copy_cluster": "Data movement",
    "tilelang.language.hopper_raw.ptx_wgmma_ss": "Low-level tensor-core names",
    "tilelang.language.hopper_raw.ptx_wgmma_rs": "Low-level tensor-core names",
    "tilelang.language.tensor_core.ptx_mma": "Low-level tensor-core names",
    "tilelang.language.rocm.mfma": "AMD (tilelang.rocm.language)",
    "tilelang.language.tensor_core.TensorCoreIntrinEmitter.__init__": "Low-level tensor-core names",
    "tilelang.language.meta.PersistentTileScheduler.__init__": "Tile scheduler",
    "tilelang.language.raw.decl_buffer": "Raw IR-script names", "tilelang.language.sparse.gemm_sp": "GEMM",
    "tilelang.language.blockscaled.gemm_blockscaled": "GEMM",
    "tilelang.language.tile.gemm": "GEMM", "tilelang.language.tensor.match_buffer": "Tensor annotations",
    "tilelang.language.tensor._BufferFactory._plain": "Tensor annotations (T.Buffer)",
    "tilelang.library.attention.flash_attention.flash_attention": "Library",
    "tilelang.library.attention.backward.flash_attention_backward": "Library",
    "tilelang.library.attention.flash_decode.flash_decode": "Library",
    "tilelang.library.attention.mla_decode.mla_decode": "Library",
    "tilelang.library.attention.mla_prefill.mla_prefill": "Library",
    "tilelang.library.attention.flex_attention.flex_attention": "Library",
    "tilelang.library.decode_step.llama_decode": "Library", "tilelang.distributed.llama.llama_decode": "Several devices",
    "tilelang.distributed.llama.llama_block": "Several devices",
    "tilelang.library.gemm.matmul.matmul": "Library", "tilelang.library.gemm.grouped.grouped_matmul": "Library",
    "tilelang.library.gemm.fused.fused_matmul": "Library",
}
MOST_LONG_FUNCTIONS = 6  # of all the others
TAKES_TENSORS = {"T.prim_func", "T.macro"}  # kernels: their parameters are tensors
OF_OPERATORS = {"_forward", "_backward"}  # steps of library.autograd: torch passes arguments and results one by one


def test_few_functions_have_many_parameters():
    found: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

        def visit(node: ast.AST, where: str) -> None:
            for child in ast.iter_child_nodes(node):
                name = f"{where}.{child.name}" if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else where
                if isinstance(child, ast.FunctionDef) and child.name not in OF_OPERATORS and not TAKES_TENSORS & {
                        ast.unparse(d) for d in child.decorator_list}:
                    a = child.args
                    found[name] = max(found.get(name, 0), len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs))
                visit(child, name)

        visit(tree_of(path), module)
    long = {k: n for k, n in found.items() if n > MOST_PARAMETERS}
    assert LONG_SIGNATURES.keys() <= long.keys(), f"no longer so long: {LONG_SIGNATURES.keys() - long.keys()}"
    private = {k: n for k, n in long.items() if k not in LONG_SIGNATURES}
    assert len(private) <= MOST_LONG_FUNCTIONS, private


@functools.cache
def text_of_tests() -> str:
    return "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("*.py"))


def test_every_tile_op_and_pass_is_named_in_a_test():
    text = text_of_tests()
    missing = []
    for path in (PACKAGE / "ops").rglob("*.py"):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and any("tile_op" in ast.unparse(d) for d in node.decorator_list):
                if node.name not in text:
                    missing.append(f"op {node.name}")
    for path in (PACKAGE / "transform").rglob("*.py"):
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and any("pass_" in ast.unparse(d) for d in node.decorator_list):
                if node.name not in text:
                    missing.append(f"pass {node.name}")
    assert not missing, missing


def test_import_loads_nothing_heavy():
    code = ("import sys, tilelang, tilelang.language; "
            "print([m for m in ('torch', 'llvmlite', 'tvm_ffi', 'cuda', 'matplotlib') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]", out.stdout


def test_sources_name_no_path_of_a_machine():
    hits = [str(p) for folder in ("tilelang", "docs", "benchmarks", "examples") for p in (ROOT / folder).rglob("*")
            if p.suffix in (".py", ".md", ".cuh", ".json") and "/work/" in p.read_text(encoding="utf-8")]
    assert not hits, hits


def test_every_public_name_of_the_language_has_a_docstring_and_a_test():
    """Names of `T` that are functions or classes: each has a docstring and stands as `T.name` in some test."""

    import tilelang.language as T
    from tilelang.language.nvshmem import NVSHMEM
    from tilelang.language.unavailable import UNAVAILABLE

    text = text_of_tests()
    used = set(re.findall(r"\bT\.(\w+)", text)) | NVSHMEM.keys()  # test_nvshmem calls each of these as its example does
    undocumented, untested = [], []
    for name in T.__all__:
        value = getattr(T, name)
        if isinstance(value, str) or inspect.ismodule(value):  # dtypes, submodules
            continue
        if callable(value) and not (inspect.getdoc(value) or "").strip():
            undocumented.append(name)
        if name not in used and name not in UNAVAILABLE:
            untested.append(name)
    assert not undocumented, undocumented
    assert not untested, untested


def test_test_modules_have_names_of_their_own():
    """pytest imports test modules by their bare name, unless their folder is a package."""
    files = [p for p in (ROOT / "tests").rglob("*.py") if "programs" not in p.parts and p.name != "conftest.py"]
    names = [p.name for p in files if not (p.parent / "__init__.py").exists()]
    twice = sorted({n for n in names if names.count(n) > 1})
    assert not twice, twice


def test_every_pass_has_a_mirror_test_file():
    """tilelang/transform/ROOM/NAME.py with a pass in it <-> tests/transform/test_NAME.py, or test_NAME_pass.py where another
    room has a file of that name."""
    decorated = re.compile(r"^@pass_\b", re.MULTILINE)
    passes = [p for p in sorted((PACKAGE / "transform").rglob("*.py")) if decorated.search(p.read_text(encoding="utf-8"))]
    tests = {p.name for p in (ROOT / "tests" / "transform").rglob("test_*.py")}
    assert len(passes) > 30
    assert [str(p.relative_to(ROOT)) for p in passes if p.stem != "pipeline" and
            not {f"test_{p.stem}.py", f"test_{p.stem}_pass.py"} & tests] == []


def stringly_reads(path: pathlib.Path) -> list[str]:
    """Reads of an attribute by a literal name: `.attr("…")`, `dict(x.attrs)["…"]`, `dict(x.attrs).get("…")`."""
    found = []
    for n in nodes_of(path):
        key = None
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("attr", "get") and n.args:
            of = n.func.value
            of_attrs = ast.unparse(of).startswith("dict(") and ".attrs" in ast.unparse(of)
            key = n.args[0] if n.func.attr == "attr" or of_attrs else None
        elif isinstance(n, ast.Subscript) and ast.unparse(n.value).startswith("dict(") and ".attrs" in ast.unparse(n.value):
            key = n.slice
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            found.append(f"{path.relative_to(ROOT)}:{n.lineno}: {key.value}")
    return found


def test_no_option_is_an_attribute_by_name():
    """What the compiler knows of a node stands in its record (ir/options.py); `attrs` are the user's annotations."""
    assert not [x for p in PACKAGE.rglob("*.py") for x in stringly_reads(p)]


def test_the_count_of_stringly_reads_finds_them(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "x.py"
    file.write_text('a.attr("n", 0)\ndict(b.attrs)["m"]\ndict(b.attrs).get("k")\nd.get("k")\na.attr(name)\n')
    assert [x.split(": ")[1] for x in stringly_reads(file)] == ["n", "m", "k"]


def test_whether_a_node_holds_a_kind_is_not_asked_by_the_truth_of_expressions():
    """`any(walk(e, Load))` asks the truth of a Load, which an expression rejects; `contains(e, Load)` does not."""
    assert not [f for f in sorted(PACKAGE.rglob("*.py")) if re.search(r"\b(any|all)\(walk\(", f.read_text(encoding="utf-8"))]


def test_memory_scopes_are_spelled_in_one_place():
    scopes = {s for s in importlib.import_module("tilelang.ir.scopes").SCOPES if "." in s}
    assert len(scopes) == 7
    spelled = [f"{p.relative_to(ROOT)}:{n.lineno}" for p in PACKAGE.rglob("*.py") if p.name != "scopes.py"
               for n in nodes_of(p) if isinstance(n, ast.Constant) and n.value in scopes]
    assert spelled == []
