"""`stopdown batch` on several workers: processes of this machine and Ray, undisturbed and under fire."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from processes.batch_kills import Kills, Watched, ended, start
from stopdown.app.batch_command import BatchOptions, batch
from stopdown.app.display import Display
from stopdown.batch.records import BatchRecord
from stopdown.errors import InputError, OptionError, StopdownError
from stopdown.records import from_json

SIZES = ("--frames", "9", "--height", "32", "--width", "32", "--steps", "1", "--precision", "fp32")
SHAPES = ("--steps", "2", "--precision", "fp32")

pytestmark = pytest.mark.timeout(900)


def write_prompts(folder: Path, count: int) -> Path:
    path = folder / "prompts.txt"
    colours = ("red", "blue", "green", "yellow", "white")
    shapes = ("circle", "square", "triangle", "star")
    ways = ("left", "right", "up", "down")
    lines = [f"a {c} {s} moving {w}" for w in ways for s in shapes for c in colours]
    path.write_text("\n".join(lines[:count]) + "\n")
    return path


def make_alone(folder: Path, source: str, prompts: Path, *words: str) -> dict[str, bytes]:
    """What one process makes, by name."""
    process = start(
        folder / "alone.log", source, "--prompts", prompts, "-o", folder / "alone", *words
    )
    with ended(process):
        assert process.wait(600) == 0, (folder / "alone.log").read_text()
    return {path.name: path.read_bytes() for path in (folder / "alone").glob("*.mp4")}


@pytest.fixture(scope="module")
def undisturbed(
    save_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What this process makes of six prompts of the tiny pipeline, by name."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sizes: dict[str, Any] = {"frames": 9, "height": 32, "width": 32, "steps": 1}
    source, prompts = str(save_tiny("cogvideox", "fp32")), str(write_prompts(folder, 6))
    batch(BatchOptions(source, prompts, str(folder / "out"), precision="fp32", **sizes), Display())
    return {path.name: path.read_bytes() for path in (folder / "out").glob("*.mp4")}


def read_summary(folder: Path) -> BatchRecord:
    return from_json((folder / "batch.json").read_bytes(), BatchRecord)


@pytest.fixture
def tiny(save_tiny: Callable[..., Path]) -> str:
    return str(save_tiny("cogvideox", "fp32"))


def run_killed(
    folder: Path, source: str, kills: Kills, prompts: Path, expected: dict[str, bytes], *words: str
) -> BatchRecord:
    """A batch to its end, as often as it takes for all kills; the last summary."""
    for number in range(100):
        out = folder / f"out{number}"
        given = (source, "--prompts", prompts, "-o", out, *words)
        code = kills.run(
            lambda given=given: start(folder / "log", *given), watched := Watched(out, expected)
        )  # type: ignore[misc]
        assert code == 0, (folder / "log").read_text()
        assert watched.look() == len(expected)
        assert {x.name for x in out.glob("*.mp4")} == set(expected)
        assert not list(out.glob(".stopdown-*")), "a temporary file was left"
        record = read_summary(out)
        assert (record.failed, record.made + record.skipped) == (0, len(expected))
        if not kills.left:
            return record
    raise AssertionError("the kills were never used up")


def test_processes_survive_kills(tiny: str, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """Two processes; three kills of workers and drivers: each item once, with one process's bytes."""
    prompts, expected = write_prompts(tmp_path, 6), undisturbed
    kills = Kills(3, seed=2)
    words = (*SIZES, "--workers", "2", "--tries", "9")
    record = run_killed(tmp_path, tiny, kills, prompts, expected, *words)
    assert sum(kills.done.values()) == 3
    assert len(record.items) == 6


