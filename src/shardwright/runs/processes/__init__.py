"""Processes that meet, tell each other how far they are, and end together.

meeting.py     how they meet
channel.py     lines over a socket
hub.py         the first process, which hears of all others
group.py       what a process asks of the others
pace.py        who has not answered for how long
signals.py     Ctrl-C and SIGTERM
"""
