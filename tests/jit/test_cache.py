"""Memory and disk cache: content-addressed, whole or absent, rebuilt when damaged, one good entry from many writers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernels import scale_program

import tilelang
from tilelang.env import env
from tilelang.jit import kernel as kernel_module
from tilelang.jit import building, kernel_cache
from tilelang.jit.requests import make_request
from tilelang.runtime.cache import DiskCache, Entry, remove_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(tmp_path):
    with env.using(TILELANG_CACHE_DIR=str(tmp_path)):
        kernel_module.clear_memory()
        yield
    kernel_module.clear_memory()


def build(**kwargs):
    return tilelang.compile(scale_program(**kwargs), out_idx=[1], target="cpu")


def check(kernel):
    assert (kernel(np.ones((4, 8), np.float32)) == 2).all()


def folders():
    return [p for p in kernel_cache.disk.root.iterdir() if p.name != ".staging"]


def test_equal_programs_share_a_kernel_in_memory_and_an_entry_on_disk(monkeypatch):
    first = build()
    assert build() is first and len(folders()) == 1
    kernel_module.clear_memory()
    monkeypatch.setattr(building, "build", lambda request: pytest.fail("compiled again"))
    again = build()
    assert again is not first and again.get_kernel_source() == first.get_kernel_source()
    check(again)


def test_what_an_artifact_depends_on_is_in_the_key(monkeypatch):

    program = scale_program()
    base = dict(func=program, out_idx=[1], target="cpu")
    keys = {kernel_cache.cache_key(make_request(**{**base, **change})) for change in (
        {}, {"func": scale_program(5)}, {"func": scale_program(factor=3.0)}, {"out_idx": None},
        {"target": {"kind": "cuda", "arch": "sm_80"}}, {"target": {"kind": "cuda", "arch": "sm_90"}},
        {"compile_flags": "-x"}, {"pass_configs": {"tl.enable_fast_math": True}})}
    assert len(keys) == 8
    assert kernel_cache.cache_key(make_request(**base)) in keys
    monkeypatch.setattr(kernel_cache, "compiler_stamp", lambda: "another compiler")
    assert kernel_cache.cache_key(make_request(**base)) not in keys


def test_entries_hold_json_and_binaries_only():
    build()
    names = sorted(p.name for p in folders()[0].iterdir())
    assert names == ["device_kernel.ll", "host.o", "host_kernel.ll", "kernel.o", "manifest.json"]
    json.loads((folders()[0] / "manifest.json").read_text())


@pytest.mark.parametrize("what", ["a file", "a folder as manifest", "nothing in it"])
def test_what_is_no_entry_does_not_stay_in_its_place(what):
    build()
    folder = folders()[0]
    remove_folder(folder)
    if what == "a file":
        folder.write_bytes(b"?")
    else:
        (folder / "manifest.json" if what == "a folder as manifest" else folder).mkdir(parents=True)
    kernel_module.clear_memory()
    check(build())
    assert (folder / "kernel.o").is_file() and not list(kernel_cache.disk.staging.iterdir())


def test_an_empty_cache_folder_in_the_environment_is_none(monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", "")
    env.forget("TILELANG_CACHE_DIR")
    assert env.TILELANG_CACHE_DIR == os.path.expanduser("~/.tilelang/cache")


@pytest.mark.parametrize("file", ["kernel.o", "host.o", "manifest.json", "device_kernel.ll"])
@pytest.mark.parametrize("how", ["truncate", "flip", "empty", "remove", "append"])
def test_a_damaged_entry_is_rebuilt(file, how):
    build()
    path = folders()[0] / file
    data = path.read_bytes()
    middle = len(data) // 2
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes({"truncate": data[:middle], "empty": b"", "append": data + b"x",
                          "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1:]}[how])
    kernel_module.clear_memory()
    check(build())
    kernel_module.clear_memory()
    key = folders()[0].name
    assert kernel_cache.disk.load(key) is not None


def test_a_foreign_entry_is_rebuilt():
    build()
    build(factor=3.0)
    a, b = folders()
    os.rename(a, a.with_name("aside"))
    os.rename(b, a)  # whole, but of another program
    kernel_module.clear_memory()
    check(build())
    assert (build(factor=3.0)(np.ones((4, 8), np.float32)) == 3).all()


def test_a_manifest_naming_files_elsewhere_is_refused(tmp_path):
    cache = DiskCache("kernels")
    cache.store("k", Entry({"a": 1}, {"x": b"1"}))
    assert cache.load("k") == Entry({"a": 1}, {"x": b"1"})
    path = cache.path("k") / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("digest")
    manifest["files"] = {"../x": manifest["files"]["x"]}
    from tilelang.runtime.cache import digest

    manifest["digest"] = digest([manifest])
    path.write_text(json.dumps(manifest))
    assert cache.load("k") is None and not cache.path("k").exists()


def test_an_unwritable_cache_never_stops_a_compilation(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with env.using(TILELANG_CACHE_DIR=str(blocked)):
        check(build())


@pytest.mark.spec("R9:TILELANG_DISABLE_CACHE")
def test_switching_the_cache_off(monkeypatch):
    tilelang.disable_cache()
    try:
        assert not tilelang.is_cache_enabled()
        assert build() is not build()
        assert not kernel_cache.disk.root.exists()
    finally:
        tilelang.enable_cache()
    assert build() is build()
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    assert not tilelang.is_cache_enabled() and build() is not build()


def test_clearing_and_the_cache_object():
    from tilelang.cache import cached, clear_cache
    from tilelang.cache.kernel_cache import KernelCache

    kernel = cached(scale_program(), [1], target="cpu")
    assert kernel is build() and KernelCache() is KernelCache()
    clear_cache()
    assert not kernel_cache.disk.root.exists() and build() is not kernel


def test_stale_staging_is_swept(tmp_path):
    cache = DiskCache("kernels")
    old, new = cache.staging / "1-old", cache.staging / "2-new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (0, 0))
    cache.store("k", Entry({}, {}))
    assert not old.exists() and new.exists()


WRITER = """
import sys, numpy as np
sys.path.insert(0, sys.argv[1])
from kernels import scale_program
import tilelang
k = tilelang.compile(scale_program(), out_idx=[1], target="cpu")
assert (k(np.ones((4, 8), np.float32)) == 2).all()
"""


def test_sixteen_writers_at_once_leave_one_good_entry(tmp_path):
    """The writes race, in threads of this process and in two more processes; each gets a right kernel."""
    import threading

    child = {**os.environ, "TILELANG_CACHE_DIR": str(tmp_path), "TILELANG_PRINT_ON_COMPILATION": "0",
             "PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-c", WRITER, str(Path(__file__).parent)]
    processes = [subprocess.Popen(code, env=child, stderr=subprocess.PIPE) for _ in range(2)]
    request = make_request(scale_program(), [1], None, "cpu")
    key, artifact = kernel_cache.cache_key(request), building.build(request)
    threads = [threading.Thread(target=kernel_cache.disk.store, args=(key, artifact.to_entry())) for _ in range(14)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for p in processes:
        _, err = p.communicate(timeout=120)
        assert p.returncode == 0, err.decode()
    assert [f.name for f in folders()] == [key] and kernel_cache.disk.load(key) is not None
    assert not list(kernel_cache.disk.staging.iterdir())
    check(build())


@pytest.mark.slow
def test_sixteen_processes_compile_the_same_kernel_at_once(tmp_path):
    child = {**os.environ, "TILELANG_CACHE_DIR": str(tmp_path), "TILELANG_PRINT_ON_COMPILATION": "0",
             "PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-c", WRITER, str(Path(__file__).parent)]
    for p in [subprocess.Popen(code, env=child) for _ in range(16)]:
        assert p.wait(timeout=300) == 0
    assert len(folders()) == 1 and kernel_cache.disk.load(folders()[0].name) is not None
    assert not list(kernel_cache.disk.staging.iterdir())


def test_hooked_sources_are_not_cached():
    from tilelang.jit.hooks import register_c_postproc, remove_hook

    plain = build()
    register_c_postproc(lambda code, target: code + "\n; edited\n")
    try:
        edited = build()
        assert edited.get_kernel_source().endswith("; edited\n") and len(folders()) == 1
        check(edited)
        with pytest.raises(ValueError, match="registered already"):
            register_c_postproc(lambda code, target: code, override=False)
    finally:
        remove_hook("c")
    assert build() is plain
