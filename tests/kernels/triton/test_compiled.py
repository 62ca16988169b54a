"""The kernels compiled for GPUs that are not here: nothing spills, and signals and waits are what they must be."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

pytest.importorskip("triton", reason="the GPU kernels need Triton")

from weft.cli.app import app
from weft.kernels.triton.compile import ARCHS, TARGETS, blocks_at_once, compile_variant, occupancy, variants

NAMED = {v.name: v for v in variants()}
DEFAULTS = [v for v in NAMED.values() if v.is_default]
OTHERS = ("matmul signals fp16 128x128x64 w8 s3", "attention fp16 d64 64x64 w4 s2", "wait 32")  # where one spills
# Everything for one target, and for the others what depends most on them, for time: the tensor cores' kernels, and of
# types that compile alike one. `weft kernels compile` does all of them, and fails if a default spills.
MOST = {
    arch: [
        v
        for v in DEFAULTS
        if arch == "sm90" or (v.kernel.startswith(("matmul", "attention")) and "bf16" not in v.label)
    ]
    for arch in TARGETS
} | {arch: [v for v in DEFAULTS if v.name in OTHERS] for arch in ARCHS if arch not in TARGETS}
SIGNALS = "matmul signals fp16 128x128x64 w8 s3"
GATHERED = "matmul gathered fp16 128x128x64 w8 s3"
TO_PEERS = "matmul owners fp16 128x128x64 w8 s3"


def ptx_of(name, arch):
    lines = compile_variant(NAMED[name], arch).ptx.splitlines()
    return "\n".join(line for line in lines if not line.strip().startswith(("//", ".loc", ".b8", ".b32")))


@pytest.mark.parametrize(
    ("arch", "kernel"), [(arch, kernel) for arch in ARCHS for kernel in sorted({v.kernel for v in MOST[arch]})]
)
def test_default_configurations_do_not_spill(arch, kernel):
    for variant in MOST[arch]:
        if variant.kernel == kernel:
            compiled = compile_variant(variant, arch)
            assert compiled.cubin.startswith(b"\x7fELF")
            assert compiled.resources.spilled == 0, variant.name
            assert compiled.resources.blocks >= 1, variant.name


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", [SIGNALS, TO_PEERS, "tell 32"])
def test_a_signal_is_one_add_with_release_at_system_scope(name, arch):
    text = ptx_of(name, arch)
    adds = re.findall(r"^.*\b(?:red|atom)\.\S*add\S*.*$", text, re.M)
    assert len(adds) == 1
    assert re.search(r"\b(red|atom)\.global\.sys\.release\.add\.u32", adds[0])
    # all threads have stored before the one that adds: between the branch that leads here and the add is a barrier
    before = text[: text.index(adds[0])]
    if name != "tell 32":  # which has one thread's worth to do, and nothing of its own to store
        assert "bar.sync" in before[before.rindex("$L__BB") :]
        assert "st.global" in text


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", [GATHERED, "sum fp16 1024 w4", "wait 32"])
def test_a_wait_is_an_acquire_load_at_system_scope_by_one_thread(name, arch):
    text = ptx_of(name, arch)
    spin = re.search(r"setp\.ne\.s32 out, \S+, 0;\s*@out bra AWAY;(.*?)AWAY:", text, re.S)
    assert spin, "every thread but the first leaves at once"
    assert len(re.findall(r"ld\.acquire\.sys\.global\.s32", spin[1])) == 1
    assert "%globaltimer" in spin[1]
    assert "@out bra AGAIN;" in spin[1]
    after = text[spin.end() :]
    assert re.search(r"\batom\.global\S*\.cas\.b32", after), "who gives up says so"
    if name == GATHERED:  # rows of x are read after the wait; the table that says where they lie is no data
        assert text.index("cp.async") > spin.start()


def test_matmuls_use_the_tensor_cores():
    assert "mma.sync" in ptx_of(SIGNALS, "sm80")
    assert "wgmma.mma_async" in ptx_of(SIGNALS, "sm90")
    assert "tcgen05.mma" in ptx_of(SIGNALS, "sm100")
    assert "tf32" not in ptx_of("matmul signals fp32 64x64x16 w8 s2", "sm80")


def test_the_gradients_of_attention_add_nothing_atomically():
    for name in (v.name for v in DEFAULTS if v.kernel.startswith("attention")):
        assert not re.search(r"\b(red|atom)\.", ptx_of(name, "sm90")), name


def test_every_kernel_is_listed():
    assert {v.kernel for v in NAMED.values()} == {
        "attention", "attention_grad_kv", "attention_grad_q", "gate", "gather", "matmul", "norm", "rotary", "sum",
        "tell", "wait",
    }  # fmt: skip
    assert len(NAMED) == len(list(variants()))


@pytest.mark.parametrize(
    ("limit", "taken", "blocks"),
    [
        ("registers", {"warps": 8, "registers": 255, "shared": 0}, 1),
        ("shared memory", {"warps": 4, "registers": 32, "shared": 100_000}, 2),
        ("warps", {"warps": 16, "registers": 16, "shared": 0}, 4),
        ("blocks", {"warps": 1, "registers": 16, "shared": 0}, 32),
        ("tensor memory", {"warps": 4, "registers": 32, "shared": 0, "tensor_columns": 256}, 2),
        ("nothing fits", {"warps": 4, "registers": 32, "shared": 300_000}, 0),
    ],
)
def test_occupancy(limit, taken, blocks):
    assert blocks_at_once("sm90", **taken) == blocks
    assert occupancy("sm90", blocks, taken["warps"]) == blocks * taken["warps"] / ARCHS["sm90"].warps


def test_the_command(tmp_path):
    file = tmp_path / "kernels.json"
    done = CliRunner().invoke(
        app, ["kernels", "compile", "--arch", "sm80,sm90", "--kernel", "wait", "--json", str(file)]
    )
    assert done.exit_code == 0, done.output
    assert "2 kernels compiled, 0 spill, 0 defaults do" in done.output
    rows = json.loads(file.read_text())["kernels"]
    assert [row["arch"] for row in rows] == ["sm80", "sm90"]
    assert all(row["registers"] > 0 and row["spilled"] == 0 and row["occupancy"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm12"], "got the architectures sm12"),
        (["--kernel", "nothing"], "got the kernel 'nothing', expected one of attention"),
        (["--kernel", "wait", "--json", "/nowhere/at/all.json"], "create it first"),
    ],
)
def test_the_command_says_what_it_wants(arguments, message):
    done = CliRunner().invoke(app, ["kernels", "compile", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_without_triton_the_command_says_what_to_install():
    code = "import sys; sys.modules['triton'] = None; from weft.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "kernels", "compile"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "pip install triton" in done.stderr
