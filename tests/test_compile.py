"""Compiling without a GPU: results, errors, the cache, and the program handed to XLA."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fusedops
import toys
from fusedops import KernelCompileError, TensorDescriptor, triton_call, triton_compile
from fusedops.kernels import _compile

sds = jax.ShapeDtypeStruct
HERE = Path(__file__).parent
needs_bindings = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or jax.__version_info__ < (0, 11, 2),
    reason="jaxlib's GPU bindings are not installed",
)


def vector(n=1024, dtype=jnp.float32):
    return sds((n,), dtype)


def compile_add(**options):
    args = dict(kernel=toys.add_kernel, out_type=vector(), block_size=128) | options
    return triton_compile(vector(), vector(), 1024, **args)


class TestResult:
    @pytest.mark.parametrize("capability", [80, 90, 100])
    def test_facts(self, capability):
        compiled = compile_add(compute_capability=capability)
        assert f".target sm_{capability}" in compiled.ptx
        assert compiled.cubin[1:4] == b"ELF"
        assert 0 < compiled.registers < 64 and compiled.spills == 0 and compiled.shared_memory == 0
        assert compiled.num_warps == 4 and compiled.warnings == () and not compiled.wgmma_serialized

    def test_loads_are_wide(self):
        assert "ld.global.v4" in compile_add(block_size=512).ptx

    def test_ptx_has_no_debug_information(self):
        ptx = compile_add().ptx
        assert not re.search(r"\.loc|\.file|\.debug|//", ptx)

    def test_descriptors(self):
        x = sds((128, 128), jnp.bfloat16)
        compiled = triton_compile(
            TensorDescriptor.from_array(x, (64, 64)), kernel=toys.copy_kernel, BLOCK_M=64, BLOCK_N=64,
            out_type=TensorDescriptor.from_array(x, (64, 64)),
        )  # fmt: skip
        assert len(compiled.descriptors) == 2 and "cp.async.bulk.tensor" in compiled.ptx

    def test_scratch_memory(self):
        x = sds((128, 128), jnp.bfloat16)
        compiled = triton_compile(
            x, M=128, N=128, kernel=toys.device_descriptor_kernel, BLOCK_M=64, BLOCK_N=64, out_type=x
        )
        assert compiled.scratch_size > 0

    def test_one_is_a_constant_where_it_can_be(self):
        def length(n, kernel):
            return triton_compile(vector(n), vector(n), n, kernel=kernel, out_type=vector(n), block_size=8)

        assert length(1, toys.add_kernel).ones and not length(2, toys.add_kernel).ones
        scaled = triton_compile(vector(4), 1, kernel=toys.scale_kernel, out_type=vector(4), N=4, BLOCK=4)
        assert not scaled.ones  # the kernel calls .to() on it

    def test_types_of_pointers_come_from_the_arrays(self):
        for dtype, width in ((jnp.bfloat16, "b16"), (jnp.float32, "b32"), (jnp.int8, "b8")):
            compiled = triton_compile(vector(8, dtype), 2, kernel=toys.scale_kernel, out_type=vector(8), N=8, BLOCK=8)
            assert re.search(rf"ld\.global\.(v\d\.)?{width}", compiled.ptx)


class TestErrors:
    def test_source_line(self):
        with pytest.raises(KernelCompileError, match=r"broken_kernel does not compile(.|\n)*undefined_name"):
            triton_compile(vector(), kernel=toys.broken_kernel, out_type=vector(), BLOCK=64)

    def test_shared_memory(self):
        a, b = sds((256, 4096), jnp.bfloat16), sds((4096, 256), jnp.bfloat16)
        with pytest.raises(KernelCompileError, match=r"bytes of shared memory per block, and sm_80 has 166912; lower"):
            triton_compile(
                a, b, kernel=toys.hungry_kernel, out_type=sds((256, 256), jnp.float32), K=4096, M=256, BK=128, N=256,
                num_stages=3, num_warps=8, compute_capability=80,
            )  # fmt: skip

    def test_bad_option(self):
        with pytest.raises(KernelCompileError, match="power of 2"):
            compile_add(num_warps=3)
        with pytest.raises(KernelCompileError):
            compile_add(num_ctas=2, compute_capability=80)

    def test_versions(self, monkeypatch):
        import triton

        for version in ("3.5.1", "3.10.0"):
            monkeypatch.setattr(triton, "__version__", version)
            with pytest.raises(ImportError, match=rf'got {version}; pip install "triton>=3.6,<3.10"'):
                _compile.check_triton.__wrapped__()

    def test_a_moved_private_symbol_is_named(self):
        with pytest.raises(ImportError, match=r"fusedops needs triton.compiler.Gone"):
            _compile.private("triton.compiler.Gone")

    def test_old_jaxlib(self, monkeypatch):
        monkeypatch.setattr(_compile, "private", lambda name: object())
        with pytest.raises(ImportError, match=r"need jaxlib >= 0.11.2"):
            _compile.gpu_library()

    def test_no_device(self):
        if jax.default_backend() == "gpu":
            pytest.skip("there is one")
        with pytest.raises(RuntimeError, match="compute_capability=90"):
            _compile.device()
        with _compile.use_device(_compile.device_for(80)):
            assert _compile.device().shared_memory == 163 * 1024


class TestCache:
    def test_every_option_has_its_own_binary(self):
        ptx = {compile_add(num_warps=w).ptx for w in (1, 4, 8)}
        assert len(ptx) == 3

    def test_second_process_does_not_compile(self, tmp_path):
        run_script("print(compiled.name)", tmp_path)
        assert "COMPILER RAN" not in run_script("print(compiled.name)", tmp_path, forbid=True)

    def test_edited_helper(self, tmp_path):
        body = "print(compiled.ptx)"
        first = run_script(body, tmp_path)
        module = tmp_path / "kernels_under_test.py"
        module.write_text(module.read_text().replace("x * 2", "x * 5"))
        assert run_script(body, tmp_path, write=False) != first

    def test_damaged_entry(self, tmp_path):
        first = run_script("print(compiled.ptx)", tmp_path)
        (entry,) = (tmp_path / "cache" / "kernels").glob("*.json")
        for text in ("", "{", "{}", json.dumps({"name": 1})):
            entry.write_text(text)
            assert run_script("print(compiled.ptx)", tmp_path) == first

    def test_switched_off(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FUSEDOPS_CACHE_DIR", "off")
        assert _compile.cache_dir() is None
        compile_add(block_size=256)
        monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "file"))
        (tmp_path / "file").write_text("not a folder")
        compile_add(block_size=1024)

    def test_sixteen_threads(self, monkeypatch, tmp_path):
        monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path))
        results, errors = [], []

        def work(i):
            try:
                results.append(compile_add(block_size=32, num_warps=2 ** (i % 2)).ptx)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not errors and len(set(results)) == 2
        assert len(list((tmp_path / "kernels").glob("*.json"))) == 2

    def test_memory_is_bounded(self, monkeypatch):
        monkeypatch.setattr(_compile, "_MEMORY_ENTRIES", 3)
        for block in (32, 64, 128, 256, 512):
            compile_add(block_size=block)
        assert len(_compile._memory) <= 3


def run_script(body, folder, write=True, forbid=False):
    """Compiles a small kernel in a process of its own, with the cache in `folder`."""
    if write:
        (folder / "kernels_under_test.py").write_text(
            textwrap.dedent("""
            import triton
            import triton.language as tl

            @triton.jit
            def helper(x):
                return x * 2

            @triton.jit
            def kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
                offs = tl.arange(0, BLOCK)
                tl.store(out_ptr + offs, helper(tl.load(x_ptr + offs)))
            """)
        )
    guard = "_compile._run_compiler = lambda *a: (print('COMPILER RAN'), 1 / 0)" if forbid else ""
    script = f"""
