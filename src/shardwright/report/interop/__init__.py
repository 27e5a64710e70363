"""Views of imports from other programs, and findings for GitHub Actions.

import_views.py  a layout, degrees and ranks, a model's table
maxtext_view.py  a configuration of MaxText's
annotations.py   findings as GitHub Actions commands
"""
