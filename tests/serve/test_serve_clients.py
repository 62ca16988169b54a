"""Other people's clients, and the commands of the docs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from servers import Serving

from weft.jobs.embed import Encoder

DOCS = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
COMMANDS = [
    command
    for block in re.findall(r"```sh\n(.*?)```", DOCS, re.S)
    for command in block.replace("\\\n", " ").splitlines()
    if command.startswith("curl")
]


def wanted(folder: Path, texts: list[str]) -> bytes:
    encoder = Encoder(folder)
    return encoder.embed(encoder.tokenize(texts)).numpy().tobytes()


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_the_client_of_openai(server: Serving, folders: dict[str, Path], form: str | None) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    options = {} if form is None else {"encoding_format": form}
    answer = client.embeddings.create(model="unit", input=["the fox", "a"], **options)
    assert answer.usage.prompt_tokens == 11
    rows = [row.embedding for row in answer.data]
    if form == "base64":
        import base64

        found = b"".join(base64.b64decode(row) for row in rows)
    else:
        found = np.array(rows, np.float32).tobytes()
    assert found == wanted(folders["unit"], ["the fox", "a"])
    assert next(iter(client.models.list())).id == "unit"
    with pytest.raises(openai.BadRequestError, match="cannot be empty"):
        client.embeddings.create(model="unit", input=[])
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.embeddings.create(model="other", input="a")


def test_langchain(server: Serving, folders: dict[str, Path]) -> None:
    library = pytest.importorskip("langchain_openai")
    client = library.OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key="none", model="unit", check_embedding_ctx_length=False
    )
    rows = client.embed_documents(["the fox", "a"])
    assert np.array(rows, np.float32).tobytes() == wanted(folders["unit"], ["the fox", "a"])
    assert np.array(client.embed_query("a"), np.float32).tobytes() == wanted(folders["unit"], ["a"])


def test_the_docs_have_commands() -> None:
    routes = {"/v1/embeddings", "/embed", "/rerank", "/v2/rerank", "/tokenize", "/similarity", "/predict", "/health"}
    assert routes <= {path for command in COMMANDS for path in routes if f"8080{path} " in f"{command} "}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_docs(server: Serving, command: str) -> None:
    run = command.replace("localhost:8080", f"127.0.0.1:{server.port}").replace(
        "curl ", "curl --fail-with-body -sS ", 1
    )
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
