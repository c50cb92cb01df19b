"""A Ray cluster of three machines, all of them here, that lose workers and machines."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.runtime.jobs import helpers
from tests.runtime.jobs.helpers import Deadly, Echo, joined
from transferry.runtime.console.progress import estimate
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions, RayOptions
from transferry.runtime.jobs.ray_job import ENVIRONMENT, RAY_LOG, ray_job
from transferry.runtime.jobs.summary import Summary

os.environ.update(ENVIRONMENT)
ray = pytest.importorskip("ray", reason="ray is absent; `make test-all` installs it")
pytestmark = pytest.mark.optional("ray")
ROWS, WITHOUT_BUNDLE = 240, "TRANSFERRY_TEST_WITHOUT_BUNDLE"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two cores on each machine; the third has no bundle, if a job looks for it."""
    from ray.cluster_utils import Cluster

    for module in (sys.modules[__name__], helpers):
        ray.cloudpickle.register_pickle_by_value(module)
    cluster = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    cluster.add_node(num_cpus=2, env_vars={WITHOUT_BUNDLE: "1"})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def sources(tmp_path: Path) -> str:
    """Eight Parquet files of a pattern, with rows that are bad."""
    for place in range(8):
        rows = range(place, ROWS, 8)
        texts = [None if row % 50 == 9 else "" if row % 50 == 10 else f"row {row}" for row in rows]
        texts = ["deadly" if row == 100 else text for row, text in zip(rows, texts, strict=True)]
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), "id": [*rows]})
        pyarrow.parquet.write_table(table, tmp_path / f"{place}.parquet", row_group_size=11)
    return str(tmp_path / "*.parquet")


def options(sources: str) -> tuple[str, Path, JobOptions]:
    return sources, Path(sources).parent / "out.jsonl", JobOptions(chunk_rows=5)


def plain(sources: str) -> bytes:
    source, out, chosen = options(sources)
    job = Job(Echo(), source, out.with_name("plain.jsonl"), chosen)
    job.run()
    return job.output.read_bytes()


def on(cluster: Any, workers: int) -> RayOptions:
    return RayOptions("ray", ray_address=cluster.address, workers=workers)


def once_saved(does: Callable[[], object]) -> Callable[[Summary], None]:
    """Returns a function to watch a job with, which does something after the first chunks."""
    left = [does]

    def watch(summary: Summary) -> None:
        if summary.saved and left:
            left.pop()()

    return watch


def with_bundle() -> Echo:
    if WITHOUT_BUNDLE in os.environ:
        raise InputError("/data/bundle: there is no such bundle")
    return Echo(seconds=0.5)  # until that machine has looked


def test_a_machine_without_the_bundle_is_named(cluster: Any, sources: str) -> None:
    with pytest.raises(InputError, match=r"^the worker on \S+: /data/bundle: there is no such"):
        ray_job(with_bundle, *options(sources), on(cluster, 6)).run()


@pytest.mark.parametrize("address", ["10.0.0.4", "ray://localhost"])
def test_an_address_in_another_form_is_refused(sources: str, address: str) -> None:
    with pytest.raises(InputError, match=f"there is no Ray cluster at {address}: "):
        ray_job(Echo, *options(sources), RayOptions("ray", ray_address=address)).run()


def test_too_few_cpus_are_told_at_once(cluster: Any, sources: str) -> None:
    with pytest.raises(UsageError, match="has room for 6 workers of 1 CPU, not for 7"):
        ray_job(Echo, *options(sources), on(cluster, 7)).run()
    told = str(estimate(ray_job(Echo, *options(sources), on(cluster, 5))))
    where = f"Ray at {cluster.address} on 3 machines: 5 workers of 1 CPU; Ray has "
    assert f"{where}6 of 6 CPUs free" in told
    assert not list(Path(sources).parent.glob("out*"))


def test_a_lost_machine_and_a_lost_worker_change_nothing(
    cluster: Any, sources: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With more workers than the machines that are left have room for."""
    spared, (*_, lost) = tmp_path / "spared", cluster.worker_nodes
    load = partial(Deadly, spared, seconds=0.02)
    job = ray_job(load, *options(sources), on(cluster, 6))
    summary = job.run(once_saved(lost.kill_raylet))
    assert spared.exists(), "no worker was killed"
    assert not lost.any_processes_alive()
    assert (summary.rows, summary.bad_rows) == (ROWS, 10)
    assert joined(job.output) == plain(sources)
    assert "".join(capfd.readouterr()) == "", "Ray's own lines go to a log"


def test_without_ray_on_its_machine_the_command_ends(
    cluster: Any, sources: str, tmp_path: Path
) -> None:
    """It can be run again, also with another Ray."""
    # So slowly that rows are left when it looks for Ray again, on a fast machine too.
    job = ray_job(partial(Deadly, tmp_path, seconds=0.5), *options(sources), on(cluster, 2))
    said = list[str]()
    with pytest.raises(InputError, match=r"Ray has ended on the machine.*rows are saved in"):
        job.run(once_saved(cluster.head_node.kill_raylet))
    assert "Raylet is terminated" in (job.folder / RAY_LOG).read_text()
    load, local = partial(Deadly, tmp_path), RayOptions("ray", ray_address="local", workers=2)
    again = ray_job(load, *options(sources), local)
    assert again.run(say=said.append).resumed == 1
    assert "rows are saved in" in said[0]
    assert joined(again.output) == plain(sources)
