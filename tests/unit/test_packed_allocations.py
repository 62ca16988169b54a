"""A forward allocates nothing after its first call but its result: counted in the C library, in torch and in Python.

A small library that counts large allocations is compiled and loaded before all others, in a process of its own.
"""

import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import packed_models as small

from weft.packed import pack

_COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
static atomic_long large;
enum { LARGE = 2048 };
static void count(size_t bytes) { if (bytes >= LARGE) atomic_fetch_add(&large, 1); }

long counted(void) { return atomic_load(&large); }
void *malloc(size_t n) { count(n); return __libc_malloc(n); }
void *calloc(size_t n, size_t m) { count(n * m); return __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { count(n); return __libc_realloc(p, n); }
void *memalign(size_t a, size_t n) { count(n); return __libc_memalign(a, n); }
void *aligned_alloc(size_t a, size_t n) { count(n); return __libc_memalign(a, n); }
int posix_memalign(void **p, size_t a, size_t n) {
  count(n);
  *p = __libc_memalign(a, n);
  return *p ? 0 : 12;
}
"""

_CHILD = """
import ctypes, gc, sys, torch
sys.path.insert(0, sys.argv[2])
import packed_models as small
from weft.packed import pack
counted = ctypes.CDLL(sys.argv[1]).counted
counted.restype = ctypes.c_long
torch.set_num_threads(2)
for family in small.FAMILIES:
    packed = pack(small.build(family))
    ids, mask = small.inputs([37, 1, 12, 25, 3])
    engine, inputs = packed.weft_engine(), packed.weft_prepare({"input_ids": ids, "attention_mask": mask}).inputs
    with torch.no_grad():
        engine(inputs)
        gc.collect()
        before = counted()
        for _ in range(10):
            engine(inputs)
        forward = counted() - before
        before = counted()
        torch.empty(4096).clone()
        assert counted() - before == 2, "the counter does not count"
    print(family, forward)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to count allocations")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the allocations of glibc")
def test_a_forward_allocates_its_result_only(tmp_path):
    source, library = tmp_path / "count.c", tmp_path / "count.so"
    source.write_text(_COUNTER)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(library), here], env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    counts = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines() if " " in line}
    assert counts == dict.fromkeys(small.FAMILIES, 10)  # ten calls, ten results


def test_torch_sees_one_tensor_and_python_keeps_nothing():
    packed = pack(small.build("Bert"))
    ids, mask = small.inputs([37, 1, 12, 25, 3])
    engine, inputs = packed.weft_engine(), packed.weft_prepare({"input_ids": ids, "attention_mask": mask}).inputs
    with torch.no_grad():
        engine(inputs)
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            states = engine(inputs)
        taken = [e.cpu_memory_usage for e in profile.events() if e.cpu_memory_usage > 0]
        assert taken == [states.nbytes]
        tracemalloc.start()
        engine(inputs)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            engine(inputs)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert grown < 4096


def test_buffers_grow_and_stay():
    packed = pack(small.build("Bert"))
    buffers = []
    with torch.no_grad():
        for length in (5, 30, 8, 30, 70):
            packed(torch.ones(2, length, dtype=torch.int64))
            buffers.append(packed.weft_engine()._read.program.buffers.at["wide"])
    assert buffers[1] == buffers[2] == buffers[3]
    assert buffers[4] != buffers[3]
