"""Seconds of collectives, of products, and of a step.

collectives.py  seconds of one collective, in closed form
flops.py        what one device computes in a step
precision.py    seconds of products under a recipe, and bytes of quantization
step.py         the time of a step: compute and exposed communication
pipeline.py     the time of a step in stages, by their timetable
"""
