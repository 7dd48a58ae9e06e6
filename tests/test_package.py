"""The package as a whole: one-way imports, the private parts it touches, what an import costs, its shape."""

import ast
import contextlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tokenize
import tomllib
from pathlib import Path

import jax
import pytest

import fusedops
from fusedops.kernels import _compile

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fusedops"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PYTHON_FILES = [f for folder in ("fusedops", "tests", "benchmarks") for f in sorted((ROOT / folder).rglob("*.py"))]
HAS_TRITON = importlib.util.find_spec("triton") is not None
PRIVATE_PARTS = re.compile(r"\bjax\._src|\bjaxlib\.|\btriton\.(_C|runtime|backends|compiler)\b")
MAY_NAME_PRIVATE_PARTS = {"kernels/_compile.py", "kernels/_launch.py", "kernels/_call.py"}
MAY_NAME_PRIVATE_PARTS |= {f"kernels/_interpret/{part}.py" for part in ("__init__", "builder", "language", "types")}

each_source = pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(PACKAGE)))
each_file = pytest.mark.parametrize("file", PYTHON_FILES, ids=lambda f: str(f.relative_to(ROOT)))


def name_of(file):
    return file.relative_to(PACKAGE).as_posix()


def layer(file):
    return name_of(file).split("/")[0] if "/" in name_of(file) else ""


def imports(file):
    """The modules that a file imports, relative ones as fusedops.x.y, with whether at the top level."""
    tree = ast.parse(file.read_text())
    parents = ("fusedops", *file.relative_to(PACKAGE).parts[:-1])
    deferred = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            found = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from ((module, id(node) not in deferred) for module in found)


class TestImportsGoDown:
    @each_source
    def test_triton_under_kernels_only(self, file):
        if layer(file) != "kernels":
            assert not [m for m, _ in imports(file) if m.split(".")[0] == "triton"]

    @each_source
    def test_flax_under_nn_only(self, file):
        if layer(file) != "nn":
            assert not [m for m, _ in imports(file) if m.split(".")[0] in ("flax", "optax")]

    @each_source
    def test_no_other_frameworks(self, file):
        assert not [m for m, _ in imports(file) if m.split(".")[0] in ("torch", "tensorflow", "jax_triton")]

    @each_source
    def test_layers(self, file):
        above = {"kernels": r"fusedops\.(_|nn|testing)", "": r"fusedops\.nn", "nn": "$^"}[layer(file)]
        assert not [m for m, _ in imports(file) if re.match(above, m)]

    @each_source
    def test_kernels_are_imported_when_called(self, file):
        """Outside of kernels/ only its core, which does not import Triton, may be imported at the top."""
        if layer(file) != "kernels":
            at_top = [m for m, top in imports(file) if top and m.startswith("fusedops.kernels.")]
            assert not [m for m in at_top if not m.startswith("fusedops.kernels._")]

    @each_source
    def test_private_parts(self, file):
        code = file.read_text()
        if name_of(file) not in MAY_NAME_PRIVATE_PARTS:
            assert not PRIVATE_PARTS.search(code)
        elif name_of(file) != "kernels/_compile.py":
            named = {m for m, _ in imports(file) if PRIVATE_PARTS.match(m)}
            assert not named, 'write private("...") instead'


class TestPrivateSymbols:
    @pytest.mark.parametrize("name", _compile.PRIVATE_SYMBOLS)
    def test_resolves(self, name):
        if name.startswith("triton") and not HAS_TRITON:
            pytest.skip("Triton is not installed")
        if name == "jax._src.lib.gpu_triton" and not importlib.util.find_spec("jax_cuda13_plugin"):
            pytest.skip("jaxlib's GPU bindings are not installed")
        assert _compile.private(name) is not None

    def test_list_is_complete(self):
        used = {m for f in SOURCES for m in re.findall(r'private\(\s*"([\w.]+)"', f.read_text())}
        assert used <= set(_compile.PRIVATE_SYMBOLS)

    @pytest.mark.parametrize("name", ["jax._src.core.no_such_part", "jax._src.no_such_module.part"])
    def test_missing_one(self, name):
        with pytest.raises(ImportError, match=f"fusedops needs {name}.*install jax>="):
            _compile.private(name)

    @pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
    @pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
    def test_unsupported_triton(self, version, monkeypatch):
        import triton

        monkeypatch.setattr(triton, "__version__", version)
        with pytest.raises(ImportError, match=rf"got {re.escape(version)}.*pip install"):
            _compile.check_triton.__wrapped__()


