"""What must hold for every op, whatever runs it: the cases of cases.py under every transformation of JAX.

Each test runs twice on a CPU, by the reference and by the kernels in Triton's interpreter, and once on a
GPU, by the kernels.
"""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import fusedops
from cases import CASES, Case, cotangents
from fusedops.testing import assert_within_budget, error

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))


@pytest.fixture(autouse=True, params=["native", "interpret"])
def where(request):
    if request.param == "native":
        yield request.param
        return
    if jax.default_backend() == "gpu":
        pytest.skip("the kernels themselves run on this machine")
    pytest.importorskip("triton")
    with fusedops.interpret():
        yield request.param


def subsets(case: Case) -> list[tuple[int, ...]]:
    numbers = range(len(case.axes))
    return [s for n in numbers for s in itertools.combinations(numbers, n + 1)]


def jitted(case):
    return jax.jit(lambda *xs: case(*xs))


def value_and_grads(fn, operands, numbers, cts=None):
    """Results, and the gradients of the operands `numbers`, jitted."""

    def of_some(operands, cts):
        def of_differentiated(*some):
            chosen = dict(zip(numbers, some, strict=True))
            return fn(*(chosen.get(i, x) for i, x in enumerate(operands)))

        results, vjp = jax.vjp(of_differentiated, *(jnp.asarray(operands[i]) for i in numbers))
        return results, vjp(cts)

    cts = cotangents(jax.eval_shape(lambda *xs: fn(*xs), *operands)) if cts is None else cts
    return jax.jit(of_some)(operands, cts)


def with_grads(case, implementation=None):
    """A jitted function of the operands and the cotangents."""

    def fn(operands, cts):
        run = functools.partial(case, implementation=implementation)
        return value_and_grads(run, operands, case.differentiable, cts)

    return jax.jit(fn)


