"""How plans, differences, findings and checkpoints look to people. Text in, text out; nothing is decided here.

text/               words, columns and colours
plan/               a plan: plan_view.py has its parts one under another
compile/            what a compiler made of a plan
review/             what moved between two plans
interop/            files of other programs
checkpoint_view.py  what a checkpoint holds
run_progress.py     a run: a bar with loss, speed and time left
"""
