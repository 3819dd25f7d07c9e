"""Target values: forms, features, errors, the current scope."""

import pytest

from tilelang.target import Target, determine_target
from tilelang.target import target as target_module


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(target_module, "device_capability", lambda: None)


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(target_module, "device_capability", lambda: (9, 0))


@pytest.mark.spec("R11:forms")
def test_auto_without_device_is_the_cpu(no_device):
    assert Target("auto").kind == "cpu" and Target().is_cpu
    assert determine_target() == "cpu"


@pytest.mark.spec("R11:cuda")
def test_auto_and_bare_cuda_take_the_device(h200):
    assert Target("auto").arch == Target("cuda").arch == "sm_90a"
    assert determine_target("auto") == {"kind": "cuda", "arch": "sm_90a"}


def test_bare_cuda_without_device_has_a_portable_arch(no_device):
    assert Target("cuda").arch == "sm_80"


@pytest.mark.spec("R11:llvm", "R11:c")
@pytest.mark.parametrize("kind", ["cpu", "llvm", "c"])
def test_cpu_kinds(kind):
    t = Target(kind)
    assert t.is_cpu and t.kind.name == kind and t.arch == "" and t.keys == ("cpu",)


@pytest.mark.spec("R11:forms")
def test_dict_form_and_values():
    t = Target({"kind": "cuda", "arch": "sm_80", "code": ["sm_80"]})
    assert t == Target({"kind": "cuda", "code": ["sm_80"], "arch": "sm_80"}) and hash(t) == hash(Target(t))
    assert t.attrs == {"arch": "sm_80", "code": ("sm_80",)} and str(t) == "cuda -arch=sm_80 -code=sm_80"
    assert t != Target({"kind": "cuda", "arch": "sm_86"})


def test_features_follow_the_arch():
    def t(arch):
        return Target({"kind": "cuda", "arch": arch})

    assert [t(a).has_cp_async for a in ("sm_75", "sm_80", "sm_90a")] == [False, True, True]
    assert [t(a).has_wgmma for a in ("sm_80", "sm_90", "sm_90a", "sm_100a")] == [False, False, True, False]
    assert [t(a).has_fp8_mma for a in ("sm_80", "sm_89", "sm_90")] == [False, True, True]
    assert t("sm_80").max_shared_bytes == 163 * 1024 and t("sm_90a").max_shared_bytes == 232448
    assert not Target("cpu").has_ldmatrix


def test_current_scope_decides_auto(no_device):
    with Target({"kind": "cuda", "arch": "sm_86"}) as t:
        assert Target.current() is t and Target("auto") == t
        with Target("cpu"):
            assert determine_target("auto", return_object=True).is_cpu
    assert Target.current() is None


def test_foreign_target_objects_are_read():
    class Kind:
        name = "cuda"

    class Foreign:
        kind, attrs = Kind(), {"arch": "sm_89"}

    assert Target(Foreign()).arch == "sm_89"


@pytest.mark.parametrize("spec", [
    {"kind": "cuda", "arch": "sm_80"}, {"kind": "cuda", "arch": "sm_90a", "code": ["sm_90a", "compute_90a"]}, "cpu", "llvm",
    {"kind": "cuda", "arch": "sm_80", "max_num_threads": 512, "model": "an A100"}, {"kind": "llvm", "mcpu": "cortex-a53",
    "mattr": ["+avx2", "-fma"], "opt-level": 3, "system-lib": True}])  # fmt: skip
def test_the_text_of_a_target_is_read_back(spec):
    t = Target(spec)
    assert Target(str(t)) == t and eval(repr(t)) == t


def test_an_arch_alone_is_a_target():
    assert Target("sm_90a") == Target({"kind": "cuda", "arch": "sm_90a"}) and determine_target("sm_80", True).arch == "sm_80"


@pytest.mark.spec("must:R11-code")
@pytest.mark.spec("R11:forms")
@pytest.mark.parametrize("spec, raises, text", [
    ("foo", AssertionError, "Target foo is not supported. Pass target options as a dict when the target needs"),
    ("cuda -arch", AssertionError, "Pass target options as a dict"),
    ("cuda arch=sm_90", AssertionError, "Pass target options as a dict"),
    ("cuda -arch=sm_90 -colour=red", AssertionError, "Unknown option 'colour'"),
    ("cuda -arch=sm_33", ValueError, "not supported"),
    ("sm_33", ValueError, "not supported"),
    ("sm_80a", ValueError, "does not exist"),
    ({"kind": "foo"}, AssertionError, "Pass a valid target config dict."),
    ({"arch": "sm_80"}, AssertionError, "Pass a valid target config dict."),
    ({"kind": "cpu", "arch": "sm_80"}, AssertionError, "Pass a valid target config dict."),
    (7, AssertionError, "is not supported"),
    ({"kind": "cuda", "arch": "90"}, ValueError, "malformed"),
    ({"kind": "cuda", "arch": "sm_33"}, ValueError, "not supported"),
    ({"kind": "cuda", "arch": "sm_80a"}, ValueError, "does not exist"),
    ({"kind": "cuda", "arch": "sm_80", "code": "sm_80"}, ValueError, "CUDA target code must be a list"),
])  # fmt: skip
def test_bad_targets_are_refused(spec, raises, text):
    with pytest.raises(raises, match="error") as e:
        Target(spec)
    assert text in str(e.value)
