"""What a user typed, as values; and how an answer is written.

options.py  the verbs and their options, as data
values.py   lists behind one option
request.py  from the options to a request
devices.py  simulated devices, said to JAX before it starts
extras.py   what is installed with an extra
output.py   text for people, or one JSON object
"""
