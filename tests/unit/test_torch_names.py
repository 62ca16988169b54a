"""Private names of torch: they do what they should, and are used in one file only."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from weft import _torch, _torch_check
from weft.cli import doctor

# ---- they do what they should ----------------------------------------------------------------------------------------


def functions():
    return {name for name, value in vars(_torch).items() if inspect.isfunction(value) and not name.startswith("_")
            and value.__module__ == _torch.__name__}  # fmt: skip


def test_all_of_them_are_checked():
    assert functions() <= set(_torch_check._CHECKS)


def test_this_torch_has_all_of_them():
    found = _torch_check.self_check()
    assert [finding for finding in found if not finding.ok] == []
    assert {finding.name for finding in found} == set(_torch_check._CHECKS)


def test_doctor_says_what_is_missing(monkeypatch):
    assert doctor._torch_names().status == "ok"
    monkeypatch.setattr(_torch, "version_of", lambda tensor: 0)
    monkeypatch.delattr(dist.distributed_c10d, "_resolve_process_group")
    check = doctor._torch_names()
    assert check.status == "broken"
    assert "group_by_name: torch.distributed.distributed_c10d lacks _resolve_process_group" in check.detail
    assert "version_of: a write does not count up Tensor._version" in check.detail
    assert "pip install torch==" in check.remedy
    assert not doctor.is_healthy([check])


@pytest.fixture
def world():
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_groups(world):
    assert isinstance(_torch.group_store(world), dist.Store)
    assert _torch.group_by_name(world.group_name) is world
    assert _torch.group_timeout(world, "cpu") == 1800.0
    made = _torch.cpu_group("mine", [0], timeout=7.0)
    assert _torch.group_timeout(made, "cpu") == 7.0
    assert dist.get_process_group_ranks(made) == [0]
    with pytest.raises(KeyError):
        _torch.group_store(object())


def test_dtensors(world):
    mesh = init_device_mesh("cpu", (1, 1))
    x = torch.randn(4, 4)
    cut = DTensor.from_local(x, mesh, [Shard(1), Replicate()])
    assert torch.equal(_torch.local_tensor(cut), x)
    assert _torch.local_tensor(x) is x
    assert _torch.strides_are_order(cut) in (True, False)
    assert set(_torch.shard_order(cut)) <= {1}
    assert issubclass(_torch.strided_shard(), object)


def test_names_of_ops():
    from weft.kernels import matmul

    assert _torch.op_name(matmul._pack) == "weft::pack"


# ---- in one file only ------------------------------------------------------------------------------------------------

PACKAGE = Path(_torch.__file__).parent
# Private attributes of what torch hands out, besides those that its classes show.
_OF_OBJECTS = {"_cdata", "_qualname", "_input_metadata", "_timeout", "_current_level", "_dynamo_marked_constant",
               "_torchdynamo_disable", "_local_tensor", "_spec"}  # fmt: skip
_CLASSES = (torch.Tensor, torch.UntypedStorage, torch.nn.Module, DTensor, dist.ProcessGroup, ColwiseParallel)
PRIVATE = _OF_OBJECTS | {
    name
    for kind in _CLASSES
    for name in {*dir(kind), *getattr(kind, "__annotations__", {})}
    if name.startswith("_") and not name.startswith("__")
}
_HOOKS = {"_forward_pre_hooks", "_backward_pre_hooks", "_backward_hooks", "_forward_hooks"}
# What is still elsewhere. To be made shorter, not longer.
# What compares all of a module's insides by name, and styles that torch means to be derived from.
ALLOWED = {
    "overlap/styles.py": {"_apply", "_partition_linear_fn"},
    "models/modules.py": {"_modules", "_parameters", "_buffers", *_HOOKS},
    "models/twin.py": {"_modules", "_parameters", "_buffers"},
}


def private(name):
    return name.startswith("_") and not name.startswith("__")


class Finder(ast.NodeVisitor):
    """Collects the private names of torch in a module: imported, reached from what was imported, or on its objects."""

    def __init__(self, tree):
        self.found = set()
        self.imported = {"torch"}
        self.own = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                    and isinstance(n.value, ast.Name) and n.value.id == "self"}  # fmt: skip
        self.own |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)} - {"_apply"}
        self.own |= {
            n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        }
        self.visit(tree)

    def visit_Import(self, node):
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self.imported.add((alias.asname or alias.name).split(".")[0])
                self.found |= set(filter(private, alias.name.split(".")))

    def visit_ImportFrom(self, node):
        if (node.module or "").split(".")[0] == "torch":
            self.imported |= {alias.asname or alias.name for alias in node.names}
            self.found |= set(filter(private, [*(node.module or "").split("."), *(a.name for a in node.names)]))

    def visit_Attribute(self, node):
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        from_torch = isinstance(root, ast.Name) and root.id in self.imported
        if private(node.attr) and (from_torch or (node.attr in PRIVATE and node.attr not in self.own)):
            self.found.add(node.attr)
        self.generic_visit(node)

    def visit_FunctionDef(self, node):
        if node.name == "_apply" and any(a.arg == "device_mesh" for a in node.args.args):
            self.found.add("_apply")  # a style of torch's, overridden
        self.generic_visit(node)

    def visit_Constant(self, node):
        """A name by which somebody reads an attribute, a dict of attributes, or a module."""
        if isinstance(node.value, str):
            if node.value in PRIVATE and node.value not in self.own:
                self.found.add(node.value)
            elif node.value.startswith("torch.") and " " not in node.value:
                self.found |= set(filter(private, node.value.split(".")))


def names_in(source):
    return Finder(ast.parse(source)).found


@pytest.mark.parametrize(
    ("source", "names"),
    [("import torch\nx = torch._C._get_tracing_state()", {"_C", "_get_tracing_state"}),
     ("import torch.distributed as dist\ndist.distributed_c10d._world.pg_map", {"_world"}),
     ("from torch.distributed.tensor.placement_types import _StridedShard", {"_StridedShard"}),
     ("from torch._guards import detect_fake_mode", {"_guards"}),
     ("from torch.autograd import forward_ad\nforward_ad._current_level", {"_current_level"}),
     ("def f(p):\n    return p._version", {"_version"}), ("def f(m):\n    return m._parameters", {"_parameters"}),
     ("class A:\n    def f(self, a):\n        self._version = 1\n        return a._version", set()),
     ("def f(x):\n    return getattr(x, '_local_tensor', x)", {"_local_tensor"}),
     ("import_module('torch._dynamo.config')", {"_dynamo"}), ("getLogger('torch.a._redistribute')", {"_redistribute"}),
     ("def f(x):\n    return x._mine", set()), ("import torch\ntorch.nn.Linear(1, 2)", set())],
)  # fmt: skip
def test_the_finder(source, names):
    assert names_in(source) == names


def test_nobody_else_uses_them():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        names = names_in(path.read_text(encoding="utf-8")) - ALLOWED.get(where, set())
        if names and where not in ("_torch.py", "_torch_check.py"):
            found[where] = names
    assert found == {}, "go through weft._torch"
