"""The texts of a compiled kernel: device code, host code, PTX and SASS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilelang.errors import error, register
from tilelang.ir.record import record
from tilelang.log import logger
from tilelang.target import Target

from .artifact import KERNEL_SEPARATOR, Artifact

register("kernel-no-sources", ValueError, "export_sources is asked to write nothing", expected="kernel_path, host_path or both",
         found="neither")


@record
class Sources:
    """The sources of a kernel and their assembly.  flags: options of the device compiler."""

    artifact: Artifact
    target: Target
    flags: tuple[str, ...]

    def of(self, which: str) -> str:
        """The source text.  which: "kernel", "host" or "both"."""
        if which not in ("kernel", "host", "both"):
            raise ValueError(f"which must be 'kernel', 'host' or 'both', found {which!r}")
        made = self.artifact
        return {"kernel": made.kernel_source, "host": made.host_source,
                "both": made.kernel_source + "\n" + made.host_source}[which]

    def write(self, kernel_path: Any, host_path: Any) -> None:
        """Write the device and host source to files.  Raises kernel-no-sources when neither path is given."""
        if kernel_path is None and host_path is None:
            raise error("kernel-no-sources", "export_sources needs kernel_path, host_path or both",
                        hint="export_sources(kernel_path=\"kernel.cu\")")
        for path, text in ((kernel_path, self.artifact.kernel_source), (host_path, self.artifact.host_source)):
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(text, encoding="utf-8")

    def assembly(self, what: str) -> str:
        kept = [text.decode() for name, text in sorted(self.artifact.files.items()) if name.endswith(".s")]
        if what == "SASS" and kept:
            return "\n".join(kept)
        cubin = self.artifact.files.get("kernel.cubin")
        if cubin is None:
            raise ValueError(f"{what} exists for CUDA targets only, this kernel is for {self.target}")
        if what == "SASS":
            from tilelang.runtime.sass import disassemble  # 7 ms

            return disassemble(cubin)
        from tilelang.runtime.nvrtc import compile_ptx  # 5 ms

        return "\n".join(compile_ptx(s, self.target.arch, list(self.flags))
                         for s in self.artifact.kernel_source.split(KERNEL_SEPARATOR))

    def show(self, what: str) -> None:
        try:
            print(self.assembly(what))
        except Exception as e:
            logger.error("cannot show %s: %s", what, e)

    def export(self, what: str, path: Any) -> None:
        if not path:
            raise ValueError(f"the path for the {what} is empty")
        try:
            Path(path).write_text(self.assembly(what), encoding="utf-8")
        except Exception as e:
            logger.error("cannot write %s: %s", what, e)
