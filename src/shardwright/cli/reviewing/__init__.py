"""The commands that compare plans: `diff`, `compare`, `lock` and `check`.

diff.py            `diff`
compare.py         `compare`
sides.py           what `diff` and `compare` compare: layouts, plans and locks
lock.py            `lock`
check.py           `check`
checked.py         the check of one lock
locked_request.py  from options to the request in a lock, and back
locked_program.py  the compiled program in a lock
saved_plan.py      a plan or a lock from a file
"""