def check_against_truth(case, dtype="float32", **sizes):
    """Results and gradients within the error budget of plain JAX in the same dtype. Small operands are
    drawn many times and judged as one array: the largest error of a handful of elements is luck."""
    actual, reference, truth = [], [], []
    plain = with_grads(case, "xla")
    kernels = with_grads(case)
    smallest = min(x.size for x in case.operands(dtype, **sizes))
    for seed in range(min(32, -(-512 // smallest))):
        operands = case.operands(dtype, seed, **sizes)
        cts = cotangents(jax.eval_shape(case, *operands), seed)
        actual.append(kernels(operands, cts))
        with jax.default_matmul_precision("highest"):
            reference.append(plain(operands, cts))
        with jax.enable_x64(True):
            truth.append(plain(*(jax.tree.map(widen, t) for t in (operands, cts))))
    stacked = [jax.tree.map(lambda *xs: np.stack(xs), *each) for each in (actual, reference, truth)]
    names = [axes for i, axes in enumerate(case.axes) if i in case.differentiable]
    assert_within_budget(*(results for results, _ in stacked), name=f"{case.name} results ")
    for name, *three in zip(names, *(grads for _, grads in stacked), strict=True):
        assert_within_budget(*three, name=f"{case.name} gradient of {name}")


def widen(x):
    return jnp.asarray(x, "float64") if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x)


def assert_close(actual, expected, tolerance=1e-5):
    """Two evaluations that differ in the order of float32 sums at most."""
    leaves = [jax.tree.leaves(t) for t in (actual, expected)]
    for a, e in zip(*leaves, strict=True):
        assert a.dtype == e.dtype
        assert error(a, e).peak <= tolerance
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(e))


def assert_same_bits(actual, expected):
    leaves = [jax.tree.leaves(t) for t in (actual, expected)]
    for a, e in zip(*leaves, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


@by_case
class TestNumbers:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_budget(self, case, dtype):
        check_against_truth(case, dtype)

    def test_odd_sizes(self, case):
        for sizes in case.odd:
            check_against_truth(case, **sizes)

    def test_empty_sizes(self, case):
        for sizes in case.empty:
            operands = case.operands(**sizes)
            results, grads = with_grads(case)(operands, cotangents(jax.eval_shape(case, *operands)))
            expected = jax.eval_shape(lambda *xs: case(*xs, implementation="xla"), *operands)
            assert [r.shape for r in results] == [e.shape for e in expected]
            for i, grad in zip(case.differentiable, grads, strict=True):
                assert grad.shape == operands[i].shape
                assert np.isfinite(np.asarray(grad)).all()
            assert not any(np.isnan(np.asarray(r)).any() for r in results)

    def test_dtypes_are_kept(self, case):
        operands = case.operands("bfloat16")
        results, grads = value_and_grads(case, operands, case.differentiable)
        assert results[0].dtype == jnp.bfloat16
        assert [g.dtype for g in grads] == [operands[i].dtype for i in case.differentiable]

    def test_mixed_dtypes(self, case):
        """Each operand in turn in bfloat16: as plain JAX, or the same error."""
        for i in range(len(case.axes)):
            operands = list(case.operands())
            if operands[i].dtype != np.float32:
                continue
            operands[i] = operands[i].astype(jnp.bfloat16)
            try:
                expected = jax.jit(functools.partial(case, implementation="xla"))(*operands)
            except (TypeError, ValueError) as refusal:
                with pytest.raises(type(refusal)):
                    case(*operands)
                continue
            results, grads = value_and_grads(case, operands, case.differentiable)
            assert [r.dtype for r in results] == [e.dtype for e in expected]
            assert [g.dtype for g in grads] == [operands[j].dtype for j in case.differentiable]
            assert_close(results, expected, 2e-2)

    def test_toggles_change_the_result(self, case):
        operands = case.operands()
        before = jitted(case)(*operands)[0]
        for toggle in case.toggles:
            after = jitted(case._replace(options={**case.options, **toggle}))(*operands)[0]
            assert error(after, before).relative > 1e-2, f"{toggle} has no effect"

    def test_ten_runs_same_bits(self, case):
        operands = case.operands()
        cts = cotangents(jax.eval_shape(case, *operands))
        run = with_grads(case)
        first = run(operands, cts)
        for _ in range(9):
            assert_same_bits(run(operands, cts), first)

    def test_x64(self, case):
        operands = case.operands()
        expected = jitted(case)(*operands)
        with jax.enable_x64(True):
            results, _ = value_and_grads(case, operands, case.differentiable)
        assert_close(results, expected)

    def test_nan_neighbours(self, case):
        """Operands that are slices of larger arrays of NaN, so that nothing beyond them may be read."""
        operands = case.operands()
        cts = cotangents(jax.eval_shape(case, *operands))
        padded = [np.pad(x, [(1, 2)] * x.ndim, constant_values=np.nan) if x.dtype.kind == "f" else x for x in operands]

        def of_slices(padded, cts):
            inner = [
                p[tuple(slice(1, 1 + n) for n in x.shape)] if x.dtype.kind == "f" else p
                for p, x in zip(padded, operands, strict=True)
            ]  # fmt: skip
            return value_and_grads(case, inner, case.differentiable, cts)

        assert_close(jax.jit(of_slices)(padded, cts), with_grads(case)(operands, cts))


@by_case
class TestGradients:
    def test_zero_cotangents(self, case):
        operands = case.operands()
        zeros = [jnp.zeros(r.shape, r.dtype) for r in jax.eval_shape(case, *operands)]
        _, grads = value_and_grads(case, operands, case.differentiable, tuple(zeros))
        for grad in grads:
            np.testing.assert_array_equal(grad, 0)

    def test_linear_in_the_cotangents(self, case):
        operands = case.operands()
        run = with_grads(case)
        shapes = jax.eval_shape(case, *operands)
        a, b = cotangents(shapes, 1), cotangents(shapes, 2)
        both = jax.tree.map(lambda x, y: x + 2 * y, a, b)
        expected = jax.tree.map(lambda x, y: x + 2 * y, run(operands, a)[1], run(operands, b)[1])
        assert_close(run(operands, both)[1], expected, 2e-5 if jax.default_backend() == "cpu" else 1e-2)

    def test_one_operand_at_a_time(self, case):
        """Operands without a gradient, and results without a cotangent, change nothing for the others."""
        operands = case.operands()
        results, together = value_and_grads(case, operands, case.differentiable)
        cts = cotangents(results)
        for i, expected in zip(case.differentiable, together, strict=True):
            _, (grad,) = value_and_grads(case, operands, (i,), cts)
            assert_close(grad, expected)
        zeros = tuple(jnp.zeros(r.shape, r.dtype) for r in results[1:])
        _, expected = value_and_grads(case, operands, case.differentiable, (cts[0], *zeros))
        _, grads = value_and_grads(lambda *xs: case(*xs)[:1], operands, case.differentiable, cts[:1])
        assert_close(grads, expected)

    def test_remat(self, case):
        operands = case.operands()
        expected = value_and_grads(case, operands, case.differentiable)
        for policy in (None, jax.checkpoint_policies.everything_saveable):
            fn = jax.checkpoint(lambda *xs: case(*xs), policy=policy)
            assert_close(value_and_grads(fn, operands, case.differentiable), expected)

    def test_forward_mode_has_advice(self, case, where):
        operands = tuple(map(jnp.asarray, case.operands()))
        tangents = tuple(map(jnp.ones_like, operands))
        jax.jvp(lambda *xs: case(*xs, implementation="xla"), operands, tangents)
        with pytest.raises((TypeError, NotImplementedError), match=r"custom_vjp|implementation"):
            jax.jvp(lambda *xs: case(*xs), operands, tangents)


@by_case
class TestTransformations:
    def test_jit_is_eager(self, case):
        operands = case.operands()
        assert_close(jitted(case)(*operands), case(*operands))

    def test_default_is_xla(self, case):
        operands = case.operands()
        tolerance = 1e-5 if jax.default_backend() == "cpu" else 1e-2
        plain = jax.jit(functools.partial(case, implementation="xla"))
        assert_close(jitted(case)(*operands), plain(*operands), tolerance)

    def test_vmap_subsets(self, case):
        """Each subset of operands mapped, along the first or the last axis, against a loop."""
        many, run = [case.operands(seed=s) for s in range(3)], jitted(case)
        for numbers in subsets(case):
            axis = -1 if len(numbers) % 2 else 0
            in_axes = [axis if i in numbers else None for i in range(len(case.axes))]
            stacked = [np.stack(xs, axis) if i in numbers else xs[0] for i, xs in enumerate(zip(*many, strict=True))]
            results = jax.jit(jax.vmap(run, in_axes))(*stacked)
            expected = [run(*(m[i] if i in numbers else many[0][i] for i in range(len(in_axes)))) for m in many]
            assert_close(results, jax.tree.map(lambda *xs: jnp.stack(xs), *expected))

    def test_vmap_nested(self, case):
        """The first operand mapped outside, the last inside, the others in both."""
        grid = [[case.operands(seed=2 * i + j) for j in range(2)] for i in range(2)]
        last = len(case.axes) - 1

        def at(i, j, n):
            return grid[i if n != last or last == 0 else 0][j if n or last == 0 else 0][n]

        table = [[[at(i, j, n) for n in range(last + 1)] for j in range(2)] for i in range(2)]
        stacked = [np.stack([np.stack([table[i][j][n] for j in range(2)]) for i in range(2)]) for n in range(last + 1)]
        inner, outer = [0] * (last + 1), [0] * (last + 1)
        if last:
            stacked[0], inner[0] = stacked[0][:, 0], None
            stacked[last], outer[last] = stacked[last][0], None
        run = jitted(case)
        results = jax.vmap(jax.vmap(run, inner), outer)(*stacked)
        for i, j in itertools.product(range(2), repeat=2):
            assert_close(tuple(r[i, j] for r in results), run(*table[i][j]))

    def test_vmap_and_grad(self, case):
        """vmap of grad and grad of vmap, with one operand shared, against a loop."""
        many = [case.operands(seed=s) for s in range(2)]
        last = len(case.axes) - 1
        shared = many[0][last]
        mapped = [np.stack([m[i] for m in many]) for i in range(last)]
        numbers = case.differentiable
        cts = cotangents(jax.eval_shape(case, *many[0]))

        def grads(*operands):
            return value_and_grads(case, operands, numbers, cts)[1]

        def mapped_case(*operands):
            return jax.vmap(lambda *xs: case(*xs), [0] * last + [None])(*operands) if last else case(*operands)

        expected = [jax.jit(grads)(*m[:last], shared) for m in many]
        results = jax.jit(jax.vmap(grads, [0] * last + [None]))(*mapped, shared) if last else grads(shared)
        stacked_cts = tuple(jnp.stack([c, c]) for c in cts) if last else cts
        _, of_vmap = value_and_grads(mapped_case, (*mapped, shared), numbers, stacked_cts)
        for place, i in enumerate(numbers):
            each = [e[place] for e in expected]
            if last:
                assert_close(results[place], jnp.stack(each))
            assert_close(of_vmap[place], sum(each) if i == last and last else jnp.stack(each) if last else each[0])

    def test_scan(self, case):
        many = [case.operands(seed=s) for s in range(3)]
        stacked = jax.tree.map(lambda *xs: np.stack(xs), *many)

        def total(first):
            def step(carry, operands):
                return carry + jnp.mean(case(first * operands[0], *operands[1:])[0].astype(jnp.float32)), None

            return jax.lax.scan(step, jnp.float32(0), stacked)[0]

        def loop(first):
            return sum(jnp.mean(case(first * m[0], *m[1:])[0].astype(jnp.float32)) for m in many)

        by_both = (jax.jit(jax.value_and_grad(f))(jnp.float32(0.7)) for f in (total, loop))
        for result, expected in zip(*by_both, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)

    def test_shard_map(self, case):
        """The first axis of every operand over two devices, where all operands share it."""
        leading = {axes.split()[0] for axes in case.axes}
        if len(leading) > 1 or len(jax.devices()) < 2:
            pytest.skip("no axis common to all operands, or one device")
        operands = case.operands(**{leading.pop(): 4})
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        spec = PartitionSpec("x")
        fn = jax.shard_map(lambda *xs: case(*xs), mesh=mesh, in_specs=spec, out_specs=spec)
        results = value_and_grads(fn, operands, case.differentiable)
        assert_close(results, value_and_grads(case, operands, case.differentiable))

    def test_explain(self, case, where):
        entries = fusedops.explain(lambda *xs: case(*xs), *case.operands())
        assert [e.op for e in entries] == [case.name.split()[0]]
        kernels = where == "interpret" or jax.default_backend() == "gpu"
        if kernels or importlib.util.find_spec("triton"):
            assert entries[0].implementation == ("triton" if kernels else "xla")
