"""What a compiler made of a plan, as people see it.

compile_view.py          its parts, one under another
agreement_view.py        predicted beside compiled
compiled_memory_view.py  memory beside the plan's
compile_progress.py      what a compiler does, and for how long
"""
