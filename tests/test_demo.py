"""The demo at a tiny size, and what it says of wrong arguments."""

import jax
import numpy as np
import pytest

from benchmarks import demo

TINY = ["--steps", "3", "--batch", "2", "--length", "16", "--layers", "1", "--heads", "2", "--features", "8"]


@pytest.fixture(autouse=True)
def rank_promotion():
    """Flax and optax promote ranks, in code that is not ours."""
    with jax.numpy_rank_promotion("allow"):
        yield


def test_runs(capsys):
    assert demo.main(TINY) == 0
    said = capsys.readouterr().out
    for part in ("They agree", "step 3/3", "time per step", "temporary memory", "attention_fwd_kernel", ">>>"):
        assert part in said


def test_learns_a_text_of_the_user(tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_bytes(b"to be or not to be, that is the question. " * 20)
    assert demo.main([*TINY, "--text", str(file), "--dtype", "bfloat16"]) == 0
    assert str(file) in capsys.readouterr().out


def test_fails_where_the_trainings_differ(monkeypatch, capsys):
    monkeypatch.setattr(demo, "BOUNDS", {"float32": (-1.0, -1.0)})
    assert demo.main(TINY) == 1
    assert "THEY DO NOT AGREE" in capsys.readouterr().out


def test_batches_are_passages():
    text = np.arange(200, dtype=np.uint8)
    sizes = demo.default_sizes()._replace(batch=3, length=10)
    batch = demo.draw_batch(text, sizes, 0, 1)
    assert batch.shape == (3, 11)
    assert (np.diff(batch) == 1).all()
    np.testing.assert_array_equal(batch, demo.draw_batch(text, sizes, 0, 1))
    assert (batch != demo.draw_batch(text, sizes, 0, 2)).any()


@pytest.mark.parametrize("arguments, message", [
    (["--text", "/no/such/file"], "cannot read"), (["--steps", "0"], "from 1 up"),
    (["--heads", "3"], "a multiple of the 3 heads"), (["--dtype", "int8"], "invalid choice"),
])  # fmt: skip
def test_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        demo.main([*TINY, *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_text_too_short(tmp_path, capsys):
    file = tmp_path / "short.txt"
    file.write_text("too short")
    with pytest.raises(SystemExit):
        demo.main([*TINY, "--text", str(file)])
    assert "at least 17 are needed" in capsys.readouterr().err
