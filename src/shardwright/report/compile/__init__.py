"""The view of a compiled program, compared with its plan.

compile_view.py          its sections, in order
agreement_view.py        predicted and compiled collectives
compiled_memory_view.py  predicted and compiled memory
exposure_view.py         communication without a product beside it
compile_progress.py      the progress of a compiler, with the time
"""
