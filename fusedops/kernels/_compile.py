"""From a Triton function to PTX, and every private part of JAX and Triton that we touch.

`private(name)` is the only door to those parts: a release that moves one fails with a message that
names it, and a test resolves the whole list. Compiled kernels are kept in memory and on disk.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import re
import subprocess
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

PRIVATE_SYMBOLS = (
    "jax._src.config.bool_state",
    "jax._src.core.effects",
    "jax._src.lib.gpu_triton",
    "jax._src.state.AbstractRef",
    "jax._src.state.ReadEffect",
    "jax._src.state.TransformedRef",
    "jax._src.state.WriteEffect",
    "jax._src.state.discharge.register_discharge_rule",
    "triton._C.libtriton.get_cache_invalidating_env_vars",
    "triton._C.libtriton.ir",
    "triton.backends.compiler.GPUTarget",
    "triton.backends.nvidia.compiler.get_ptxas",
    "triton.backends.nvidia.compiler.min_dot_size",
    "triton.backends.nvidia.driver.TMA_DTYPE_DEVICE_TO_HOST",
    "triton.compiler.ASTSource",
    "triton.compiler.CompilationError",
    "triton.compiler.make_backend",
    "triton.experimental.gluon._runtime.GluonASTSource",
    "triton.experimental.gluon._runtime.GluonJITFunction",
    "triton.runtime.Autotuner",
    "triton.runtime.Heuristics",
    "triton.runtime.JITFunction",
    "triton.runtime.interpreter",
)
TRITON_RANGE = ((3, 6), (3, 10))
CUSTOM_CALL_TARGET_NAME = "triton_kernel_call_ffi"
_CACHE_FORMAT = 1
_MEMORY_ENTRIES = 2048


class KernelCompileError(ValueError):
    """A kernel does not compile, or needs more than the device has."""


@functools.cache
def private(name: str) -> Any:
    """The private object of JAX or Triton with this dotted name.

    Raises:
      ImportError: the installed release does not have it; the message says which releases do.
    """
    package = name.split(".", 1)[0]
    if package == "triton":
        check_triton()
    module, _, attribute = name.rpartition(".")
    try:
        try:
            return getattr(importlib.import_module(module), attribute)
        except AttributeError:
            return importlib.import_module(name)
    except ImportError as error:
        if name == "jax._src.lib.gpu_triton":
            fix = 'install JAX with GPU support: pip install "jax[cuda13]>=0.11.2"'
        else:
            fix = "install jax>=0.10 and triton>=3.6,<3.10, or a newer fusedops"
        raise ImportError(f"fusedops needs {name}, which this installation lacks; {fix}") from error


@functools.cache
def check_triton() -> None:
    """Raises ImportError unless a supported Triton is installed."""
    low, high = (".".join(map(str, v)) for v in TRITON_RANGE)
    fix = f'pip install "triton>={low},<{high}"'
    try:
        import triton
    except ImportError as error:
        raise ImportError(f"fusedops kernels need Triton (Linux only): {fix}") from error
    version = tuple(int(v) for v in triton.__version__.split(".")[:2])
    if not TRITON_RANGE[0] <= version < TRITON_RANGE[1]:
        raise ImportError(f"fusedops works with triton {low} to {high}, got {triton.__version__}; {fix}")


def gpu_library() -> Any:
    """jaxlib's Triton bindings; raises ImportError where they are missing or too old."""
    library = private("jax._src.lib.gpu_triton")
    if not hasattr(library, "create_tma_descriptor_parameter"):
        raise ImportError(
            f"fusedops kernels need jaxlib >= 0.11.2 with GPU support, got jaxlib "
            f'{jax.lib.__version__}; install it with: pip install "jax[cuda13]>=0.11.2"'
        )
    return library


@dataclasses.dataclass(frozen=True)
class Device:
    """What configs and compilation depend on. `capability` is 90 for compute capability 9.0;
    `shared_memory` is the most that one block may use, in bytes; `sms` counts multiprocessors."""

    name: str
    capability: int
    sms: int
    shared_memory: int