def test_an_item_that_kills_its_workers_fails(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's death is retried up to --tries; then it is the item's result, and the rest is made."""
    from stopdown.batch import dispatch
    from stopdown.batch.pools import InProcess

    wait = InProcess.wait

    def die(pool: Any) -> Any:
        if pool._given and "blue" in pool._given[0].request.prompt:
            pool._given = None
            return [(0, "Worker 0 ended with SIGKILL.")]
        return wait(pool)

    monkeypatch.setattr(InProcess, "wait", die)
    prompts = write_prompts(tmp_path, 3)
    options = BatchOptions(
        tiny,
        str(prompts),
        str(tmp_path / "out"),
        precision="fp32",
        **{"steps": 1, "frames": 9, "height": 32, "width": 32, "tries": 2},
    )
    record = batch(options, Display())
    assert [x.status for x in record.items] == ["made", "failed", "made"]
    failed = record.items[1]
    assert failed.tries == 2
    assert failed.error == ("Each of 2 workers that tried it died. Worker 0 ended with SIGKILL.")
    monkeypatch.setattr(dispatch, "MOST_DEATHS", 2)
    with pytest.raises(StopdownError, match="2 workers died one after the other"):
        batch(BatchOptions(**{**vars(options), "tries": 9}), Display())


def test_a_worker_whose_files_do_not_come_is_refused(tmp_path: Path) -> None:
    """An output that is not writable from every worker is found before the first item."""
    from stopdown.batch.stores import check_probe, open_store, write_probe

    here, there = open_store(str(tmp_path / "here")), open_store(str(tmp_path / "there"))
    here.check()
    there.check()
    check_probe(here, write_probe(here), "Worker 0")
    assert here.list_names() == set()
    with pytest.raises(InputError, match=r"Worker 1 wrote into .*here, and nothing came here"):
        check_probe(here, write_probe(there), "Worker 1")


@pytest.mark.parametrize("kind", ["folder", "url"])
def test_a_probe_that_nobody_looked_for_is_swept(kind: str, tmp_path: Path) -> None:
    """A worker or driver that was killed in between leaves one; items and their records stay."""
    from stopdown.batch.stores import open_store, write_probe

    store = open_store(str(tmp_path) if kind == "folder" else f"local://{tmp_path}")
    store.write("a.mp4", b"whole")
    write_probe(store)
    store.sweep()
    assert store.list_names() == {"a.mp4"}


def test_memory_of_one_process_is_no_place_for_two(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs into `memory://` by another process: it has a memory of its own, which is found at once."""
    from stopdown.batch.pools import Processes

    begin = Processes.__init__

    def begin_one(self: Processes, job: Any, devices: list[str], store: Any) -> None:
        begin(self, job, devices[:1], store)  # the second would only be told the same

    monkeypatch.setattr(Processes, "__init__", begin_one)
    options = BatchOptions(
        tiny, str(write_prompts(tmp_path, 2)), "memory://nowhere", precision="fp32", workers=2
    )
    with pytest.raises(
        InputError, match=r"Worker \d wrote into memory://nowhere, and nothing came"
    ):
        batch(options, Display())


# Ray


def test_ray_is_named_where_it_is_missing(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--ray without Ray says what to install."""
    monkeypatch.setitem(sys.modules, "ray", None)
    options = BatchOptions(tiny, str(write_prompts(tmp_path, 1)), str(tmp_path / "o"), ray="local")
    with pytest.raises(OptionError, match=r"Install it: pip install 'stopdown\[ray\]'"):
        batch(options, Display())


@pytest.mark.slow
def test_ray_makes_the_same(tiny: str, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """Two workers of a local Ray: each item once, with the bytes of one process; again: nothing."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'stopdown[ray]'")
    prompts, expected = write_prompts(tmp_path, 6), undisturbed
    words = (tiny, "--prompts", prompts, "-o", tmp_path / "out", *SIZES, "--ray", "local")
    process = start(tmp_path / "log", *words, "--workers", "2")
    with ended(process):
        assert process.wait(300) == 0, (tmp_path / "log").read_text()
    assert Watched(tmp_path / "out", expected).look() == 6
    record = read_summary(tmp_path / "out")
    assert (record.made, len(record.workers)) == (6, 2)


def test_a_cluster_that_is_not_there(
    tiny: str, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """An address where nobody answers: one message, exit 2, nothing made."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'stopdown[ray]'")
    prompts = write_prompts(tmp_path, 1)
    words = ("--prompts", prompts, "-o", tmp_path / "out", *SIZES, "--ray", "127.0.0.1:9")
    code, _, said = run("batch", tiny, *words)
    assert code == 2, said
    assert "There is no Ray cluster at 127.0.0.1:9" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "out").glob("*.mp4*"))


def test_versions_of_machines_are_compared() -> None:
    """A machine without the package or with another version is refused by name; an equal one is not."""
    from stopdown.ray_pool.actors import _compare_versions

    here = {"stopdown": "0.1.0", "torch": "2.13.0+cpu"}
    _compare_versions("node", here, {"stopdown": "0.1.0", "torch": "2.13.0"})
    with pytest.raises(InputError, match=r"The machine node of the Ray cluster has no stopdown\."):
        _compare_versions("node", here, {"stopdown": None, "torch": "2.13.0"})
    with pytest.raises(InputError, match=r"has stopdown 0\.0\.9 \(here 0\.1\.0\)"):
        _compare_versions("node", here, {"stopdown": "0.0.9", "torch": "2.13.0"})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of two machines with a CPU each, simulated by processes of this one."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'stopdown[ray]'")
    from ray.cluster_utils import Cluster

    size = 80 * 2**20
    head = {"num_cpus": 0, "object_store_memory": size, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=size)
        yield made
    finally:
        made.shutdown()


@pytest.mark.slow
def test_a_machine_with_another_version_is_refused(cluster: Any, tiny: str, tmp_path: Path) -> None:
    """A machine whose Stopdown is another version, or is not there, is named before the first item."""
    other = tmp_path / "other" / "stopdown-0.0.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: stopdown\nVersion: 0.0.9\n")
    lacking = tmp_path / "lacking" / "stopdown"
    lacking.mkdir(parents=True)
    (lacking / "__init__.py").write_text("raise ImportError('gone')\n")
    prompts = write_prompts(tmp_path, 1)
    words = (tiny, "--prompts", prompts, "-o", tmp_path / "out", *SIZES)
    for folder, said in (("other", "has stopdown 0.0.9 (here "), ("lacking", "has no stopdown")):
        node = cluster.add_node(
            num_cpus=1,
            object_store_memory=80 * 2**20,
            env_vars={"PYTHONPATH": str(tmp_path / folder)},
        )
        try:
            process = start(tmp_path / folder / "log", *words, "--ray", cluster.address)
            with ended(process):
                assert process.wait(240) == 2
        finally:
            cluster.remove_node(node, allow_graceful=False)
        text = (tmp_path / folder / "log").read_text()
        assert said in text
        assert "Traceback" not in text


@pytest.mark.slow
def test_the_page_s_example_runs(tmp_path: Path) -> None:
    """The Python blocks of docs/batch.md, those for Ray Data and actors too, run as they stand."""
    pytest.importorskip("pyarrow", reason="Ray Data is not installed: pip install 'stopdown[ray]'")
    page = (Path(__file__).parents[2] / "docs" / "batch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        command = [sys.executable, "-c", block]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "made" in done.stdout
    assert len(list((tmp_path / "made").glob("*.mp4"))) == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_forty_prompts_and_fifty_kills(cluster: Any, tmp_path: Path) -> None:
    """`shapes`, 40 prompts: one process, local Ray and a cluster of two machines give the same bits, and
    50 kills of workers, machines and drivers lose nothing, make nothing twice, leave nothing half."""
    size = 80 * 2**20
    prompts = write_prompts(tmp_path, 40)
    expected = make_alone(tmp_path, "shapes", prompts, *SHAPES)
    assert len(expected) == 40
    for name, address in (("local", "local"), ("cluster", cluster.address)):
        words = ("shapes", "--prompts", prompts, "-o", tmp_path / name, *SHAPES, "--ray", address)
        process = start(tmp_path / f"{name}.log", *words, "--workers", "2")
        with ended(process):
            assert process.wait(900) == 0, (tmp_path / f"{name}.log").read_text()
        assert Watched(tmp_path / name, expected).look() == 40
        record = read_summary(tmp_path / name)
        assert (record.made, record.skipped, len(record.workers)) == (40, 0, 2)

    def replace_node() -> None:
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        cluster.add_node(num_cpus=1, object_store_memory=size)

    words = (*SHAPES, "--tries", "50")
    found = {}
    for name, kills, where in (
        ("processes", Kills(30, seed=1), ("--workers", "2")),
        ("cluster", Kills(20, seed=2, nodes=replace_node), ("--ray", cluster.address)),
    ):
        folder = tmp_path / f"kills-{name}"
        folder.mkdir()
        run_killed(folder, "shapes", kills, prompts, expected, *words, *where)
        found[name] = dict(kills.done)
    (tmp_path / "kills.json").write_text(json.dumps(found))
    assert sum(sum(x.values()) for x in found.values()) == 50
    assert found["cluster"].get("node", 0) > 0
