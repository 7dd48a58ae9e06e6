"""The demo: one small Transformer, trained twice from the same start, with Flax's attention and with fusedops'.

    python -m benchmarks.demo [--text FILE] [--steps N] ...

It learns the bytes of Python's standard library, or of a file of yours. Both trainings see the same batches,
so their losses agree but for rounding; the exit status is 1 if they do not.
"""

import argparse
import functools
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fusedops
from fusedops.nn import linen

LEARNING_RATE = 2e-3
WARM_UP_STEPS = 2
# How far the trainings may be apart: the gradients of the first step (relative norm) and any loss (nats).
BOUNDS = {"float32": (1e-4, 0.05), "bfloat16": (5e-2, 0.15), "float16": (2e-2, 0.15)}


class Sizes(NamedTuple):
    """B sequences of T bytes a step; L blocks of E features and N heads."""

    steps: int
    batch: int
    length: int
    layers: int
    heads: int
    features: int
    dtype: str


def default_sizes() -> Sizes:
    """Half a minute per training on two CPU cores; on a GPU, sequences that are long enough to show the speed."""
    if jax.default_backend() != "gpu":
        return Sizes(steps=150, batch=16, length=128, layers=2, heads=4, features=128, dtype="float32")
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 15e9)
    batch = int(min(4, max(1, memory // 15e9)))
    return Sizes(steps=200, batch=batch, length=4096, layers=6, heads=8, features=1024, dtype="bfloat16")


class Block(nn.Module):
    """Causal attention, then an MLP; each after a layer norm and beside a residual. B T E -> B T E."""

    fused: bool
    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        heads, dtype, features = self.sizes.heads, jnp.dtype(self.sizes.dtype), self.sizes.features
        y = nn.LayerNorm(dtype=dtype)(x)
        if self.fused:
            x += linen.MultiHeadDotProductAttention(heads, dtype, is_causal=True, name="attention")(y)
        else:
            mask = nn.make_causal_mask(y[..., 0])
            x += nn.MultiHeadDotProductAttention(heads, dtype, name="attention")(y, mask=mask)
        y = nn.Dense(4 * features, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
        return x + nn.Dense(features, dtype=dtype)(nn.gelu(y))


class Transformer(nn.Module):
    """Bytes B T -> logits B T 256 of the byte that follows each, in float32."""

    fused: bool
    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dtype, features = jnp.dtype(self.sizes.dtype), self.sizes.features
        x = nn.Embed(256, features, dtype=dtype)(tokens)
        x += nn.Embed(self.sizes.length, features, dtype=dtype)(jnp.arange(tokens.shape[1]))[None]
        for i in range(self.sizes.layers):
            x = Block(self.fused, self.sizes, name=f"block_{i}")(x)
        return nn.Dense(256)(nn.LayerNorm()(x.astype(jnp.float32)))


def optimizer(steps: int) -> optax.GradientTransformation:
    """Adam on clipped gradients, its rate rising over the first tenth of the steps and falling as a cosine."""
    rate = optax.warmup_cosine_decay_schedule(LEARNING_RATE / 10, LEARNING_RATE, steps // 10, max(steps, 2))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


def step_fn(model: Transformer, params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
    """One step on batch B T+1; the loss is the mean cross-entropy in nats per byte."""

    def loss_fn(params: Any) -> jax.Array:
        logits = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(params)
    updates, state = optimizer(model.sizes.steps).update(gradient, state)
    return optax.apply_updates(params, updates), state, loss


class Training:
    """One of the two trainings, on a copy of `params`.

    Attributes: `params` now; `losses` and `seconds` of the steps so far; `gradient` of the first step;
    `compile_seconds`; `temporary`, the bytes that a step needs beside its operands, as XLA planned them.
    """

    def __init__(self, model: Transformer, params: Any, batch: np.ndarray):
        self.params = jax.tree.map(jnp.copy, params)
        self.state = optimizer(model.sizes.steps).init(self.params)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        step = jax.jit(functools.partial(step_fn, model), donate_argnums=(0, 1))
        start = time.perf_counter()
        self.compiled = step.lower(self.params, self.state, batch).compile()
        self.compile_seconds = time.perf_counter() - start
        self.temporary = self.compiled.memory_analysis().temp_size_in_bytes

    def step(self, batch: np.ndarray) -> None:
        """One step, timed until its loss has come."""
        start = time.perf_counter()
        self.params, self.state, loss = self.compiled(self.params, self.state, batch)
        self.losses.append(float(loss))
        self.seconds.append(time.perf_counter() - start)
        if len(self.losses) == 1:  # Adam's first moment is a multiple of the gradient then
            self.gradient = jax.device_get(self.state[1][0].mu)

    def time(self, last: int = 0) -> float:
        """The median time of the steps, or of the last ones, in seconds, warm-up left out."""
        return statistics.median((self.seconds[WARM_UP_STEPS:] or self.seconds)[-last:])


def train(stock: Training, fused: Training, batch_fn: Callable[[int], np.ndarray], steps: int) -> None:
    """Goes through both trainings in turn, so that whatever else this machine does slows both alike. Shows
    progress: one line that changes on a terminal, elsewhere a line every few seconds."""
    terminal = sys.stdout.isatty()
    shown = time.perf_counter()
    for i in range(1, steps + 1):
        batch = batch_fn(i)
        for training in (stock, fused):
            training.step(batch)
        now = time.perf_counter()
        if i == steps or now - shown > (0.2 if terminal else 5.0):
            shown = now
            parts = [f"{t.losses[-1]:.4f} ({t.time(20) * 1e3:.0f} ms a step)" for t in (stock, fused)]
            line = f"  step {i:{len(str(steps))}}/{steps}   loss: Flax {parts[0]}   fusedops {parts[1]}"
            end = "" if terminal and i < steps else "\n"
            print(f"\r{line}\x1b[K" if terminal else line, end=end, flush=True)


def standard_library() -> tuple[str, bytes]:
    """A description and the bytes of this Python's licence, where it is found, and of its own modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    places = [p / name for p in (folder, Path(sys.base_prefix)) for name in ("LICENSE.txt", "LICENSE")]
    licence = [p for p in places if p.is_file()][:1]
    modules = [p for p in sorted(folder.glob("*.py")) if os.access(p, os.R_OK)]
    text = b"\n".join(p.read_bytes() for p in licence + modules)
    what = f"the standard library of Python {sys.version.split()[0]}: {len(modules)} modules"
    return what + (" and the licence" if licence else ""), text


def read_text(file: Path | None, length: int) -> tuple[str, np.ndarray]:
    """A description and the bytes as uint8.

    Raises:
      ValueError: the file cannot be read, or has no sequence of `length` bytes and one to follow.
    """
    if file is None:
        what, text = standard_library()
    else:
        try:
            what, text = str(file), file.read_bytes()
        except OSError as error:
            raise ValueError(f"--text: cannot read {file}: {error.strerror}") from None
    if len(text) <= length:
        advice = "pass a longer text" + (", or a smaller --length" if text else "")
        where = file if file else "this Python comes without its sources; it"
        raise ValueError(f"--text: {where} has {len(text)} bytes, at least {length + 1} are needed; {advice}")
    return f"{what}, {len(text) / 1e6:.2g} MB" if len(text) >= 1e5 else f"{what}, {len(text)} bytes", np.frombuffer(
        text, np.uint8
    )


def draw_batch(text: np.ndarray, sizes: Sizes, seed: int, step: int) -> np.ndarray:
    """The batch of a step, B T+1: sequences from anywhere in the text."""
    rng = np.random.default_rng([seed, step])
    starts = rng.integers(0, len(text) - sizes.length, sizes.batch)
    return text[starts[:, None] + np.arange(sizes.length + 1)[None]].astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 4))
def continue_text(model: Transformer, params: Any, window: jax.Array, key: jax.Array, count: int) -> jax.Array:
    """Draws `count` bytes to follow the T bytes of `window`, one by one, at temperature 0.7."""

    def one(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.apply(params, window[None])[0, -1]
        byte = jax.random.categorical(key, logits / 0.7).astype(window.dtype)
        return jnp.append(window[1:], byte), byte

    return jax.lax.scan(one, window, jax.random.split(key, count))[1]


def table(*rows: Sequence[str], right: bool = True) -> str:
    """Columns; the first is set to the left, the others to the right or to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i and right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  " + "   ".join(cells).rstrip())
    return "\n".join(lines)


def compare(stock: Training, fused: Training, dtype: str) -> bool:
    """Prints both loss curves; returns whether they agree."""
    pairs = list(zip(stock.losses, fused.losses, strict=True))
    shown = sorted({round(x) for x in np.linspace(0, len(pairs) - 1, 11)})
    rows = [
        (str(i + 1), f"{pairs[i][0]:.5f}", f"{pairs[i][1]:.5f}", f"{pairs[i][1] - pairs[i][0]:+.1e}") for i in shown
    ]
    print("\nLoss (nats per byte)")
    print(table(("step", "Flax", "fusedops", "difference"), *rows))
    norm = lambda tree: float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree))))
    gradient = norm(jax.tree.map(np.subtract, fused.gradient, stock.gradient)) / norm(stock.gradient)
    largest = max(abs(a - b) for a, b in pairs)
    gradient_bound, loss_bound = BOUNDS[dtype]
    agree = gradient <= gradient_bound and largest <= loss_bound  # false for NaN
    print(f"  largest difference of losses            {largest:.1e}   (at most {loss_bound:g} is accepted)")
    print(f"  relative difference of first gradients  {gradient:.1e}   (at most {gradient_bound:g} is accepted)")
    if agree:
        print(f"  They agree. Both compute the same in another order, so {dtype} rounds differently; the")
        print("  differences start that small and grow a little with every step.")
    else:
        print("  THEY DO NOT AGREE: one of the two computes something else. Please report it.")
    return agree


def show_costs(stock: Training, fused: Training) -> None:
    """Prints time and memory side by side."""

    def row(what: str, unit: str, values: Sequence[float], digits: int) -> tuple[str, ...]:
        ratio = f"{values[0] / values[1]:.2f}" if values[1] else ""
        return (what, unit, *(f"{v:.{digits}f}" for v in values), ratio)

    both = (stock, fused)
    print("\nCost")
    print(
        table(
            ("", "unit", "Flax", "fusedops", "Flax/fusedops"),
            row("time per step (median)", "ms", [t.time() * 1e3 for t in both], 1),
            row("temporary memory of a step", "MB", [t.temporary / 1e6 for t in both], 1),
            (*row("compilation", "s", [t.compile_seconds for t in both], 1)[:-1], ""),
        )
    )
    if jax.default_backend() != "gpu":
        print("  On a CPU fusedops runs plain JAX, as Flax does; its kernels are for CUDA GPUs.")


def show_kernels(model: Transformer, params: Any, batch: np.ndarray) -> None:
    """Prints what `fusedops.explain` says of a step, here and on a GPU."""
    state = jax.eval_shape(optimizer(model.sizes.steps).init, params)
    explain = functools.partial(fusedops.explain, functools.partial(step_fn, model), params, state, batch)
    indent = lambda explanation: "  " + str(explanation).replace("\n", "\n  ")
    print("\nKernels that ran (fusedops.explain)")
    print(indent(explain()))
    if jax.default_backend() != "gpu":
        print("The same program on a CUDA GPU")
        print(indent(explain(platform="cuda")))


def show_sample(model: Transformer, params: Any, text: np.ndarray, seed: int) -> None:
    """Prints how the trained model continues a passage."""
    start = len(text) // 2 - model.sizes.length // 2
    window = text[start : start + model.sizes.length].astype(np.int32)
    drawn = continue_text(model, params, jnp.asarray(window), jax.random.key(seed), 300)
    shown = lambda tokens: bytes(np.asarray(tokens, np.uint8)).decode("utf-8", "replace")
    clean = lambda s: "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in s)
    print("\nThe trained model goes on with a passage of the text, from the mark >>> on")
    for line in clean(shown(window[-80:]) + ">>>" + shown(drawn)).splitlines():
        print(f"  | {line}")


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Trains a small Transformer twice, with Flax's attention and with fusedops', and compares.",
    )
    number = {"type": positive, "metavar": "N"}
    parser.add_argument("--text", type=Path, metavar="FILE", help="what to learn (default: Python's standard library)")
    parser.add_argument("--steps", **number, help="steps of each training")
    parser.add_argument("--batch", **number, help="sequences a step")
    parser.add_argument("--length", **number, help="bytes in a sequence")
    parser.add_argument("--layers", **number)
    parser.add_argument("--heads", **number)
    parser.add_argument("--features", **number, help="a multiple of --heads")
    parser.add_argument("--dtype", choices=sorted(BOUNDS), help="of the computation; parameters are float32")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    return parser, parser.parse_args(argv)


def positive(text: str) -> int:
    """A whole number from 1 up, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 up, got {value}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    parser, arguments = parse(argv)
    given = {k: v for k, v in vars(arguments).items() if k in Sizes._fields and v is not None}
    sizes = default_sizes()._replace(**given)
    if sizes.features % sizes.heads:
        parser.error(f"--features: expected a multiple of the {sizes.heads} heads, got {sizes.features}")
    try:
        what, text = read_text(arguments.text, sizes.length)
    except ValueError as error:
        parser.error(str(error))
    models = {fused: Transformer(fused, sizes) for fused in (False, True)}
    batch_fn = functools.partial(draw_batch, text, sizes, arguments.seed)
    params = jax.jit(models[False].init)(jax.random.key(arguments.seed), batch_fn(0)[:, :-1])
    show_setting(what, sizes, params)
    print("\nTraining: Flax   = flax.linen.MultiHeadDotProductAttention, with mask=make_causal_mask(...)")
    print("      fusedops   = fusedops.nn.linen.MultiHeadDotProductAttention, with is_causal=True")
    print("  compiling ...", flush=True)
    stock, fused = (Training(models[k], params, batch_fn(0)) for k in (False, True))
    train(stock, fused, batch_fn, sizes.steps)
    agree = compare(stock, fused, sizes.dtype)
    show_costs(stock, fused)
    show_kernels(models[True], fused.params, batch_fn(0))
    show_sample(models[True], fused.params, text, arguments.seed)
    return 0 if agree else 1


def show_setting(what: str, s: Sizes, params: Any) -> None:
    """Prints what is about to be done, and where."""
    device = jax.devices()[0]
    name = f"CPU, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    count = sum(x.size for x in jax.tree.leaves(params))
    versions = f"fusedops {fusedops.__version__}, JAX {jax.__version__}, Flax {flax.__version__}"
    print("A byte-level Transformer in Flax, trained twice from the same start on the same batches")
    print(
        table(
            ("device", f"{name}; {versions}"),
            ("text", what),
            ("model", f"{s.layers} layers, {s.features} features, {s.heads} heads of {s.features // s.heads}, "
             f"{count / 1e6:.1f} million parameters, {s.dtype}"),
            ("training", f"{s.steps} steps of {s.batch} sequences of {s.length} bytes, Adam"),
            right=False,
        )
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
