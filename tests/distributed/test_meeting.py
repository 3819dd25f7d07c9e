"""Ranks that compare texts on the host: all come, one is slow, one is killed, the store is gone.  Processes without GPUs."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tilelang.distributed.host import Meeting
from tilelang.errors import TileLangError


class Folder:
    """A store whose keys are files of a folder."""

    def __init__(self, path):
        self.path = pathlib.Path(path)

    def _file(self, key):
        return self.path / key.replace("/", "_")

    def set(self, key, text):
        new = self.path / f"new_{os.getpid()}_{key.replace('/', '_')}"
        new.write_text(text)
        new.rename(self._file(key))

    def get(self, key):
        return self._file(key).read_bytes()

    def check(self, keys):
        return all(self._file(k).exists() for k in keys)

    def delete_key(self, key):
        self._file(key).unlink()


RANK = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_meeting import Folder, Meeting
rank, ranks, what = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
meeting = Meeting(Folder(sys.argv[2]), rank, ranks, gone=3.0)
assert meeting.gather(f"{rank}") == [str(r) for r in range(ranks)]
if what == "slow":
    time.sleep(5)
if what == "stuck":
    print("here", flush=True)
    time.sleep(60)
assert meeting.gather("the same") == ["the same"] * ranks
meeting.end()
print("done", flush=True)
"""


def started(folder, *what):
    return [subprocess.Popen([sys.executable, "-c", RANK, os.path.dirname(__file__), str(folder), str(r), str(len(what)), w],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r, w in enumerate(what)]


def test_a_rank_that_is_slow_is_waited_for(tmp_path):
    ended = [p.communicate(timeout=60) for p in started(tmp_path, "", "slow")]
    assert all("done" in out for out, _ in ended), ended


def test_a_killed_rank_ends_the_others_with_its_name(tmp_path):
    ranks = started(tmp_path, "", "stuck", "")
    assert "here" in ranks[1].stdout.readline()
    ranks[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    texts = [p.communicate(timeout=60)[1] for p in ranks]
    assert time.monotonic() - began < 25
    assert all(f"rank {r}: rank 1 is gone; it did not come to the same" in texts[r] for r in (0, 2)), texts
    assert all("error[rank-stopped]" in texts[r] for r in (0, 2))


def test_texts_of_earlier_calls_do_not_stay_in_the_store(tmp_path):
    """Every barrier left a key of each rank."""
    meeting = Meeting(Folder(tmp_path), 0, 1)
    for _ in range(5):
        meeting.gather("barrier()")
    meeting.end()
    assert sorted(p.name.removeprefix("tilelang_ranks_") for p in tmp_path.iterdir()) == ["4_0", "alive_0", "left_0"]


def test_a_store_that_is_gone_is_an_error_with_a_name(tmp_path):
    class Gone(Folder):
        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    meeting = Meeting(Gone(tmp_path), 1, 2)
    try:
        with pytest.raises(TileLangError, match="the store that the ranks share does not answer") as e:
            meeting.gather("x")
        assert e.value.kind == "rank-stopped"
    finally:
        meeting.ended.set()


class Calls:
    """A driver that keeps what it is asked."""

    def __init__(self):
        self.asked = []

    def call(self, name, *args):
        self.asked.append((name, *(a.value for a in args)))


def test_signals_and_waits_on_a_stream(monkeypatch):
    from types import SimpleNamespace

    from tilelang.distributed import streams

    driver = Calls()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setattr(streams, "driver", lambda: driver)
    flag = SimpleNamespace(element_size=lambda: 8, numel=lambda: 1, is_floating_point=lambda: False, device=0, shape=(1,),
                           dtype="int64", data_ptr=lambda: 4096)
    stream = SimpleNamespace(cuda_stream=7)
    streams.set_signal(flag, 3, stream)
    streams.wait_eq(flag, 4, stream)
    streams.wait_eq(flag, 5, stream, compare="ge")
    assert driver.asked == [("cuStreamWriteValue64_v2", 7, 4096, 3, 0), ("cuStreamWaitValue64_v2", 7, 4096, 4, 1),
                            ("cuStreamWaitValue64_v2", 7, 4096, 5, 0)]
    with pytest.raises(TileLangError) as e:
        streams.wait_eq(flag, 5, stream, compare="lt")
    assert e.value.kind == "signal-order"
    flag.numel = lambda: 2
    with pytest.raises(TileLangError, match="an integer of 32 or 64 bits"):
        streams.set_signal(flag, 1, stream)
