"""A driver of AMD GPUs: a C library that writes down what it is asked, and fails the calls that a test names."""

import ctypes
import shutil
import subprocess
from pathlib import Path

from fake_driver import OnGpu

SOURCE = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static char text[1 << 16], failing[64], sizes[64];
static int code, current, modules, memory, count = 4, tests;
static char arch[64] = "gfx942:sramecc+:xnack-";
static int said(const char *name) { return strcmp(name, failing) ? 0 : code; }
#define SAY(...) (snprintf(text + strlen(text), sizeof text - strlen(text), __VA_ARGS__), strcat(text, "\n"))
#define TRY(name) do { if (said(name)) return said(name); } while (0)
void fake_reset(int devices) { text[0] = failing[0] = 0; code = current = modules = memory = 0; count = devices; tests++; }
void fake_fail(const char *name, int with) { strcpy(failing, name); code = with; }
void fake_arguments(const char *of) { strcpy(sizes, of); }
void fake_arch(const char *name) { strcpy(arch, name); }
const char *fake_log(void) { return text; }
int fake_held(void) { return modules * 100 + memory; }
int fake_current(void) { return current; }
const char *hipGetErrorName(int rc) {
  return rc == 209 ? "hipErrorNoBinaryForGpu" : rc == 701 ? "hipErrorLaunchOutOfResources" : rc == 2 ? "hipErrorOutOfMemory"
      : rc == 101 ? "hipErrorInvalidDevice" : "hipErrorUnknown";
}
const char *hipGetErrorString(int rc) { return rc == 209 ? "no kernel image is available" : "a text"; }
int hipInit(unsigned flags) { TRY("hipInit"); return 0; }
int hipRuntimeGetVersion(int *out) { TRY("hipRuntimeGetVersion"); *out = 60443484; return 0; }
int hipGetDeviceCount(int *out) { TRY("hipGetDeviceCount"); *out = count; return count ? 0 : 100; }
int hipDeviceGet(int *out, int n) { TRY("hipDeviceGet"); *out = n; return n < count ? 0 : 101; }
int hipDeviceGetName(char *out, int room, int dev) {
  TRY("hipDeviceGetName");
  snprintf(out, room, "AMD Instinct MI300X");
  return 0;
}
int hipDeviceTotalMem(size_t *out, int dev) { TRY("hipDeviceTotalMem"); *out = 206141652992; return 0; }
int hipDeviceGetAttribute(int *out, int what, int dev) {
  TRY("hipDeviceGetAttribute");
  *out = what == 63 ? 304 : what == 87 ? 64 : what == 74 || what == 76 ? 65536 : what == 19 ? 4 << 20 : what == 5 ? 2100000
      : what == 23 ? 9 : what == 61 ? 4 : what == 57 ? 2048 : 0;
  return 0;
}
int hipGetDevicePropertiesR0600(char *out, int dev) {
  TRY("hipGetDevicePropertiesR0600");
  memset(out, 0, 1472);
  strcpy(out, "AMD Instinct MI300X");
  strcpy(out + 1160, arch);
  return 0;
}
int hipGetDevice(int *out) { TRY("hipGetDevice"); *out = current; return 0; }
int hipSetDevice(int n) {
  TRY("hipSetDevice");
  if (n < 0 || n >= count) return 101;
  current = n;
  return 0;
}
int hipModuleLoadData(void **out, const char *image) {
  TRY("hipModuleLoadData");
  if (memcmp(image, "\177ELF", 4)) return 200;
  *out = (void *)(intptr_t)(++modules + 1000 * tests);
  SAY("load on %d", current);
  return 0;
}
int hipModuleUnload(void *m) { modules -= (intptr_t)m / 1000 == tests; return 0; }  // not what an earlier test left
int hipModuleGetFunction(void **out, void *m, const char *name) {
  TRY("hipModuleGetFunction");
  *out = (void *)(intptr_t)(1000 + 100 * current + (strstr(name, "_1") != 0));
  SAY("function %s", name);
  return 0;
}
int hipFuncGetAttribute(int *out, int what, void *f) { TRY("hipFuncGetAttribute"); *out = 0; return 0; }
int hipMallocAsync(void **out, size_t n, void *stream) {
  TRY("hipMallocAsync");
  *out = (void *)(intptr_t)(1 << 20);
  memory++;
  SAY("allocate %zu on stream %ld", n, (long)(intptr_t)stream);
  return 0;
}
int hipFreeAsync(void *p, void *stream) { memory--; SAY("free"); TRY("hipFreeAsync"); return 0; }
int hipMemsetD8Async(void *p, unsigned char value, size_t n, void *stream) {
  TRY("hipMemsetD8Async");
  SAY("clear %zu", n);
  return 0;
}
int hipDeviceGetDefaultMemPool(void **out, int dev) { TRY("hipDeviceGetDefaultMemPool"); *out = (void *)5; return 0; }
int hipMemPoolGetAttribute(void *pool, int what, void *value) {
  TRY("hipMemPoolGetAttribute");
  *(uint64_t *)value = 0;
  return 0;
}
int hipMemPoolSetAttribute(void *pool, int what, void *value) {
  TRY("hipMemPoolSetAttribute");
  SAY("pool keeps %llu", (long long)*(uint64_t *)value);
  return 0;
}
static int launched(const char *how, void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                    unsigned shared, void *stream, void **params) {
  SAY("%s %ld on %d: %u %u %u by %u %u %u, %u bytes, stream %ld", how, (long)(intptr_t)f, current, x, y, z, a, b, c, shared,
      (long)(intptr_t)stream);
  for (int i = 0; sizes[i]; i++)
    SAY("  %lld", sizes[i] == '4' ? (long long)*(int32_t *)params[i] : (long long)*(int64_t *)params[i]);
  return 0;
}
int hipModuleLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared,
                          void *stream, void **params, void **extra) {
  TRY("hipModuleLaunchKernel");
  return extra ? 1 : launched("launch", f, x, y, z, a, b, c, shared, stream, params);
}
int hipModuleLaunchCooperativeKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                                     unsigned shared, void *stream, void **params) {
  TRY("hipModuleLaunchCooperativeKernel");
  return launched("launch together", f, x, y, z, a, b, c, shared, stream, params);
}
"""
HAS_COMPILER = shutil.which("cc") is not None


class FakeHip:
    """The library in a folder.  Its name is not the driver's: what runs later in this process must not find it loaded."""

    def __init__(self, folder):
        self.folder = Path(folder)
        (self.folder / "fake.c").write_text(SOURCE)
        self.path = str(self.folder / "libfake.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", self.path, self.folder / "fake.c"], check=True)
        self.lib = ctypes.CDLL(self.path)
        self.lib.fake_log.restype = ctypes.c_char_p

    def reset(self, devices=4):
        self.lib.fake_reset(devices)

    def fail(self, name, code):
        self.lib.fake_fail(name.encode(), code)

    def arguments(self, sizes):
        """How many bytes each argument of a launch has that the log shows: "884"."""
        self.lib.fake_arguments(sizes.encode())

    @property
    def log(self):
        return self.lib.fake_log().decode().splitlines()

    @property
    def held(self):
        """(loaded modules, allocations that live)."""
        return divmod(self.lib.fake_held(), 100)


