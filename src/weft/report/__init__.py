"""What people look at: tables for terminals, and pages that open from disk without a network.

table     rows and columns, the same in a terminal and on a page
drawing   the frame of a page; timelines and curves as SVG
pipeline  simulated pipeline steps as a page
result    what a benchmark returns: rows, summary, headlines; as JSON and as a page
"""

from weft.report.drawing import Figure, timeline_page, timeline_svg
from weft.report.result import Headline, Report
from weft.report.table import Column, Row, Table

__all__ = ["Column", "Figure", "Headline", "Report", "Row", "Table", "timeline_page", "timeline_svg"]
