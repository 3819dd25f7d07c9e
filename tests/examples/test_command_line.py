"""What a new user meets: every example says what it does, runs without options where there is no GPU, and fails in words."""

import runpy
import sys

import pytest
from checks import CHECKS, EXAMPLES

FILES = sorted({c.file for c in CHECKS})


def call(monkeypatch, capsys, file, *options):
    """(status, stdout, stderr) of an example run as a program."""
    monkeypatch.setattr(sys, "argv", [file, *options])
    monkeypatch.setattr(sys, "path", [str((EXAMPLES / file).parent), *sys.path])
    status = 0
    try:
        runpy.run_path(str(EXAMPLES / file), run_name="__main__")
    except SystemExit as ended:
        status = ended.code or 0
    return status, *capsys.readouterr()


@pytest.mark.parametrize("file", FILES)
def test_help_says_what_it_does_and_lists_every_size(monkeypatch, capsys, file):
    status, out, _ = call(monkeypatch, capsys, file, "--help")
    assert status == 0 and "--sizes {auto,small,real}" in out
    docstring = (EXAMPLES / file).read_text().removeprefix('"""').partition("\n")[0].rstrip('"')
    assert docstring in out
    for check in CHECKS:
        if check.file == file:
            assert all(f"--{name}" in out for name in check.small)


def test_without_options_all_rows_run_in_small_sizes(monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys, "softmax/softmax.py", "--target", "cpu")
    assert status == 0 and "in small sizes (--sizes real" in out
    rows = [c for c in CHECKS if c.file == "softmax/softmax.py"]
    assert out.count("s with compilation and reference") == len(rows)
    for row in rows:
        assert ", ".join([row.function, *(f"{k}={v}" for k, v in row.small.items())]) in out
    assert out.count(" ms") == len(rows)  # how long kernels took


def test_given_sizes_change_the_first_row_of_every_check(monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys, "softmax/softmax.py", "--target", "cpu", "--backend", "tile", "--m", "3")
    assert status == 0 and "the interpreter of tile programs" in out
    assert [line for line in out.splitlines() if line.startswith("check")] == ["check_whole, m=3, n=100",
                                                                               "check_online, m=3, n=2500"]


def test_real_sizes_are_those_of_a_gpu():
    import checks
    from command_line import runs

    gemm = checks.load("gemm/gemm.py")
    small, real = (runs([gemm.check_gemm], {}, small)[0].sizes for small in (True, False))
    assert small == dict(m=100, n=72, k=88, trans_b=True) and real == dict(trans_b=True)
    assert [r.sizes for r in runs([gemm.check_gemm], {"m": 5, "workers": 3}, False)] == [dict(trans_b=True, m=5)]
    assert runs([test_real_sizes_are_those_of_a_gpu], {}, True)[0].sizes == {}  # not an example of ours


def test_programs_for_hopper_are_simulated_elsewhere(monkeypatch, capsys):
    sizes = ("--k", "64", "--m", "128", "--n", "64")
    status, out, _ = call(monkeypatch, capsys, "hopper/gemm_by_hand.py", "--target", "cpu", *sizes)
    assert status == 0 and out.count(": ok") == 2


def test_what_cannot_be_made_is_said_in_words(monkeypatch, capsys):
    options = ("--target", "cuda", "--backend", "simulator", "--dtype", "int32")
    status, out, err = call(monkeypatch, capsys, "gemm/gemm.py", *options)
    assert status == 2 and "T.gemm of int32 and int32 into float32" in err and "Traceback" not in out + err
    with pytest.MonkeyPatch.context() as patch:
        import harness

        patch.setattr(harness, "reference_device", lambda: None)
        status, out, err = call(monkeypatch, capsys, "gemm/gemm.py", "--target", "cuda")
        assert status == 2 and "--target cpu does without" in err
