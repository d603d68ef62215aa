"""The cache: bounded, shared by processes and threads, resumed after a kill."""

import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shard_server import PIECE, Gate, ShardServer, answer, make_cache, serving

from mimkit.data.remote.cache import ShardCache
from mimkit.data.remote.catalogue import RemoteTar, open_remote
from mimkit.data.remote.locks import FolderLocks, locks_in
from mimkit.data.remote.space import Space, part_path
from mimkit.data.tars import OpenTars
from mimkit.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
NAMES = [f"train-{number:05d}.tar" for number in range(3)]
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def server(shard_folder: Path) -> Iterator[ShardServer]:
    with serving(shard_folder) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def open_all(server: ShardServer, cache: ShardCache) -> list[RemoteTar]:
    return [tar for tar, _ in open_remote([server.url(name) for name in NAMES], cache=cache)]


def sizes(server: ShardServer) -> list[int]:
    return [(server.folder / name).stat().st_size for name in NAMES]


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def read(tar: RemoteTar) -> bytes:
    descriptor = tar.open()
    try:
        return content(descriptor)
    finally:
        os.close(descriptor)


def used(folder: Path) -> int:
    kept = [path for path in folder.iterdir() if path.suffix in (".tar", ".part")]
    return sum(path.stat().st_size for path in kept)


def cached(tars: list[RemoteTar]) -> list[bool]:
    return [tar.cache.path(tar.shard).exists() for tar in tars]


def pieces(server: ShardServer, name: str) -> list[int]:
    return list(range(0, (server.folder / name).stat().st_size, PIECE))


def test_the_longest_unused_makes_room_and_the_bound_holds_at_every_moment(
    server: ShardServer, folder: Path
) -> None:
    limit = sum(sizes(server)) - 1
    tars = open_all(server, make_cache(folder, limit=limit))
    seen = []

    def measure(handler, sent: bytes) -> None:
        seen.append(used(folder))
        answer(handler, sent)

    server.faults.extend([measure] * 1000)
    for number in (0, 1, 0):
        read(tars[number])
    assert cached(tars) == [True, True, False]
    read(tars[2])
    assert cached(tars) == [True, False, True]
    for number in (1, 2, 0, 0, 2, 1, 0):
        assert read(tars[number]) == (server.folder / NAMES[number]).read_bytes()
    assert max(seen) <= limit and used(folder) <= limit
    assert len(seen) > sum(len(pieces(server, name)) for name in NAMES)  # some came again


def test_what_is_open_is_read_on_after_it_was_evicted(server: ShardServer, folder: Path) -> None:
    tars = open_all(server, make_cache(folder, limit=max(sizes(server))))
    held = OpenTars()
    first = held.open(0, tars[0], most=64)
    tars[1].bring_near(again=False)
    assert cached(tars) == [False, True, False]
    assert content(first) == (server.folder / NAMES[0]).read_bytes()
    assert os.fstat(first).st_nlink == 0
    second = held.open(1, tars[1], most=64)
    with pytest.raises(OSError, match="Bad file descriptor"):  # or the disk would stay full
        os.fstat(first)
    assert held.open(1, tars[1], most=64) == second


def test_a_cache_that_cannot_hold_a_shard_is_refused(server: ShardServer, folder: Path) -> None:
    largest = max(sizes(server))
    with pytest.raises(
        UserError, match=r"too small: .* by the largest shard alone.*data\.cache_gib"
    ):
        open_all(server, make_cache(folder, limit=largest - 1))
    assert server.gets == []
    assert len(open_all(server, make_cache(folder, limit=largest))) == 3


def test_the_room_is_what_the_disk_has_where_that_is_less(
    server: ShardServer, folder: Path
) -> None:
    cache = make_cache(folder)
    free = sizes(server)[0] + 5

    def left(_: Path) -> int:
        return free - used(folder)

    small = replace(cache, space=Space(folder=folder, limit=None, free=left))
    with pytest.raises(UserError, match=r"too small.*data\.cache_gib=null, and what its disk has"):
        open_all(server, small)
    tars = [replace(tar, cache=small) for tar in open_all(server, cache)]
    read(tars[0])
    read(tars[1])
    assert cached(tars) == [False, True, False]
    with pytest.raises(UserError, match=r"is full: \d+ bytes of a shard.*data\.cache_dir"):
        read(tars[2])
    assert used(folder) == 0


