"""The command line: `shardwright plan | compile | diff | lock | check | train | ckpt | import | export`.

main.py     which verb, how it ends: exit codes, errors, one JSON object
plan.py     `plan`
ckpt.py     `ckpt show` and `ckpt verify`
typed/      what a user typed, as values: options.py has the verbs and their options as data
running/    `train` and `compile`
reviewing/  `diff`, `lock` and `check`
interop/    `import` and `export`
"""
