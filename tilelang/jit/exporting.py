"""Writing kernels to files and reading them back: export, export_library, from_database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilelang.errors import error
from tilelang.ir import Expr, Launch, to_text, walk
from tilelang.ir.record import record
from tilelang.runtime.c_files import cmake_text, header_text, sample_text
from tilelang.runtime.c_functions import RESERVED, CParameter, c_parameters
from tilelang.runtime.c_library import CInterface, Variant, cpu_object, cuda_object, preference
from tilelang.runtime.llvm_text import text_of
from tilelang.runtime.cache import digest
from tilelang.runtime.shared_library import export_name, find_compiler, link, write_library
from tilelang.runtime.signature import signature_of
from tilelang.runtime.xla_handler import has_type, results_of
from tilelang.target import Target
from tilelang.version import __version__

from .artifact import INTERPRETED, KERNEL_SEPARATOR, Artifact, Request, without_outputs
from .kernel_cache import cache_key, disk, produce


def fingerprint(request: Request) -> str:
    """A hash that identifies a saved kernel: the program's text, its outputs and its target."""
    return digest(["library", to_text(request.func), list(signature_of(request.func, request.out_idx).out_idx),
                   "cuda" if request.target.is_cuda else "cpu"])


def export_library(path: Any, request: Request, artifact: Artifact) -> str:
    """Write a kernel as a shared library; returns its path.  Raises kernel-export, kernel-link, ValueError."""
    if not str(path or ""):
        raise ValueError("the path of the library is empty")
    name = export_name(request.func.name)
    if artifact.kind == "cpu" and "kernel.o" in artifact.files:
        write_library(path, name, artifact.host_source, artifact.files["kernel.o"], artifact.meta["entry"],
                      fingerprint(request))
    elif artifact.kind == "cuda" and "library" not in artifact.meta:
        from tilelang.runtime.cuda_library import write_cuda_library  # 20 ms

        kernels = artifact.meta["kernels"]
        images = {k["file"]: artifact.files[k["file"]] for k in kernels}
        write_cuda_library(path, name, artifact.host_source, kernels, images, fingerprint(request))
    else:
        read = "library" in artifact.meta or not artifact.files
        raise error("kernel-export", f"a kernel for {request.target} {'that was not compiled here ' * read}cannot be written "
                    "as a shared library", expected="a kernel that was compiled here for CUDA or the CPU",
                    found="one that was read from a file" if read else f"one for {request.target}",
                    hint="copy the library that it was read from, or compile the program" if read else
                    "from_database reads the folder of the kernel's entry in the disk cache")
    return str(Path(path).resolve())


def saved_artifact(path: Any, request: Request, kernel_source: str, host_source: str) -> Artifact:
    """The artifact of a saved kernel, read from a library of export_library or from a folder of the disk cache.

    Raises FileNotFoundError, and kernel-library when the kernel is of another program, other options or another version.
    """
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"{place} does not exist")
    folder = place if place.is_dir() else place.parent if (place.parent / "manifest.json").exists() else None
    if folder is None:
        return Artifact("cuda" if request.target.is_cuda else "cpu", kernel_source, host_source, {},
                        {"kernels": [], "library": str(place.resolve()), "fingerprint": fingerprint(request)})
    entry = disk.read_folder(folder)
    if entry is None or folder.name != cache_key(request):
        raise error("kernel-library", f"{folder} keeps no kernel of this program with these options by this version",
                    found=f"{'no kernel' if entry is None else 'another kernel'} in {folder.name or folder}")
    return Artifact.from_entry(entry)


# ---- kernels that C programs call ----------------------------------------------------------------------------------------
@record
class Compiled:
    """A compiled request.  Results, if any, are among its inputs."""

    request: Request
    artifact: Artifact

    @property
    def facts(self) -> dict[str, Any]:
        return self.artifact.meta