def test_a_disk_that_fills_up_on_the_way(server: ShardServer, folder: Path) -> None:
    """A limit of the process stands for the disk; the error number is its own, the path is one."""
    tars = open_all(server, make_cache(folder))

    def fetch() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE + 100, PIECE + 100))
        read(tars[0])

    message = fails_in_a_fork(fetch)
    assert "cannot write" in message and "nothing half-written was left" in message
    assert "data.cache_gib" in message
    assert used(folder) == 0


def fails_in_a_fork(action: Callable[[], object]) -> str:
    """The message of the UserError that `action` raises in a process of its own."""
    reader, writer = FORK.Pipe(duplex=False)

    def work() -> None:
        try:
            action()
        except UserError as error:
            writer.send(str(error))
        else:
            writer.send("")

    process = FORK.Process(target=work)
    process.start()
    message = reader.recv()
    process.join()
    return message


def test_a_part_that_a_dead_process_left_makes_room_too(server: ShardServer, folder: Path) -> None:
    tars = open_all(server, make_cache(folder, limit=sizes(server)[2]))
    left = folder / "old.tar.100000.part"
    left.write_bytes(bytes(1000))
    assert read(tars[2]) == (server.folder / NAMES[2]).read_bytes()
    assert not left.exists()


def test_who_finds_all_the_room_in_use_waits_for_it(server: ShardServer, folder: Path) -> None:
    cache = make_cache(folder, limit=max(sizes(server)))
    gate = Gate()

    def wait(_: float) -> None:  # the other one is fetching: now it may end
        gate.release.set()

    cache = replace(cache, space=replace(cache.space, sleep=wait))
    tars = open_all(server, cache)
    server.faults.append(gate)
    found = {}
    other = threading.Thread(target=lambda: found.update({0: read(tars[0])}))
    other.start()
    assert gate.reached.wait(60)
    assert read(tars[1]) == (server.folder / NAMES[1]).read_bytes()
    other.join()
    assert gate.release.is_set()
    assert found[0] == (server.folder / NAMES[0]).read_bytes()
    assert cached(tars) == [False, True, False]


