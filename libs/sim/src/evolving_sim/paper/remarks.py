"""Where simulated values part from the paper's, and why: written by people who looked at the whole run.

By table and row of `tables.json`; row "" is about the table as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

REMARKS: Mapping[tuple[str, str], str] = {}
