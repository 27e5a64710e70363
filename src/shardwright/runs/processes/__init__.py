"""The processes of one run: they join, exchange values and progress, and end together.

rendezvous.py  joining at process 0
channel.py     messages over a socket
hub.py         the thread of process 0 that all processes are connected to
group.py       what a process can do with the others: exchange a value, stop, fail
pace.py        heartbeats, and which process is silent for too long
replicas.py    what all must hold alike, compared before a save
signals.py     Ctrl-C and SIGTERM
"""
