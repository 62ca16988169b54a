"""What this machine has for weft, one line each, and the remedy where something is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

from weft.errors import LabUnavailable
from weft.timeline.text import format_bytes

Status = Literal["ok", "missing", "broken"]
_TESTED = "install a torch that weft was tested with: pip install torch==2.13.0"


@dataclass(frozen=True)
class Check:
    """One line. What is `missing` is optional; without what is `broken` weft does not work."""

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """Plain values, for JSON."""
        return asdict(self)


def examine() -> list[Check]:
    """All checks, in the order in which they are shown."""
    return [check() for check in CHECKS]


def is_healthy(checks: Sequence[Check]) -> bool:
    """Whether nothing that is required is broken."""
    return all(check.status != "broken" for check in checks)


def render(checks: Sequence[Check]) -> str:
    """One line a check, with the remedy after an arrow.

    >>> print(render([Check("tc", "missing", "not found", "install iproute2"), Check("torch", "ok", "2.13")]))
    missing  tc     not found -> install iproute2
    ok       torch  2.13
    """
    status, name = max(len(c.status) for c in checks), max(len(c.name) for c in checks)
    remedies = [f" -> {c.remedy}" if c.remedy else "" for c in checks]
    return "\n".join(
        f"{c.status:<{status}}  {c.name:<{name}}  {c.detail}{remedy}"
        for c, remedy in zip(checks, remedies, strict=True)
    )


def _python() -> Check:
    return Check("python", "ok", platform.python_version())


def _cpu() -> Check:
    cores = len(os.sched_getaffinity(0))
    try:
        from weft import _core

        features = f" with {' '.join(_core.cpu_features())}"
    except ImportError:
        features = ""  # the native core's own line says so
    return Check("cpu", "ok", f"{platform.machine()}, {cores} cores{features}")


def _native_core() -> Check:
    try:
        from weft import _core
    except ImportError as e:
        remedy = "install weft from a wheel, or from source with a C++20 compiler: pip install ."
        return Check("native core", "broken", f"cannot be imported: {e}", remedy)
    able = ", ".join(_core.available_isas())
    return Check("native core", "ok", f"runs {_core.kernels().name}; this CPU can run {able}")


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def _torch() -> Check:
    try:
        import torch
    except ImportError as e:
        return Check("torch", "broken", f"cannot be imported: {e}", "pip install 'torch>=2.13'")
    return Check("torch", "ok", torch.__version__)


def _torch_names() -> Check:
    """What weft uses of torch that torch does not promise to keep."""
    what = "torch internals"
    if not _has_torch():
        return Check(what, "missing", "torch cannot be imported")
    try:
        from weft._torch_check import self_check

        found = self_check()
    except (ImportError, AttributeError) as e:  # a name is gone that is imported where it is used
        return Check(what, "broken", f"this torch lacks a name: {e}", _TESTED)
    wrong = [f"{finding.name}: {finding.detail}" for finding in found if not finding.ok]
    if wrong:
        return Check(what, "broken", "; ".join(wrong), _TESTED)
    return Check(what, "ok", f"the {len(found)} private names that weft uses mean what they should")


def _backends() -> Check:
    """Which communication libraries torch was built with; any one will do."""
    try:
        import torch.distributed as dist
    except ImportError as e:
        return Check("process groups", "broken", f"cannot be imported: {e}", "pip install 'torch>=2.13'")
    if not dist.is_available():
        return Check("process groups", "broken", "this torch has none", "install a torch built with USE_DISTRIBUTED=1")
    found = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    have = [name for name, there in found.items() if there]
    lack = [name for name, there in found.items() if not there]
    without = f"; without {', '.join(lack)}" if lack else ""
    if not have:
        return Check("process groups", "broken", "no backend", "install a torch built with gloo, nccl, mpi or ucc")
    return Check("process groups", "ok", ", ".join(have) + without)


def _threads() -> Check:
    if not _has_torch():
        return Check("threads", "missing", "torch cannot be imported")
    import torch

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if threads > cores:
        remedy = f"torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores}"
        return Check("threads", "missing", f"torch would use {threads} on {cores} cores", remedy)
    return Check("threads", "ok", f"torch uses {threads} of {cores} cores")


def _namespaces() -> Check:
    from weft.lab.linux import namespaces_available

    works, why = namespaces_available()
    return Check("namespaces", "ok" if works else "missing", " ".join(why.split()))


def _link_tools() -> Check:
    from weft.lab.linux import find_tool

    try:
        return Check("ip and tc", "ok", f"{find_tool('ip')} and {find_tool('tc')}")
    except LabUnavailable as error:
        return Check("ip and tc", "missing", str(error))


def _shared_memory() -> Check:
    try:
        os.close(os.memfd_create("weft-doctor"))
        memfd = "memfd works"
    except OSError as e:
        return Check(
            "shared memory",
            "broken",
            f"memfd_create: {e}",
            "allow memfd_create in the sandbox's seccomp profile",
        )
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return Check("shared memory", "missing", f"{memfd}; no /dev/shm", "mount a tmpfs at /dev/shm")
    free, size = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    return Check("shared memory", "ok", f"{memfd}; /dev/shm has {format_bytes(free)} free of {format_bytes(size)}")


def _cuda() -> Check:
    if not _has_torch():
        return Check("cuda", "missing", "torch cannot be imported")
    import torch

    if not torch.cuda.is_available():
        return Check("cuda", "missing", "none; weft runs on the CPU")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("cuda", "ok", f"{torch.version.cuda}: {', '.join(names)}")


def _triton() -> Check:
    if importlib.util.find_spec("triton") is None:
        return Check("triton", "missing", "not installed; only GPU kernels need it", "pip install triton")
    return Check("triton", "ok", metadata.version("triton"))


def _transformers() -> Check:
    """Whether Hugging Face's models are there, and know weft's attention."""
    if importlib.util.find_spec("transformers") is None or not _has_torch():
        return Check("transformers", "missing", "not installed; only its models need it", "pip install 'weft[hf]'")
    number = metadata.version("transformers")
    try:
        from weft.packed.registry import is_registered, register_attention

        register_attention()
        known = is_registered()
    except (ImportError, AttributeError) as e:
        remedy = "install the transformers that weft's tests run on, 5.23"
        return Check("transformers", "broken", f"{number} does not take weft's attention: {e}", remedy)
    return Check("transformers", "ok" if known else "broken", f'{number}, knows attn_implementation="weft"')


def models_table() -> str:
    """What weft does with each family of models, as Markdown: `docs/models.md` shows it."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    from weft.jobs.embed.loading import ENCODERS
    from weft.models.families import FAMILIES

    loaded = set(ENCODERS.values())  # the classes that a folder of embeddings is loaded as
    for names in MODEL_MAPPING_NAMES.values():
        loaded |= {names} if isinstance(names, str) else set(names)
    rows = []
    for family in FAMILIES:
        heads = ", ".join(f"`{name}`" for name in family.heads) or "none"
        does = {
            "pack": True,
            "parallelize": family.on_ranks,
            "generate": family.has_cache,
            "stages": family.stages is not None,
            "embed": family.base in loaded,
            "registry": getattr(transformers, family.base)._supports_attention_backend,
        }
        cells = ["yes" if able else "no" for able in does.values()]
        rows.append(f"| `{family.base}` | {' | '.join(cells)} | {heads} |")
    titles = ["model", *does, "classes around it"]
    return "\n".join([f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *rows])


CHECKS: tuple[Callable[[], Check], ...] = (
    _python,
    _cpu,
    _native_core,
    _torch,
    _torch_names,
    _backends,
    _threads,
    _namespaces,
    _link_tools,
    _shared_memory,
    _cuda,
    _triton,
    _transformers,
)
