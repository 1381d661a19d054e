"""Reports: what a search found, as pandas frames (CSV), Markdown, and one self-contained HTML page.

Importing this package needs pandas; `pip install 'sparselift[report]'` brings it.
"""

from __future__ import annotations

from sparselift.errors import MissingExtraError

try:
    from sparselift.report.frames import knobs_frame, nodes_frame, single_changes_frame, tables_frame, times_frame, trials_frame
    from sparselift.report.write import write
except ModuleNotFoundError as error:
    if error.name != "pandas":
        raise
    raise MissingExtraError("reports need pandas: pip install 'sparselift[report]'") from error

__all__ = ["knobs_frame", "nodes_frame", "single_changes_frame", "tables_frame", "times_frame", "trials_frame", "write"]
