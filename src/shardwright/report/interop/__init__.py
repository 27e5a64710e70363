"""Views of imports from other programs, and findings for GitHub Actions.

import_views.py  a layout, degrees and ranks, a model's table
maxtext_view.py  a configuration of MaxText's
weights_view.py  weights that were imported or exported, and the progress of that
folders_view.py  a folder of another program that was imported or exported
annotations.py   findings as GitHub Actions commands
"""
