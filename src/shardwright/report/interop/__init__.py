"""Views of imports from other programs, and findings for GitHub Actions.

import_views.py  a layout, degrees and ranks, a model's table
maxtext_view.py  a configuration of MaxText's
weights_view.py  weights that were imported or exported, and the progress of that
annotations.py   findings as GitHub Actions commands
"""