# Shared memory per block, CUDA C++ Programming Guide, table "Technical Specifications per Compute
# Capability" (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities).
_SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_SMS = {80: 108, 86: 84, 87: 16, 89: 128, 90: 132, 100: 148, 103: 148, 110: 20, 120: 170, 121: 48}
_device: contextvars.ContextVar[Device | None] = contextvars.ContextVar("device", default=None)


def device_for(capability: int, name: str | None = None, sms: int | None = None) -> Device:
    """A typical device of this compute capability."""
    shared = _SHARED_MEMORY.get(capability, 99) * 1024
    return Device(name or f"sm_{capability}", capability, sms or _SMS.get(capability, 100), shared)


@contextlib.contextmanager
def use_device(device: Device) -> Iterator[None]:
    """Configs and compilations inside are for `device`, whatever this machine has."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def device() -> Device:
    """The device that kernels are compiled for: that of `use_device`, else the default GPU.

    Raises:
      RuntimeError: there is no GPU and no `use_device`.
    """
    if (chosen := _device.get()) is not None:
        return chosen
    try:
        gpu = jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "no CUDA GPU to compile for; pass compute_capability=90 (or another) to compile without one"
        ) from error
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if getattr(default, "platform", None) == "gpu":
        gpu = default
    capability = int(str(gpu.compute_capability).replace(".", ""))
    return device_for(capability, gpu.device_kind, gpu.core_count)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled kernel: what a launch needs. `num_warps` is the compiled total, which for
    warp-specialised kernels is more than the option; memory sizes are in bytes per block."""

    name: str
    ptx: str
    capability: int
    num_warps: int
    num_ctas: int
    shared_memory: int
    scratch_size: int
    scratch_align: int
    descriptors: tuple[dict[str, Any], ...]
    ones: bool

    @functools.cached_property
    def _assembled(self) -> tuple[bytes, str]:
        return _assemble(self.ptx, self.capability)

    @property
    def cubin(self) -> bytes:
        """Machine code, by the ptxas that Triton carries (XLA uses its own)."""
        return self._assembled[0]

    @property
    def log(self) -> str:
        """What `ptxas -v` said."""
        return self._assembled[1]

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return int(_first(r"Used (\d+) registers", self.log))

    @property
    def spills(self) -> int:
        """Bytes of register spill stores and loads per thread."""
        return sum(int(n) for n in re.findall(r"(\d+) bytes spill", self.log))

    @property
    def warnings(self) -> tuple[str, ...]:
        """ptxas's warnings and its advice on wgmma (C7510 to C7519)."""
        lines = self.log.splitlines()
        return tuple(line.strip() for line in lines if "warning" in line or re.search(r"\(C75\d\d\)", line))

    @property
    def wgmma_serialized(self) -> bool:
        """Whether ptxas had to serialise asynchronous matrix instructions."""
        return "wgmma" in self.log and "serializ" in self.log


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else "0"


@functools.lru_cache(maxsize=512)
def _assemble(ptx: str, capability: int) -> tuple[bytes, str]:
    """Machine code and ptxas's log."""
    ptxas = private("triton.backends.nvidia.compiler.get_ptxas")(capability).path
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={architecture(capability)}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelCompileError(f"ptxas refused the kernel's PTX:\n{done.stdout}{done.stderr}")
        return target.read_bytes(), done.stdout.replace(folder, "") + done.stderr.replace(folder, "")


def architecture(capability: int) -> str:
    """The name that ptxas has for a compute capability; "a" brings wgmma and setmaxnreg."""
    return f"sm_{capability}" + ("a" if capability >= 90 else "")


