"""The command line: `shardwright plan | search | compile | diff | compare | lock | check | list | explain | train | calibrate | ckpt | import | export`.

main.py     the entry point: verbs, exit codes, errors
plan.py     `plan`
listing.py  `list`
explain.py  `explain`
pages.py    the page of a finding's code
ckpt.py     `ckpt show`, `verify`, `reshard`, `import` and `export`
arguments/  the grammar of a command line, its help, and what is said of a wrong one
typed/      the options of every verb, as data, and how they become a request
running/    `train` and `compile`
searching/  `search`
reviewing/  `diff`, `compare`, `lock` and `check`
interop/    `import` and `export`
"""
