"""The command line: `shardwright plan | compile | diff | lock | check | train | ckpt | import | export`.

main.py       which verb, how it ends: exit codes, errors, one JSON object
options.py    the verbs and their options, as data
values.py     what stands behind one option: counts, `fsdp=2,expert=4`, `attention=ring`
request.py    from the options to a request, and what was chosen because nobody said it
plan.py, compile.py, diff.py, lock.py, check.py, train.py, ckpt.py, import_.py, export.py    one verb each
saved_plan.py a plan as `plan --json` wrote it, or a lock
locked_request.py    from the options to what a lock asks, and back
checked.py    one lock, planned again
locked_program.py    and compiled again
import_options.py    the verbs `import` and `export` and their options
devices.py    simulated devices, said to JAX before it starts
"""
