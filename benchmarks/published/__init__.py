"""Training steps that others measured and published, beside their plans. ``python -m benchmarks.published`` writes docs/published.md.

steps/          one file for each source: where a step was published, what was measured, and the command that plans it
left_out.txt    the names of the steps that nothing may be fitted to; written once, before any was
steps.py        reads them, and the rule by which the names were drawn
"""
