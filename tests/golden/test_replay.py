"""Generated code of the library's kernels and of the examples has the digests of code.json: a refactor leaves it equal.

A wanted change: `python -m pytest tests/golden --update-golden`, and say in the commit which kernels change and why.
"""

import fcntl
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import tilelang

HERE = Path(__file__).resolve().parent
CODE = HERE / "code.json"
SHARES = 16  # parts of the cases, which run beside each other


def share_of(name: str) -> int:
    from replay import digest

    return int(digest(name), 16) % SHARES + 1


def renew(path: Path, share: int, found: dict) -> None:
    """Put this share's cases into the file, which other processes renew too."""
    from replay import as_text

    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(as_text({name: c for name, c in kept.items() if share_of(name) != share} | found))
    path.with_suffix(".lock").unlink(missing_ok=True)


def told(case: str, target: str, want: list[str], got: list[str]) -> str:
    """One line for a case whose digests differ."""
    same = [w.split()[2:] == g.split()[2:] for w, g in zip(want, got)]
    what = "names alone differ" if len(want) == len(got) and all(same) else "code differs"
    return f"{case}, {target}: {what}\n    expected {want}\n    found    {got}"


@pytest.mark.core
@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", range(1, SHARES + 1))
def test_generated_code_is_that_of_the_digests(share, tmp_path, request):
    out = tmp_path / "digests.json"
    env = {**os.environ, "PYTHONPATH": str(Path(tilelang.__file__).resolve().parents[1]), "TILELANG_CACHE_DIR": str(tmp_path),
           "TILELANG_VERIFY": "0"}
    done = subprocess.run([sys.executable, str(HERE / "replay.py"), "--share", f"{share}/{SHARES}", "--out", str(out)],
                          env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    if request.config.getoption("--update-golden"):
        renew(CODE, share, found)
        return
    expected = {name: case for name, case in json.loads(CODE.read_text()).items() if share_of(name) == share}
    assert sorted(found) == sorted(expected)
    targets = ("sm_80", "sm_90a", *["cpu"] * (platform.machine() == "x86_64"))  # LLVM text is of x86-64
    different = [told(name, t, expected[name][t], found[name][t]) for name in expected for t in targets
                 if expected[name].get(t) != found[name].get(t)]
    assert not different, "python tests/golden/replay.py --texts DIR writes the sources.\n" + "\n".join(different)


def test_enough_kernels_are_compared():
    kernels = [k for case in json.loads(CODE.read_text()).values() for lines in case.values() for k in lines]
    assert len(kernels) >= 300 and sum(k.startswith("refused") for k in kernels) < len(kernels) / 20
    for target, least in {"sm_80": 100, "sm_90a": 100, "cpu": 100}.items():
        assert sum(target in case for case in json.loads(CODE.read_text()).values()) >= least


def test_digests_see_code_and_not_comments():
    from replay import plain, renumbered

    a = 'int a = f(x, "//; s"); // x = 1 (matmul.py:3)\n#line 3 "p.py"\n/* b */\n'
    b = 'int c = f(y, "//; s");\n'
    assert plain(a, "cuda") == 'int a = f(x, "//; s");' and plain(a, "cuda") != plain(b, "cuda")
    assert renumbered(plain(a, "cuda")) == renumbered(plain(b, "cuda"))
    assert renumbered("x = f(y);") != renumbered("x = g(y);") and renumbered("x = y;") != renumbered("x = x;")
    assert plain("  %t1 = add i32 %a, 1 ; matmul.py:3\n", "llvm") == "  %t1 = add i32 %a, 1"