def with_given_results(kernel: Any, arch: str | None = None) -> Compiled:
    """The program of a JITKernel with the memory of its results among its inputs; compiled for another architecture."""
    request = kernel.request
    target = request.target if arch is None else Target({"kind": "cuda", "arch": arch})
    if not kernel.signature.outputs and str(target) == str(request.target):
        return Compiled(request, kernel._built)
    request = replace(request, func=without_outputs(request.func), out_idx=None, given=None, target=target)
    return Compiled(request, produce(request)[0])


def c_interface(kernel: Any, name: str) -> CInterface:
    """What callers of an exported JITKernel see.  Raises kernel-export for one without compiled code."""
    backend, kind = kernel.request.backend, kernel._built.kind
    if kind not in ("cpu", "cuda") or "library" in kernel._built.meta:
        raise error("kernel-export", f"{kernel!r} has no compiled code that C programs could call",
                    expected="a kernel that was compiled here", found=f"one for the backend {backend!r}"
                    if backend in INTERPRETED else f"one for {kernel.target}" if kind not in ("cpu", "cuda") else
                    "one that was read from a file", hint="compile the program for the CPU or for CUDA")
    sig, outputs = signature_of(without_outputs(kernel.request.func)), kernel.signature.out_idx
    written = frozenset(kernel.written() | {a.name for a in kernel.signature.outputs})
    parameters = c_parameters(sig, written, kernel.target.is_cuda)
    results = results_of(sig, outputs, written) if all(map(has_type, sig.args)) else None
    return CInterface(name, sig, parameters, outputs, results)


def export(kernel: Any, folder: Any, name: str | None = None, arch: str | Sequence[str] | None = None,
           ptx: bool = False) -> Path:
    """Write a kernel for C programs into a folder; see JITKernel.export."""
    name = export_name(name or kernel.signature.name)
    if name in RESERVED:
        raise error("kernel-export", f"a C function cannot have the name ‹{name!r}›", expected="a name that is free in C",
                    hint='give it one: export(..., name="matmul"), on the command line --name matmul')
    archs = [arch] if isinstance(arch, str) else list(arch or ())
    if (archs or ptx) and not kernel.target.is_cuda:
        raise error("kernel-export", f"architectures of GPUs are given for a kernel for ‹{kernel.target}›",
                    expected="a kernel for CUDA", hint='compile it for target="cuda"')
    c, out = c_interface(kernel, name), Path(folder)
    if kernel.target.is_cuda:
        compiled = [with_given_results(kernel, a) for a in dict.fromkeys(archs or [kernel.target.arch])]
        variants = _variants(compiled, ptx)
        code, libraries = cuda_object(c, variants), ["-ldl"]
    else:
        compiled, variants = [with_given_results(kernel)], []
        built = compiled[0].artifact
        code, libraries = cpu_object(c, built.kernel_source, built.host_source, built.meta["entry"]), ["-lm", "-lpthread"]
    facts = _launch_facts(kernel, c, compiled, variants)
    out.mkdir(parents=True, exist_ok=True)
    for file, text in ((f"{name}.h", header_text(c, ", ".join(facts["targets"]), _alignment(compiled))),
                       (f"{name}.json", json.dumps(facts, indent=2) + "\n"), ("CMakeLists.txt", cmake_text(c, bool(variants))),
                       ("main.c", sample_text(c, bool(variants)))):
        (out / file).write_text(text, encoding="utf-8")
    (out / f"{name}.o").write_bytes(code)
    library = out / f"lib{name}.so"
    library.unlink(missing_ok=True)
    find_compiler(f"{out / name}.o is written: link it where there is one, by the CMakeLists.txt in the same folder")
    link(library, name, {f"{name}.o": code}, tuple(libraries), c.symbols)
    return library