@dataclasses.dataclass(frozen=True)
class Source:
    """What decides a binary. `signature` maps every parameter to its Triton type or "constexpr",
    the others name parameters by their path: (2,) or (2, 0) inside a tuple. `ones` are integers of
    value 1, made constants where the kernel compiles so, as Triton does for strides."""

    kernel: Any
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    divisible: tuple[tuple[int, ...], ...]
    ones: tuple[tuple[int, ...], ...]
    options: tuple[tuple[str, Any], ...]
    capability: int

    def key(self) -> str | None:
        """Hash of all that changes the binary, the same in every process; None: do not store."""
        import triton

        def kernel_key(v: Any) -> str:
            return getattr(v, "cache_key", None) or repr(v)

        parts = [
            _CACHE_FORMAT, triton.__version__, type(self.kernel).__name__, self.kernel.cache_key,
            self.signature, [(p, kernel_key(v)) for p, v in self.constants], self.divisible, self.ones,
            sorted(self.options), self.capability,
            sorted(private("triton._C.libtriton.get_cache_invalidating_env_vars")().items()),
        ]  # fmt: skip
        text = repr(parts)
        return None if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()


_memory: OrderedDict[Any, Compiled] = OrderedDict()
_building: dict[Any, threading.Lock] = {}
_lock = threading.Lock()
frontend_lock = threading.RLock()  # Triton's language is patched while the interpreter runs


def compile_kernel(source: Source) -> Compiled:
    """Compiles for `source.capability`, or finds the result in memory or on disk.

    Raises:
      KernelCompileError: with the kernel's name and, where Triton knows it, the source line.
    """
    key = source.key()
    memory_key = key or source
    with _lock:
        if memory_key in _memory:
            _memory.move_to_end(memory_key)
            return _memory[memory_key]
        building = _building.setdefault(memory_key, threading.Lock())
    with building:
        compiled = _memory.get(memory_key) or _load(key)
        if compiled is None:
            compiled = _compile_ones(source) if source.ones else _run_compiler(source)
            _store(key, compiled)
        with _lock:
            _memory[memory_key] = compiled
            _building.pop(memory_key, None)
            while len(_memory) > _MEMORY_ENTRIES:
                _memory.popitem(last=False)
    return compiled


def cache_dir() -> Path | None:
    """Where compiled kernels and tuned configs are kept: FUSEDOPS_CACHE_DIR, else the platform's
    cache folder; None where that variable is "off"."""
    chosen = os.environ.get("FUSEDOPS_CACHE_DIR", "")
    if chosen.lower() in ("off", "0", "none"):
        return None
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("fusedops"))


def _entry(key: str | None) -> Path | None:
    folder = cache_dir()
    return folder / "kernels" / f"{key}.json" if folder and key else None


def _load(key: str | None) -> Compiled | None:
    path = _entry(key)
    try:
        fields = json.loads(path.read_text()) if path else None
        return Compiled(**{**fields, "descriptors": tuple(fields["descriptors"])}) if fields else None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # absent, or damaged: it is compiled and written again


def _store(key: str | None, compiled: Compiled) -> None:
    if (path := _entry(key)) is not None:
        write_atomically(path, json.dumps(dataclasses.asdict(compiled), indent=0))


