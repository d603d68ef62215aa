"""Two machines that share no disk: two network namespaces joined by a cable, a folder for each.

Needs root (`ip netns`); without it they are two processes on this machine's loopback. Ranks are
started as Slurm starts them: by variables, without a launcher.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import ROOT, Shards, environment
from safetensors.torch import load_file

from mimkit.ports import free_port

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Machine:
    """How a command is run there, and how others reach it."""

    prefix: tuple[str, ...]
    address: str
    interface: str


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    names, ends = [f"mimkit{os.getpid()}{c}" for c in "ab"], [f"mk{os.getpid()}{c}" for c in "ab"]
    made = list[str]()
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [Machine(("ip", "netns", "exec", name), f"10.77.0.{number}", end)
               for number, (name, end) in enumerate(zip(names, ends, strict=True), 1)]  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        yield [Machine((), "127.0.0.1", "lo")] * 2
    finally:
        for name in made:
            _ip("netns", "del", name)


def _train(machines: list[Machine], folders: list[Path], words: list[str]) -> list[tuple[int, str]]:
    """One rank on each: exit code, and what was said."""
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
              "MASTER_ADDR": machines[0].address, "MASTER_PORT": str(free_port())}  # fmt: skip
    started = [
        subprocess.Popen(
            [*machine.prefix, sys.executable, str(ROOT / "tools" / "pretrain.py"), *words],
            env=environment(shared | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": machine.interface}),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, (machine, folder) in enumerate(zip(machines, folders, strict=True))
    ]
    try:
        said = [one.communicate(timeout=600)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    return [(one.returncode, text) for one, text in zip(started, said, strict=True)]


def _losses(run: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"])
            for line in lines if line["kind"] == "train"]  # fmt: skip


def test_two_machines_train_resume_and_share_nothing_but_a_cable(
    machines: list[Machine], shards: Shards, tiny: list[str], finished_run: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        for split in (shards.train, shards.heldout):
            shutil.copytree(split, folder / split.name)
    words = [*tiny, "data.train=train", f"data.heldout={shards.heldout.name}",
             "data.cache_dir=cache", "engine.runtime=deepspeed", "engine.zero_stage=2",
             "output.dir=run", "output.keep_checkpoints=3"]  # fmt: skip
    for code, said in _train(machines, folders, words):
        assert code == 0, said
    assert not (folders[1] / "run").exists()
    run = folders[0] / "run"

    whole, plain = (load_file(path / "checkpoints/step-00000006/model.safetensors")
                    for path in (run, finished_run))  # fmt: skip
    gaps = {name: float((whole[name].float() - value.float()).abs().max())
            for name, value in plain.items() if not name.startswith("stem")}  # fmt: skip
    assert max(gaps.values()) < 1e-3

    # as if it had been stopped after update 4: the second machine has no checkpoint to read
    lines = _losses(run)
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    for code, said in _train(machines, folders, words):
        assert code == 0, said
    again = load_file(run / "checkpoints/step-00000006/model.safetensors")
    assert [name for name in whole if not whole[name].equal(again[name])] == []
    assert _losses(run) == lines


def test_machines_with_different_images_are_refused(
    machines: list[Machine], shards: Shards, tiny: list[str], tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        shutil.copytree(shards.train, folder / "train")
    next((folders[1] / "train").glob("*-00002.tar")).unlink()
    for manifest in (folders[1] / "train").glob("*.json"):
        manifest.unlink()
    words = [*tiny, "data.train=train/train-*.tar", "data.heldout=null", "data.cache_dir=cache",
             "engine.runtime=deepspeed", "output.dir=run"]  # fmt: skip
    ended = _train(machines, folders, words)
    assert all(code != 0 for code, _ in ended)
    assert "data.train has other images on rank 1" in " ".join(ended[0][1].split())
