"""docs/models.md shows what the code says: `weft models` prints its table."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from typer.testing import CliRunner

from weft.cli.app import app
from weft.models.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_table_is_current() -> None:
    printed = CliRunner().invoke(app, ["models"]).stdout
    assert printed.count("\n") == len(FAMILIES) + 2
    assert printed in PAGE.read_text(encoding="utf-8"), "put what `weft models` prints into docs/models.md"
