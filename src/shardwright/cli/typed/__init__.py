"""Command-line options as values, and the output of a command.

options.py  the options of a plan and of a run, as data
verbs.py    every verb with its arguments and options
folder_verbs.py  `ckpt import` and `ckpt export` of folders of other programs
model_file.py  MODEL as a model folder of Hugging Face
values.py   the value of one option: `fsdp=2,expert=4`
request.py  from the options to a request
devices.py  the devices that are there, and simulated ones
written.py  options back to a command line, as `train --resume RUN` types them
extras.py   the error for a package of an extra that is not installed
output.py   text for people, or one JSON object
"""
