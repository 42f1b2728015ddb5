"""OpenVINO as a reader: graphs of a folder compiled for f32 and for f16, and what of that was executed.

Needs openvino and numpy alone, so it also runs where torch does not: on a processor that has fp16, or on
one that is emulated. Each NAME.xml takes its inputs from the part of its name before the first dot, with
`.npz`, and gives NAME.f32.npy and NAME.f16.npy; the last line of standard output is a record as JSON.

    python tests/readers/openvino_reader.py FOLDER
"""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13

TERMS = (16, 64, 256, 1024, 4096)
"""Lengths of the sums that are compared with numpy's fp16."""

CORE = openvino.Core()


def compile_graph(graph: Any, precision: str) -> Any:
    options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 1}
    return CORE.compile_model(graph, "CPU", options)


def count_nodes(compiled: Any) -> dict[str, dict[str, int]]:
    """Nodes that compute: by the precision that they are executed in, and by kernel."""
    passive = {"Const", "Input", "Output", "Reshape", "Reorder", "Convert"}
    nodes: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ordered_ops():
        known = node.get_rt_info()
        if known["layerType"].astype(str) not in passive:
            nodes[known["runtimePrecision"].astype(str)] += 1
            kernels[known["primitiveType"].astype(str)] += 1
    return {"nodes": dict(nodes), "kernels": dict(kernels)}


def run_small(make: Any, arrays: Sequence[np.ndarray], precision: str) -> np.ndarray:
    """What a graph of one operation gives for fp16 arrays."""
    given = [opset13.parameter(list(x.shape), openvino.Type.f32) for x in arrays]
    graph = openvino.Model([make(*given)], given, "small")
    made = compile_graph(graph, precision)([x.astype(np.float32) for x in arrays])
    return np.array(made[0])


def sum_after_each(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """A product of fp16 matrices whose sums are rounded to fp16 after every term, in their order."""
    total = np.zeros((len(left), right.shape[1]), np.float16)
    for term in range(left.shape[1]):
        exact = total + left[:, term, None].astype(np.float64) * right[term].astype(np.float64)
        total = exact.astype(np.float16)
    return total


def probe() -> dict[str, Any]:
    """What f16 does here: overflow, single operations beside numpy's, and how sums are rounded."""
    draw = np.random.default_rng(0)
    large = np.full((1, 8), 2.0**12, np.float16)
    overflow = {
        x: bool(np.isinf(run_small(opset13.multiply, [large, large], x)).all())
        for x in ("f32", "f16")
    }
    pair = [draw.standard_normal((16, 64)).astype(np.float16) for _ in range(2)]
    same = {
        name: bool(np.array_equal(run_small(make, pair, "f16"), known(*pair).astype(np.float32)))
        for name, make, known in (
            ("add", opset13.add, np.add),
            ("multiply", opset13.multiply, np.multiply),
        )
    }
    products = {}
    for terms in TERMS:
        left = draw.standard_normal((16, terms)).astype(np.float16)
        right = (draw.standard_normal((terms, 32)) / np.sqrt(terms)).astype(np.float16)
        exact = left.astype(np.float64) @ right.astype(np.float64)
        found = run_small(lambda a, b: opset13.matmul(a, b, False, False), [left, right], "f16")
        products[terms] = {
            "rel_err": float(np.linalg.norm(found - exact) / np.linalg.norm(exact)),
            "rounded_once": float(
                np.linalg.norm(exact.astype(np.float16) - exact) / np.linalg.norm(exact)
            ),
            "as_rounded_after_each": float(np.mean(found == sum_after_each(left, right))),
        }
    return {"overflow": overflow, "same_as_numpy": same, "products": products}


def main(folder: Path) -> None:
    graphs: dict[str, Any] = {}
    for path in sorted(folder.glob("*.xml")):
        given = dict(np.load(folder / f"{path.name.split('.')[0]}.npz"))
        for precision in ("f32", "f16"):
            compiled = compile_graph(path, precision)
            np.save(folder / f"{path.stem}.{precision}.npy", compiled(given)[0])
            graphs.setdefault(path.stem, {})[precision] = {
                "compiled_for": compiled.get_property("INFERENCE_PRECISION_HINT").to_string(),
                **count_nodes(compiled),
            }
    record = {
        "openvino": openvino.__version__,
        "machine": platform.machine(),
        "capabilities": CORE.get_property("CPU", "OPTIMIZATION_CAPABILITIES"),
        "probe": probe(),
        "graphs": graphs,
    }
    sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
