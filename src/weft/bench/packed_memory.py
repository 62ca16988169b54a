"""The peak memory of one forward, in a process of its own: packed against padded eager attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_DEADLINE_SECONDS = 600
_CHILD = """
import sys
from weft.bench.packed_memory import forward_peak_mib
print(forward_peak_mib(sys.argv[1], int(sys.argv[2])))
"""


def memory_row(*, layers: int) -> dict[str, object]:
    """MiB that a forward at uniform 1024, batch 16, adds to what the model takes."""
    children = [_started(system, layers) for system in ("weft", "eager")]  # at once: memory is not time
    weft, eager = (_measured(child) for child in children)
    return {
        "case": f"peak memory, uniform 1024, batch 16, {layers} layers",
        "weft_mib": weft,
        "hf_eager_mib": eager,
        "ratio": weft / eager,
        "best_peer": f"weft {weft:.0f} MiB, padded eager {eager:.0f} MiB",
    }


def _started(system: str, layers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD, system, str(layers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _measured(child: subprocess.Popen[str]) -> float:
    try:
        out, errors = child.communicate(timeout=_DEADLINE_SECONDS)
    finally:
        child.kill()
    if child.returncode:
        raise RuntimeError(f"the memory of {child.args!r} could not be measured:\n{errors[-2000:]}")
    return float(out.split()[-1])


def forward_peak_mib(system: str, layers: int) -> float:
    """Runs one forward here and returns the memory that it added at its peak."""
    import torch

    from weft.bench.packed import bert_base
    from weft.bench.packed_inputs import batch, uniform
    from weft.packed import pack

    model, padded = bert_base(layers), batch(uniform(1024), 16)
    with torch.no_grad():
        if system == "weft":
            call = pack(model)
            call(padded.ids[:1, :8])  # packs the weights, which a user does once
        else:
            model.set_attn_implementation("eager")
            call = model
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        call(padded.ids, attention_mask=padded.mask)
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> float:
    """A figure of /proc/self/status in KiB."""
    text = Path("/proc/self/status").read_text()
    return float(next(line for line in text.splitlines() if line.startswith(key)).split()[1])
