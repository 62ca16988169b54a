"""What people look at: tables for terminals, and pages that open from disk without a network.

drawing   the frame of a page; timelines and curves as SVG
pipeline  simulated pipeline steps as a page
result    tables, the same in a terminal and on a page; what a benchmark returns, as JSON and as a page
"""

from weft.report.drawing import Figure, timeline_svg
from weft.report.result import Column, Headline, Report, Row, Table, timeline_page

__all__ = ["Column", "Figure", "Headline", "Report", "Row", "Table", "timeline_page", "timeline_svg"]
