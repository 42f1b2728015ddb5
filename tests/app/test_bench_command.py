"""`stopdown bench`: its limit of time, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

from stopdown.bench import WAYS

Run = Callable[..., tuple[int, str, str]]


def test_rows_that_no_time_is_left_for_are_named(run: Run) -> None:
    """After the minutes are over no row begins; the report names each, and the command exits with 1."""
    code, out, _ = run("bench", "--minutes", "1e-9", "--device", "cpu")
    assert code == 1
    assert out.count("left out after 1e-09 minutes") == 2 * len(WAYS)
    assert out.startswith("**Not measured: fp16 with a plan, plain fp16, bf16.**")


def test_a_device_that_is_not_here_is_refused(run: Run) -> None:
    """A profile of another card can't be measured; the model is checked before anything is."""
    code, out, err = run("bench", "--device", "v100")
    assert (code, out) == (2, "")
    assert err.startswith("stopdown: --device v100 is a profile of the NVIDIA Tesla V100")
    code, out, err = run("bench", "./missing", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "There is no file or folder ./missing." in err
