"""The code of README.md and docs/*.md runs as it stands there. `docs_pages` says how blocks are marked."""

import socket
import subprocess
import sys
from importlib import import_module

import pytest
from docs_pages import Block, blocks, imported, pages, run_page, weft, worlds
from harness import run_ranks

PAGES = pages()
SECONDS = 100  # a page may take; a few are enough


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path):
    for world in worlds(PAGES[page]):
        run_ranks(run_page, max(world, 1), PAGES[page], world, str(tmp_path), free_port(), timeout=SECONDS)
    for block in PAGES[page]:
        if block.language == "python":  # also where it does not run here
            for module, name in imported(block):
                assert hasattr(import_module(module), name), f"{page}:{block.line}: {module} has no {name}"
        if block.is_script:
            script = tmp_path / f"line{block.line}.py"
            script.write_text(block.code)
            check([sys.executable, str(script)], tmp_path, f"{page}:{block.line}")
        for arguments in block.commands:
            check(weft(arguments), tmp_path, f"{page}:{block.line}: weft {' '.join(arguments)}")


def check(command, folder, what):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{what} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


# ---- how pages are read ----------------------------------------------------------------------------------------------

TEXT = """# A page

```python
a = 1
```

<!-- runs: ranks=2 -->
```python
b = a
```
<!-- runs: no: it needs a GPU -->
```python
c = nothing
```

- a list

  ```
  $ weft doctor   # says what is there
  weft plan reshard \\
    --shape 1,2
  make test
  ```
```text
weft is no command here
```
<!-- runs: script -->
```python
d = 4
```
"""


def test_blocks_and_their_marks():
    found = blocks("page.md", TEXT)
    assert [(b.line, b.language, b.ranks, b.is_script, b.reason) for b in found] == [
        (4, "python", 0, False, None),
        (9, "python", 2, False, None),
        (13, "python", 0, False, "it needs a GPU"),
        (19, "", 0, False, None),
        (25, "text", 0, False, None),
        (29, "python", 0, True, None),
    ]
    assert [b.commands for b in found] == [[], [], [], [["doctor"], ["plan", "reshard", "--shape", "1,2"]], [], []]
    assert worlds(found) == [2]
    assert worlds(found[:1]) == [0]
    assert worlds(found[2:]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [("<!-- runs: often -->\n```python\n```\n", "unknown mark 'often'"),
     ("<!-- runs: no: x -->\n\n```\n```\n", "no fence"), ("<!-- runs: no -->\n```\n```\n", "unknown mark 'no'")],
)  # fmt: skip
def test_marks_that_mean_nothing_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        blocks("page.md", text)


def test_a_page_has_one_namespace_and_its_errors_name_its_lines(tmp_path):
    page = [Block("page.md", 3, "python", "a = 1\n"), Block("page.md", 7, "python", "import torch.distributed as dist\n"
            "assert a == 1 and not dist.is_initialized()\n")]  # fmt: skip
    run_ranks(run_page, 1, page, 0, str(tmp_path), free_port())
    with pytest.raises(Exception, match=r'(?s)File "page.md", line 12.*raise KeyError\(a\)'):
        run_ranks(run_page, 1, [*page, Block("page.md", 12, "python", "raise KeyError(a)\n")], 0, str(tmp_path), 0)
    ranks = [Block("page.md", 2, "python", "import torch.distributed as dist\nassert dist.get_world_size() == 2\n", 2)]
    run_ranks(run_page, 2, ranks, 2, str(tmp_path), free_port())
    own = [Block("page.md", 2, "python", "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
           "assert dist.get_world_size() == 2\n", 2)]  # fmt: skip
    run_ranks(run_page, 2, own, 2, str(tmp_path), free_port())
