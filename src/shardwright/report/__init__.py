"""Views for people of plans, differences, findings, checkpoints and runs. They only draw: nothing is decided here.

text/               columns, numbers, colours and widths
plan/               a plan: plan_view.py puts its sections together
compile/            a compiled program, compared with its plan
review/             the differences between two plans
interop/            files of other programs
checkpoint_view.py  the contents of a checkpoint
list_view.py         the names that options take
why_view.py          a tensor, and what decided where it lies
usage_view.py       the help of a verb, and a wrong command line
search_view.py      the answers of a search
search_compiled_view.py  the same, compiled
neighbours_view.py  what one change of a layout gains
run_progress.py     a run: a bar with loss, speed and time left
search_progress.py  a search: the best so far, and the time left
"""
