"""What people look at: tables for terminals, and pages that open from disk without a network."""

from weft.report.drawing import Figure, timeline_page, timeline_svg
from weft.report.result import Headline, Report
from weft.report.table import Column, Table

__all__ = ["Column", "Figure", "Headline", "Report", "Table", "timeline_page", "timeline_svg"]
