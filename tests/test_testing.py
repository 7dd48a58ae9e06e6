"""assert_within_budget: accepts what plain JAX would do, and notices each way of being worse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusedops.testing import assert_within_budget, error


@pytest.fixture
def truth():
    return np.random.default_rng(0).normal(size=(32, 64))


def low(x, dtype=jnp.bfloat16):
    return np.asarray(x).astype(dtype)


class TestError:
    def test_values(self):
        actual, truth = np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[1.0, 2.0], [3.0, 4.0]])
        found = error(actual, truth)
        assert found.relative == pytest.approx(1 / np.sqrt(30))
        assert found.peak == pytest.approx(1 / 4)
        assert found.worst == (1, 1)

    def test_rows_have_their_own_scale(self):
        truth = np.array([[1000.0, 1000.0], [100.0, 100.0]])
        at_large, at_small = truth.copy(), truth.copy()
        at_large[0, 0] += 10
        at_small[1, 0] += 10
        assert error(at_small, truth).peak > error(at_large, truth).peak

    def test_equal(self, truth):
        assert error(truth, truth)[:2] == (0, 0)
        assert error(np.zeros((2, 3)), np.zeros((2, 3)))[:2] == (0, 0)

    def test_zero_truth(self):
        assert error(np.array([1e-9]), np.zeros(1))[:2] == (np.inf, np.inf)

    def test_scalar_empty_complex(self):
        assert error(2.0, 1.0) == (1, 1, ())
        assert error(np.zeros((0, 3)), np.zeros((0, 3))) == (0, 0, ())
        assert error(np.array([1 + 1j]), np.array([1 + 0j]))[:2] == (1, 1)

    def test_shapes(self):
        with pytest.raises(ValueError, match=r"\(2,\).*\(1,\)"):
            error(np.zeros(2), np.zeros(1))


class TestBudget:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_rounding_passes(self, truth, dtype):
        assert_within_budget(low(truth, dtype), low(truth, dtype), truth)
        assert_within_budget(low(truth, dtype), low(truth + 1e-12, dtype), truth)

    def test_exact_reference_leaves_one_rounding(self):
        truth = np.array([1.0, 1.5])
        r = 2.0**-8  # half of bfloat16's epsilon, 2^-7
        assert_within_budget(low(truth), low(truth), truth * (1 + 0.9 * r), factor=0)
        with pytest.raises(AssertionError, match="over its error budget"):
            assert_within_budget(low(truth), low(truth), truth * (1 + 1.1 * r), factor=0)

    def test_double_error_passes_triple_does_not(self, truth):
        noise = np.random.default_rng(1).normal(size=truth.shape) * 1e-2
        reference = (truth + noise).astype(np.float32)
        assert_within_budget((truth + 1.9 * noise).astype(np.float32), reference, truth)
        with pytest.raises(AssertionError, match="relative norm"):
            assert_within_budget((truth + 3 * noise).astype(np.float32), reference, truth)

    def test_one_bad_element(self, truth):
        actual = low(truth, np.float32)
        actual[3, 5] += 1e-4
        with pytest.raises(AssertionError, match=r"(?s)dk \(float32\[32, 64\]\).*worst at \(3, 5\): actual"):
            assert_within_budget(actual, low(truth, np.float32), truth, name="dk")

    def test_scaled_result(self, truth):
        with pytest.raises(AssertionError, match="over its error budget"):
            assert_within_budget(low(truth * 1.02), low(truth), truth)

    def test_zeroed_row(self, truth):
        actual = low(truth)
        actual[7] = 0
        with pytest.raises(AssertionError, match="worst at \\(7, "):
            assert_within_budget(actual, low(truth), truth)

    def test_integers(self):
        three = jnp.arange(3)
        assert_within_budget(three, three, three)
        with pytest.raises(AssertionError):
            assert_within_budget(three + 1, three, three)

    def test_jax_arrays_and_trees(self):
        x = jax.random.normal(jax.random.key(0), (8, 8))
        good = {"o": x.astype(jnp.bfloat16), "grads": (x, None)}
        truth = {"o": x, "grads": (x, None)}
        assert_within_budget(good, good, truth)
        bad = good | {"grads": (x + 1, None)}
        with pytest.raises(AssertionError, match=r"f\['grads'\]\[0\]"):
            assert_within_budget(bad, good, truth, name="f")

    def test_empty(self):
        assert_within_budget(np.zeros((0, 4)), np.zeros((0, 4)), np.zeros((0, 4)))


class TestNonFinite:
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_pattern(self, truth, value):
        truth[2, 3] = value
        good = low(truth, np.float32)
        assert_within_budget(good, good, truth)
        for other in {0.0, np.inf, -np.inf, np.nan} - {value}:
            if np.isnan(other) and np.isnan(value):
                continue
            bad = good.copy()
            bad[2, 3] = other
            with pytest.raises(AssertionError, match=r"first at \(2, 3\)"):
                assert_within_budget(bad, good, truth)

    def test_nan_in_a_finite_result(self, truth):
        bad = low(truth, np.float32)
        bad[0, 0] = np.nan
        with pytest.raises(AssertionError, match="1 of 2048 elements"):
            assert_within_budget(bad, bad, truth)

    def test_overflow_of_the_dtype_is_no_error(self):
        truth = np.array([1.0, 1e6])
        assert_within_budget(np.array([1, np.inf], np.float16), np.array([1, np.inf], np.float16), truth)


class TestMisuse:
    def test_dtypes(self, truth):
        with pytest.raises(ValueError, match="compute the reference in bfloat16"):
            assert_within_budget(low(truth), truth, truth)

    def test_shapes(self, truth):
        with pytest.raises(ValueError, match="shapes differ"):
            assert_within_budget(truth, truth, truth[:1])

    def test_structures(self, truth):
        with pytest.raises(ValueError, match="one structure"):
            assert_within_budget((truth,), (truth, truth), (truth,))
