"""The interpreted cases are collected only where Triton interprets: test_interpreted.py starts that process."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