def _variants(compiled: list[Compiled], ptx: bool) -> list[Variant]:
    """The device code of each architecture; with ptx also the PTX of the least one that later devices can run."""
    out = [Variant(c.request.target.arch, c.artifact.host_source, c.facts["kernels"],
                   {r["file"]: c.artifact.files[r["file"]] for r in c.facts["kernels"]}) for c in compiled]
    if ptx:
        from tilelang.runtime.nvrtc import compile_ptx  # 5 ms

        from .building import device_options  # 12 ms

        plain = min((c for c in compiled if not c.request.target.arch_suffix), key=lambda c: c.request.target.arch_number,
                    default=None)
        if plain is None:
            raise error("kernel-export", "PTX of these architectures runs on no other device",
                        expected="an architecture without a suffix", found=", ".join(v.arch for v in out),
                        hint="add one, such as sm_80")
        target, rows = plain.request.target, plain.facts["kernels"]
        texts = {r["file"]: compile_ptx(s, target.arch, device_options(plain.request)).encode().rstrip(b"\0") + b"\0"
                 for r, s in zip(rows, plain.artifact.kernel_source.split(KERNEL_SEPARATOR))}
        out.append(Variant(f"compute_{target.arch_number}", plain.artifact.host_source, rows, texts))
    return sorted(out, key=lambda v: preference(v.arch))


def _alignment(compiled: list[Compiled]) -> dict[str, int]:
    """The alignment in bytes of the address of each tensor that all variants accept."""
    return {name: max(c.facts["alignment"][name] for c in compiled) for name in compiled[0].facts["alignment"]}


def _text(x: Any) -> Any:
    """A size in JSON: a number, or the text of an expression."""
    return text_of(x) if isinstance(x, Expr) else x


def _launch_facts(kernel: Any, c: CInterface, compiled: list[Compiled], variants: list[Variant]) -> dict[str, Any]:
    """The contents of NAME.json."""
    alignment, outputs = _alignment(compiled), kernel.signature.outputs
    results = [c.sig.args[i].name for i in c.results] if c.results is not None else None

    def row(p: CParameter) -> dict[str, Any]:
        one: dict[str, Any] = {"name": p.name, "kind": p.kind, "c_type": p.c_type.rstrip()}
        if p.kind == "tensor":
            b = p.arg.buffer
            one |= {"dtype": str(b.dtype), "rank": len(b.shape), "shape": [_text(d) for d in b.shape],
                    "strides": None if b.strides_ is None else [_text(d) for d in b.strides_],
                    "alignment": alignment[p.arg.name], "written": not p.c_type.startswith("const"),
                    "output": p.arg.name in [a.name for a in outputs], "optional": not p.arg.used}
        elif p.kind in ("scalar", "size"):
            one["dtype"] = str(p.arg.dtype if p.kind == "size" else p.arg.var.dtype)
        return one

    if variants:
        by_arch = {k.request.target.arch: k.facts["facts"] for k in compiled}
        launches = [{"arch": v.arch, "kernels": [
            {"name": f["name"], "grid": f["grid"], "block": f["block"], "cluster": f["cluster"],
             "dynamic_shared_bytes": f["dynamic_shared"] if f["shared_bytes"] is None else f["shared_bytes"],
             "static_shared_bytes": f["static_shared"], "registers": f["registers"]}
            for f in by_arch[v.arch.replace("compute_", "sm_")]]} for v in variants]
    else:
        from tilelang.target.cpu import host_cpu  # 22 ms

        launches = [{"arch": host_cpu().name, "kernels": [
            {"name": c.sig.name, "grid": [_text(g) for g in x.grid], "block": list(x.threads)}
            for x in walk(kernel.request.func.body, Launch)]}]
    return {"tilelang": __version__, "name": c.name, "program": c.sig.name, "target": kernel.target.kind,
            "targets": [x["arch"] for x in launches],
            "files": {"library": f"lib{c.name}.so", "object": f"{c.name}.o", "header": f"{c.name}.h"},
            "symbols": list(c.symbols), "parameters": [row(p) for p in c.parameters],
            "outputs": [a.name for a in outputs], "xla_results": results, "launches": launches}
