"""The checker's own arithmetic on weights, and what it sets for its process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import stopdown_verify
from stopdown_verify import ENTRIES, Weight, read_tensor_table, write_number


@pytest.fixture(name="weight")
def fixture_weight(tmp_path) -> tuple[Weight, np.ndarray]:
    """A tensor of several slices in a file, and its values."""
    values = torch.randn(5 * ENTRIES // 512, 512, generator=torch.Generator().manual_seed(0))
    save_file({"w": values.bfloat16()}, tmp_path / "w.safetensors")
    start, entry = read_tensor_table(tmp_path / "w.safetensors")["w"]
    return Weight(tmp_path / "w.safetensors", start, entry, {}), values.bfloat16().double().numpy()


@pytest.mark.parametrize("threads", [1, 3])
def test_slices_that_threads_compute_are_put_together_in_order(weight, threads, monkeypatch):
    made, values = weight
    monkeypatch.setattr(stopdown_verify, "THREADS", threads)
    monkeypatch.setattr(stopdown_verify, "POOL", ThreadPoolExecutor(threads))
    columns = np.random.default_rng(0).random((3, 512))
    start, stop = 100, len(values) - 7

    sums, squares, products = made.multiply(start, stop, columns[:1], columns[1:2], columns[2:])

    part = values[start:stop]
    assert np.allclose(sums, np.abs(part) @ columns[:1].T, rtol=1e-9)
    assert np.allclose(squares, part**2 @ columns[1:2].T, rtol=1e-9)
    assert np.allclose(products, part @ columns[2:].T, rtol=0, atol=1e-9)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_singular_value_is_bounded_by_all_slices(weight, threads, monkeypatch):
    made, values = weight
    monkeypatch.setattr(stopdown_verify, "THREADS", threads)
    monkeypatch.setattr(stopdown_verify, "POOL", ThreadPoolExecutor(threads))
    largest = float(np.linalg.eigvalsh(values.T @ values)[-1]) ** 0.5

    bound = made.check_sigma(0, len(values), [write_number(largest**2 * 1.02)])

    assert largest <= bound <= largest * 1.02
    with pytest.raises(stopdown_verify.Refused, match="a singular value is larger than stated"):
        made.check_sigma(0, len(values), [write_number(largest**2 * 0.98)])


@pytest.mark.parametrize(("program", "threads"), [("bin/stopdown-verify", "1"), ("script.py", "")])
def test_only_the_program_itself_limits_the_threads_of_a_product(program, threads):
    code = "import sys; sys.argv[0] = sys.argv[1]; import stopdown_verify, os\n" + (
        "print(os.environ.get('OPENBLAS_NUM_THREADS', ''))"
    )
    without = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    source = str(Path(stopdown_verify.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, program], env={**without, "PYTHONPATH": source},
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.strip() == threads