def write_atomically(path: Path, text: str) -> None:
    """Writes a whole file or none of it; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        pass


def _compile_ones(source: Source) -> Compiled:
    try:
        return _run_compiler(source, source.ones)
    except KernelCompileError:  # a constant has no .to(), for one
        return _run_compiler(source)


def _run_compiler(source: Source, ones: tuple[tuple[int, ...], ...] = ()) -> Compiled:
    kernel, name = source.kernel, source.kernel.fn.__name__
    target = private("triton.backends.compiler.GPUTarget")("cuda", source.capability, 32)
    backend = private("triton.compiler.make_backend")(target)
    wanted = {"enable_fp_fusion": True, **dict(source.options)}  # the default changes in Triton 3.10
    if source.capability <= 100:
        wanted.setdefault("ptx_version", 87)  # that of CUDA 12.8, which any ptxas we meet can read
    try:
        options = backend.parse_options(wanted)
    except (AssertionError, ValueError, TypeError) as error:
        raise KernelCompileError(f"kernel {name}: bad option in {dict(source.options)}: {error}") from error
    gluon = isinstance(kernel, private("triton.experimental.gluon._runtime.GluonJITFunction"))
    make_source = private("triton.experimental.gluon._runtime.GluonASTSource" if gluon else "triton.compiler.ASTSource")
    attributes = {path: [["tt.divisibility", 16]] for path in source.divisible}
    signature, constants = dict(source.signature), dict(source.constants)
    names = list(signature)
    for path in ones:
        signature[names[path[0]]], constants[path] = "constexpr", 1
    for path, _ in source.constants:
        if len(path) == 1:
            signature[names[path[0]]] = "constexpr"
    tree = make_source(kernel, signature, constants, attributes)
    ir = private("triton._C.libtriton.ir")
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata: dict[str, Any] = {"target": target, **options.__dict__}
    try:
        code = backend.get_codegen_implementation(options)
        with frontend_lock:
            module = tree.make_ir(target, options, code, backend.get_module_map(), context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, tree.language)
        order = list(stages)
        for stage in order[order.index(tree.ext) : order.index("ptx") + 1]:
            module = stages[stage](module, metadata)
    except private("triton.compiler.CompilationError") as error:
        raise KernelCompileError(f"kernel {name} does not compile: {error}") from error
    except RuntimeError as error:
        raise KernelCompileError(
            f"kernel {name} does not compile for {architecture(source.capability)}: {error}; the lines "
            "that Triton wrote to stderr above say where"
        ) from error
    _check_resources(name, source, metadata)
    return Compiled(
        name=metadata["name"],
        ptx=strip_ptx(module),
        capability=source.capability,
        num_warps=metadata["num_warps"],
        num_ctas=metadata["num_ctas"],
        shared_memory=metadata["shared"],
        scratch_size=metadata.get("global_scratch_size") or 0,
        scratch_align=metadata.get("global_scratch_align") or 1,
        descriptors=tuple(json.loads(json.dumps(metadata.get("tensordesc_meta") or []))),
        ones=bool(ones),
    )


def _check_resources(name: str, source: Source, metadata: Mapping[str, Any]) -> None:
    chosen = _device.get()
    fits = chosen.shared_memory if chosen else device_for(source.capability).shared_memory
    if metadata["shared"] > fits:
        raise KernelCompileError(
            f"kernel {name} needs {metadata['shared']} bytes of shared memory per block, and "
            f"{architecture(source.capability)} has {fits}; lower num_stages (now "
            f"{dict(source.options).get('num_stages')}) or the block sizes"
        )
    if (metadata.get("tmem_size") or 0) > 512:
        raise KernelCompileError(
            f"kernel {name} needs {metadata['tmem_size']} columns of tensor memory, and a "
            "multiprocessor has 512; lower the block sizes"
        )


def strip_ptx(ptx: str) -> str:
    """The same program without comments, line tables and debug sections: what a launch costs grows
    with the length of this text."""
    ptx = re.sub(r"^\s*\.section\s+\.debug\w*\s*\{.*?\}", "", ptx, flags=re.MULTILINE | re.DOTALL)
    ptx = re.sub(r"//[^\n]*", "", ptx)
    ptx = re.sub(r"^\s*\.(?:loc|file)\s[^\n]*$", "", ptx, flags=re.MULTILINE)
    ptx = re.sub(r"^\$L__(?:tmp|func_begin|func_end)\d+:\s*$", "", ptx, flags=re.MULTILINE)
    ptx = re.sub(r"^(\.target\s+\w+)\s*,\s*debug", r"\1", ptx, flags=re.MULTILINE)
    lines = (re.sub(r"\s+", " ", line.strip()) for line in ptx.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def reorder_parameters(ptx: str, order: tuple[int, ...]) -> str:
    """Puts the entry's parameters in this order: launches hand over buffers as inputs, outputs, while
    a kernel may declare them in any order. The body names its parameters, so it stays as it is."""
    if order == tuple(range(len(order))):
        return ptx
    match = re.search(r"(\.entry\s+\w+\s*\()(.*?)(\))", ptx, flags=re.DOTALL)
    assert match is not None
    parameters = [text.strip() for text in match.group(2).split(",")]
    tail = parameters[len(order) :]  # the two scratch pointers of Triton's convention
    moved = ",\n".join([parameters[i] for i in order] + tail)
    return ptx[: match.start()] + f"{match.group(1)}\n{moved}\n{match.group(3)}" + ptx[match.end() :]
