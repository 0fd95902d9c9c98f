"""Proves the reference. Runs in any of these ways, about a minute and a half on one core:

    python3 tests/reference/test_reference.py
    python3 -m unittest discover -s tests/reference
"""

from __future__ import annotations

import unittest

from cases_bundles import GeneratedBundles
from cases_files import Checkpoints, KdtrFile, NumberFormats
from cases_goldens import DraftingGoldens, PublishedGoldens
from cases_model import Attention, Configs, Rope, Router
from cases_tree import Acceptance, DraftTrees, DrafterContexts

__all__ = ["Acceptance", "Attention", "Checkpoints", "Configs", "DraftTrees", "DrafterContexts",
           "DraftingGoldens", "GeneratedBundles", "KdtrFile", "NumberFormats", "PublishedGoldens",
           "Rope", "Router"]

if __name__ == "__main__":
    unittest.main(verbosity=2)