import jax, fusedops
from fusedops.kernels import _compile
from kernels_under_test import kernel
{guard}
x = jax.ShapeDtypeStruct((64,), "float32")
compiled = fusedops.triton_compile(x, kernel=kernel, out_type=x, BLOCK=64)
{body}
"""
    path = os.pathsep.join([str(HERE.parent), str(folder)])
    env = {**os.environ, "FUSEDOPS_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOWER = """
import hashlib, sys
import jax, jax.numpy as jnp
sys.path.insert(0, {tests!r})
import toys
from fusedops import triton_call
from fusedops.kernels import _compile
{guard}

def add(x):
    y = triton_call(x, x, x.size, kernel=toys.add_kernel, out_type=x, grid=8, block_size=128)
    return triton_call(y, N=1024, kernel=toys.affine_kernel, out_type=x, grid=8, BLOCK=128)

with _compile.use_device(_compile.device_for(90)):
    text = jax.jit(add).trace(jnp.ones(1024)).lower(lowering_platforms=("cuda",)).as_text()
assert text.count("triton_kernel_call_ffi") == 2
print(hashlib.sha256(text.encode()).hexdigest())
"""


@needs_bindings
class TestProgram:
    def test_same_program_in_every_process(self, tmp_path):
        """The second process compiles nothing and hands XLA the same bytes, so that JAX's cache hits."""
        env = {**os.environ, "FUSEDOPS_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parent)}
        printed = []
        for seed, guard in (("1", ""), ("2", "_compile._run_compiler = None")):
            script = LOWER.format(tests=str(HERE), guard=guard)
            env["PYTHONHASHSEED"] = seed
            done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            printed.append(done.stdout)
        assert printed[0] == printed[1]

    def lower(self, f, *args):
        with _compile.use_device(_compile.device_for(90)):
            return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    def test_alias_and_cost_reach_xla(self):
        x = jnp.arange(6.0)
        text = self.lower(
            lambda x: triton_call(
                x, N=6, kernel=toys.increment_kernel, out_type=x, grid=1, BLOCK=8, input_output_aliases={0: 0},
                cost_estimate={"flops": 6, "bytes_accessed": 48}, has_side_effect=True,
            ),
            x,
        )  # fmt: skip
        assert "output_operand_alias" in text and "cost_estimate_json" in text and "has_side_effect = true" in text

    def test_inputs_come_before_outputs(self):
        """A kernel may declare its output between its inputs; the launch hands buffers over in order."""
        x = jnp.arange(8.0)
        compiled = triton_compile(
            x, y_ptr=x, N=8, kernel=toys.middle_kernel, out_type=(x, sds((), jnp.float32)), BLOCK=8
        )
        ptx = _compile.reorder_parameters(compiled.ptx, (0, 2, 4, 1, 3))
        head = ptx[: ptx.index("{")]
        assert [int(n) for n in re.findall(r"_param_(\d)", head)] == [0, 2, 4, 1, 3, 5, 6]
        assert len(_compile._assemble(ptx, 90)[0]) > 0

    def test_export(self):
        x = jnp.arange(8.0)
        with _compile.use_device(_compile.device_for(90)):
            exported = jax.export.export(
                jax.jit(lambda x: triton_call(x, x, 8, kernel=toys.add_kernel, out_type=x, grid=1, block_size=8)),
                platforms=["cuda"],
                disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(fusedops.CUSTOM_CALL_TARGET_NAME)],
            )(x)
        assert len(exported.serialize()) > 0

    def test_scalar_types_that_jax_cannot_launch(self):
        x = jnp.arange(2.0)
        with pytest.raises(NotImplementedError, match="scalar of type i16"):
            self.lower(lambda x: triton_call(3, kernel=toys.short_scalar_kernel, out_type=x, grid=1), x)
