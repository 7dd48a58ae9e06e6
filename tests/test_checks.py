"""Axis strings and argument checks: what passes, and that each error says who, what and how to go on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusedops._checks import check, check_choice, check_dtype, check_int, check_number, parse


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


class TestSizes:
    def test_attention(self):
        sizes = check(
            "f",
            query=(array(2, 3, 16, 8, 64), "*B T N H"),
            key=(array(2, 3, 7, 4, 64), "*B S K H"),
            value=(array(2, 3, 7, 4, 32), "*B S K D"),
            bias=(array(3, 1, 16, 1), "*#B #N #T #S"),
        )
        assert sizes == dict(B=(2, 3), T=16, N=8, H=64, S=7, K=4, D=32)

    @pytest.mark.parametrize("lead", [(), (0,), (5, 6)])
    def test_leading(self, lead):
        assert check("f", x=(array(*lead, 4), "*B T")) == dict(B=lead, T=4)

    def test_none_is_left_out(self):
        assert check("f", x=(array(4), "T"), bias=(None, "T")) == dict(T=4)

    @pytest.mark.parametrize("size", [1, 4])
    def test_broadcast_whatever_the_order(self, size):
        assert check("f", bias=(array(size), "#T"), x=(array(4), "T"))["T"] == 4

    def test_broadcast_alone(self):
        assert check("f", a=(array(1), "#T"), b=(array(5), "#T"), c=(array(1), "#T")) == dict(T=5)
        assert check("f", a=(array(1, 3), "*#B T"), b=(array(5, 3), "*#B T"))["B"] == (5,)

    def test_literal(self):
        assert check("f", x=(array(7, 3), "T 3")) == dict(T=7)

    def test_zero(self):
        assert check("f", x=(array(0), "T"), bias=(array(1), "#T")) == dict(T=0)

    @pytest.mark.parametrize("x", [np.zeros((2, 3)), jnp.zeros((2, 3)), array(2, 3)])
    def test_whatever_has_a_shape(self, x):
        assert check("f", x=(x, "T H")) == dict(T=2, H=3)

    def test_tracer(self):
        seen = []
        jax.vmap(lambda x: seen.append(check("f", x=(x, "T H"))))(jnp.zeros((5, 2, 3)))
        assert seen == [dict(T=2, H=3)]


class TestErrors:
    def fails(self, error, *parts, **operands):
        with pytest.raises(error) as caught:
            check("attention", **operands)
        for part in ("attention: ", *parts):
            assert part in str(caught.value)

    def test_sizes_disagree(self):
        self.fails(
            ValueError,
            "key has shape (2, 7, 4, 6), expected axes '*B S K H'",
            "H is 6, but H is 5 in query",
            "query has shape (2, 3, 4, 5)",
            "pass key with H = 5, or change query",
            query=(array(2, 3, 4, 5), "*B T N H"),
            key=(array(2, 7, 4, 6), "*B S K H"),
        )

    def test_leading_axes_disagree(self):
        self.fails(ValueError, "B is (3,), but B is (2,) in x", x=(array(2, 4), "*B T"), y=(array(3, 4), "*B T"))

    def test_one_is_no_wildcard(self):
        self.fails(ValueError, "T is 1, but T is 4", x=(array(4), "T"), y=(array(1), "T"))

    def test_broadcast(self):
        self.fails(ValueError, "pass mask with T = 1 or 4", x=(array(4), "T"), mask=(array(3), "#T"))

    @pytest.mark.parametrize("lead", [(3,), (1, 2), (2, 2)])
    def test_broadcast_leading(self, lead):
        self.fails(ValueError, "B is (2,) in x", x=(array(2, 4), "*B T"), mask=(array(*lead, 4), "*#B T"))

    def test_rank(self):
        self.fails(ValueError, "x has shape (4,), expected axes 'T H': 2 of them, got 1", x=(array(4), "T H"))
        self.fails(ValueError, "at least 2 of them", x=(array(4), "*B T H"))

    def test_literal(self):
        self.fails(ValueError, "axis -1 must be 3", x=(array(7, 4), "T 3"))

    @pytest.mark.parametrize("x", [[1.0], 1.0, "x"])
    def test_no_array(self, x):
        self.fails(TypeError, f"got {type(x).__name__}", "jnp.asarray", x=(x, "T"))

    @pytest.mark.parametrize("text", ["T *B", "T-1", "**B", "#", "*"])
    def test_axis_string(self, text):
        with pytest.raises(ValueError, match="not an axis string"):
            parse(text)


class TestOthers:
    def test_choice(self):
        check_choice("f", "implementation", None, (None, "xla"))
        check_choice("f", "implementation", "xla", (None, "xla"))
        for wrong in ("cudnn", 0, False, jnp.zeros(3)):
            with pytest.raises(ValueError, match=r"f: implementation must be one of None, 'xla'; got"):
                check_choice("f", "implementation", wrong, (None, "xla"))

    def test_dtype(self):
        check_dtype("f", jnp.floating, x=array(3, dtype=jnp.bfloat16), y=None)
        with pytest.raises(TypeError, match=r"f: x must have a dtype of kind floating, got int32; .*x\.astype"):
            check_dtype("f", jnp.floating, x=array(3, dtype=jnp.int32))

    @pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(1)])
    def test_number(self, value):
        check_number("f", "scale", value, low=0, high=1)

    def test_number_errors(self):
        for wrong in (True, "1", 1j, jnp.ones(()), None):
            with pytest.raises(TypeError, match="f: scale must be a number, got"):
                check_number("f", "scale", wrong)
        with pytest.raises(ValueError, match=r"f: rate must be from 0 to 1, got 1\.5"):
            check_number("f", "rate", 1.5, low=0, high=1)
        with pytest.raises(ValueError, match="f: cap must be >= 0, got nan"):
            check_number("f", "cap", float("nan"), low=0)
        with pytest.raises(ValueError, match="f: cap must be <= 0, got 1"):
            check_number("f", "cap", 1, high=0)

    def test_int(self):
        check_int("f", "window", np.int32(3), low=0)
        for wrong in (1.0, True, None):
            with pytest.raises(TypeError, match="f: window must be an integer"):
                check_int("f", "window", wrong)
        with pytest.raises(ValueError, match="f: window must be >= 0, got -1"):
            check_int("f", "window", -1, low=0)