def run_python(code, **env):
    """Runs code in a new process, warnings as errors; returns what it prints, read as JSON."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=240, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {names!r} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


class TestImport:
    def test_is_light(self):
        loaded, backends = run_python("""
            import json, sys
            import fusedops
            import jax._src.xla_bridge as bridge
            heavy = {"triton", "flax", "torch", "matplotlib", "optax"}
            print(json.dumps([sorted(heavy & set(sys.modules)), bridge.backends_are_initialized()]))
        """)
        assert (loaded, backends) == ([], False)

    def test_is_quick(self):
        code = """
            import json, time
            start = time.perf_counter(); import jax, jax.numpy
            middle = time.perf_counter(); import fusedops
            print(json.dumps(time.perf_counter() - middle))
        """
        assert min(run_python(code) for _ in range(3)) <= 0.3

    def test_works_without_triton_and_flax(self):
        code = WITHOUT.format(names=("triton", "flax", "torch")) + textwrap.dedent("""
            import json
            import jax, jax.numpy as jnp
            import fusedops
            q = jnp.ones((1, 4, 2, 8))
            out, vjp = jax.vjp(lambda q: fusedops.attention(q, q, q, is_causal=True), q)
            explanation = str(fusedops.explain(fusedops.attention, q, q, q))
            messages = []
            for call in (lambda: fusedops.attention(q, q, q, implementation="triton"), fusedops.interpret):
                try:
                    call()
                except (ImportError, NotImplementedError) as error:
                    messages.append(str(error))
            print(json.dumps([float(out.sum()), vjp(q)[0].shape, explanation, messages]))
        """)
        total, shape, explanation, messages = run_python(code, JAX_PLATFORMS="cpu")
        assert total == pytest.approx(64)
        assert shape == [1, 4, 2, 8]
        assert "attention: xla" in explanation
        assert len(messages) == 2
        for text in messages:
            assert "Triton" in text
            assert "pip install" in text


class TestShape:
    @each_file
    def test_file_length(self, file):
        assert len(file.read_text().splitlines()) <= 500

    @each_file
    def test_function_length(self, file):
        attention = "attention" in file.stem and layer_of_any(file) == "kernels"
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1 - docstring_lines(node)
                assert length <= (120 if attention and is_jitted(node) else 80), f"{node.name} has {length} lines"

    @each_source
    def test_kernel_parameters(self, file):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and is_jitted(node):
                annotations = [ast.unparse(a.annotation) if a.annotation else "" for a in node.args.args]
                assert sum("constexpr" not in a for a in annotations) <= 16, f"{node.name} has too many parameters"

    @each_file
    def test_no_notes_to_self(self, file):
        text = file.read_text()
        assert "\t" not in text
        with file.open("rb") as stream:
            comments = [t.string for t in tokenize.tokenize(stream.readline) if t.type == tokenize.COMMENT]
        for comment in comments:
            assert not re.search(r"TODO|FIXME|XXX|HACK|={5,}|-{5,}|#{3,}", comment), comment


def layer_of_any(file):
    return "kernels" if "kernels" in file.relative_to(ROOT).parts else ""


def is_jitted(node):
    return any("jit" in ast.unparse(d) for d in node.decorator_list)


def docstring_lines(node):
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(getattr(first, "value", None), ast.Constant)
    return first.end_lineno - first.lineno + 1 if documented and isinstance(first.value.value, str) else 0


def public_names():
    modules = [fusedops, fusedops.testing]
    if importlib.util.find_spec("flax") and (PACKAGE / "nn").is_dir():
        modules += [importlib.import_module(f"fusedops.nn.{f.stem}") for f in (PACKAGE / "nn").glob("[!_]*.py")]
    for module in modules:
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", "").startswith("fusedops"):
                yield f"{module.__name__}.{name}", value


class TestDocumentation:
    @each_file
    def test_modules(self, file):
        assert ast.get_docstring(ast.parse(file.read_text())), "no docstring"

    @pytest.mark.parametrize("name, value", [pytest.param(n, v, id=n) for n, v in public_names()])
    def test_public_names(self, name, value):
        text = inspect.getdoc(value) or ""
        assert len(text) > 20
        assert not text.startswith(f"{name.split('.')[-1]}("), "the docstring is the one that Python generates"

    def test_version(self):
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        assert fusedops.__version__ == version
        assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from a checkout
            assert importlib.metadata.version("fusedops") == version

    def test_supported_triton_is_declared(self):
        declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        low, high = (".".join(map(str, v)) for v in _compile.TRITON_RANGE)
        assert any(d.startswith(f"triton>={low},<{high}") for d in declared)


def test_strict_settings():
    assert jax.config.jax_numpy_rank_promotion == "raise"
    with pytest.raises(ValueError, match="rank_promotion"):
        jax.numpy.ones(3) + jax.numpy.ones((2, 3))
    if jax.default_backend() == "cpu":
        assert len(jax.devices()) == 8