def test_two_that_were_begun_and_do_not_fit_together_do_not_wait_for_ever(folder: Path) -> None:
    folder.mkdir()
    space = Space(folder=folder, limit=150, sleep=lambda _: time.sleep(0.01))
    shards = [folder / "a.tar", folder / "b.tar"]
    for shard in shards:
        part_path(shard, 100).write_bytes(bytes(10))
    both_hold, done = threading.Barrier(2), []

    def fetch(shard: Path) -> None:
        with locks_in(folder).hold(shard.name):
            both_hold.wait(60)
            part = space.set_aside(shard, 100)
            part.write_bytes(bytes(100))
            space.complete(part, shard)
            done.append(shard)

    threads = [threading.Thread(target=fetch, args=(shard,), daemon=True) for shard in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == shards
    assert [shard.exists() for shard in done] == [False, True]
    assert used(folder) == 100


def test_threads_fetch_a_shard_once(server: ShardServer, folder: Path) -> None:
    tars = open_all(server, make_cache(folder))
    gate, found = Gate(), []
    server.faults.append(gate)
    threads = [threading.Thread(target=lambda: found.append(read(tars[0]))) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert gate.reached.wait(60)
    gate.release.set()
    for thread in threads:
        thread.join()
    assert found == [(server.folder / NAMES[0]).read_bytes()] * 6
    assert server.starts(NAMES[0]) == pieces(server, NAMES[0])


def test_threads_that_wait_for_each_others_processes_are_no_deadlock(folder: Path) -> None:
    """Two processes hold a lock each, and another thread of each waits for the other's."""
    folder.mkdir()
    both_hold, both_got = FORK.Barrier(2), FORK.Barrier(2)
    got = FORK.Queue()

    def work(mine: str, other: str) -> None:
        locks = FolderLocks(folder)

        def wait() -> None:
            with locks.hold(other):
                got.put(other)

        with locks.hold(mine):
            both_hold.wait(60)
            waiting = threading.Thread(target=wait)
            waiting.start()
            waiting.join(0.2)  # long enough for both to wait, as a rule
        waiting.join()
        both_got.wait(60)

    processes = [FORK.Process(target=work, args=names) for names in ("ab", "ba")]
    for process in processes:
        process.start()
    assert sorted(got.get(timeout=60) for _ in processes) == ["a", "b"]
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_processes_fetch_each_shard_once(server: ShardServer, folder: Path) -> None:
    """Each on its own from the addresses on, and with the same shard at the same time."""
    for name in NAMES:  # so that the shards are needed for their indexes
        (server.folder / f"{name}.index.npz").unlink()
    gate = Gate()
    server.faults.append(gate)
    ready, results = FORK.Barrier(3), FORK.Queue()

    def work() -> None:
        ready.wait(60)
        tars = open_all(server, make_cache(folder))
        results.put([read(tar) for tar in tars])

    processes = [FORK.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    assert gate.reached.wait(60)
    gate.release.set()
    expected = [(server.folder / name).read_bytes() for name in NAMES]
    assert [results.get(timeout=60) for _ in processes] == [expected] * 3
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for name in NAMES:
        assert server.starts(name) == pieces(server, name)


def test_kill_in_the_middle_and_start_again(server: ShardServer, folder: Path) -> None:
    cache = make_cache(folder)
    tars = open_all(server, cache)
    gate = Gate()
    server.faults.extend([None, None, gate])
    process = FORK.Process(target=lambda: read(tars[0]))
    process.start()
    assert gate.reached.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert cached(tars) == [False] * 3 and used(folder) == 2 * PIECE
    assert read(tars[0]) == (server.folder / NAMES[0]).read_bytes()
    first, second, third, *rest = pieces(server, NAMES[0])
    assert server.starts(NAMES[0]) == [first, second, third, third, *rest]
    assert used(folder) == sizes(server)[0]
    gate.release.set()


def test_who_waits_goes_on_when_the_fetching_process_is_killed(
    server: ShardServer, folder: Path
) -> None:
    """And when that had forked a loader process in the meantime, which lives on."""
    tars = open_all(server, make_cache(folder))
    gate, found = Gate(), []
    server.faults.extend([None, gate])
    fork_now, (reader, writer) = FORK.Event(), FORK.Pipe(duplex=False)

    def fetch_and_fork() -> None:
        threading.Thread(target=lambda: read(tars[0]), daemon=True).start()
        fork_now.wait(60)
        child = os.fork()
        if child:
            writer.send(child)
        signal.pause()

    fetching = FORK.Process(target=fetch_and_fork)
    fetching.start()
    assert gate.reached.wait(60)
    fork_now.set()
    loader = reader.recv()
    waiting = threading.Thread(target=lambda: found.append(read(tars[0])), daemon=True)
    waiting.start()
    fetching.kill()
    waiting.join(20)
    os.kill(loader, signal.SIGKILL)
    assert found == [(server.folder / NAMES[0]).read_bytes()]
    assert server.starts(NAMES[0])[:3] == [0, PIECE, PIECE]
    fetching.join()
    gate.release.set()


def test_a_shard_that_was_replaced_is_fetched_anew(server: ShardServer, folder: Path) -> None:
    cache = make_cache(folder)
    old = open_all(server, cache)[0]
    read(old)
    again = open_all(server, cache)[0]
    assert again == old
    read(again)
    assert server.starts(NAMES[0]) == pieces(server, NAMES[0])
    server.versions[NAMES[0]] = "another"  # the same bytes: only the version tells
    new = open_all(server, cache)[0]
    assert new.shard.file.version == '"another"' and new != old
    read(new)
    assert server.starts(NAMES[0]) == pieces(server, NAMES[0]) * 2


def test_a_tar_in_the_cache_that_somebody_cut_is_fetched_anew(
    server: ShardServer, folder: Path
) -> None:
    tar = open_all(server, make_cache(folder))[0]
    read(tar)
    os.truncate(tar.cache.path(tar.shard), 100)
    assert read(tar) == (server.folder / NAMES[0]).read_bytes()
    assert server.starts(NAMES[0]) == pieces(server, NAMES[0]) * 2


def test_equal_names_in_other_folders_are_other_shards(server: ShardServer, folder: Path) -> None:
    """WebDataset's cache takes the bare name, and gives one for the other."""
    (server.folder / "val").mkdir()
    one, other = server.folder / NAMES[0], server.folder / "val" / NAMES[0]
    content = bytearray(one.read_bytes())
    content[2000] ^= 1  # somewhere in the first image: the same size, and the same version
    other.write_bytes(content)
    server.versions[NAMES[0]] = "1"
    urls = [server.url(NAMES[0]), server.url(f"val/{NAMES[0]}")]
    tars = [tar for tar, _ in open_remote(urls, cache=make_cache(folder))]
    assert tars[0].shard.file == replace(tars[1].shard.file, url=urls[0])
    assert [read(tar) for tar in tars] == [one.read_bytes(), bytes(content)]