class OnRocm(OnGpu):
    """A NumPy array that says it is on an AMD GPU, as torch's do there."""

    kind = 10

COMPILER = r"""
#include <stddef.h>
#include <stdio.h>
#include <string.h>
static char log_text[4096];
static const char code[] = "\177ELF \xab.vgpr_count\x2a \xab.agpr_count\xcd\x01\x02 \xb0.vgpr_spill_count\x00";
int hiprtcCreateProgram(void **out, const char *source, const char *name, int n, const char **headers, const char **names) {
  *out = (void *)(strstr(source, "wrong") ? 2 : 1);
  return n || headers || names;
}
int hiprtcCompileProgram(void *program, int count, const char **options) {
  log_text[0] = 0;
  for (int i = 0; i < count; i++) { strcat(log_text, options[i]); strcat(log_text, " "); }
  if (program != (void *)2) return 0;
  strcpy(log_text, "kernel.cu:1:1: error: this is wrong");
  return 6;
}
int hiprtcGetProgramLogSize(void *p, size_t *n) { *n = strlen(log_text) + 1; return 0; }
int hiprtcGetProgramLog(void *p, char *out) { strcpy(out, log_text); return 0; }
int hiprtcGetCodeSize(void *p, size_t *n) { *n = sizeof code; return 0; }
int hiprtcGetCode(void *p, char *out) { memcpy(out, code, sizeof code); return 0; }
int hiprtcDestroyProgram(void **p) { *p = 0; return 0; }
const char *hiprtcGetErrorString(int rc) { return "an error"; }
const char *fake_options(void) { return log_text; }
"""


def compiler(folder):
    """A library that looks like hiprtc."""
    (folder / "rtc.c").write_text(COMPILER)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", folder / "libfakertc.so", folder / "rtc.c"], check=True)
    library = ctypes.CDLL(str(folder / "libfakertc.so"))
    library.fake_options.restype = ctypes.c_char_p
    return library
