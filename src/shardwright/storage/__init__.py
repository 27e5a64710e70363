"""Where files are: a folder of this machine, or one of an object store, by its URL. Every failure is an OSError with its reason.

url.py      a folder or file of an object store by its URL, and the choice between it and a local path
client.py   the client of a store, from fsspec, and its errors as OSErrors
objects.py  lists, reads, writes and deletes objects of a store
asking.py   how often a store is asked before what seems missing or damaged is believed
system.py   what can be done with files: one type
local.py    files of this machine: its first implementation
store.py    files of a store: the second one
files.py    files by their places
"""
