"""Plans against plans: `diff`, `lock` and `check`.

diff.py            `diff`
lock.py            `lock`
check.py           `check`
checked.py         one lock, planned again
locked_request.py  from the options to what a lock asks, and back
locked_program.py  the compiled part of a lock
saved_plan.py      a plan or a lock from a file
"""
