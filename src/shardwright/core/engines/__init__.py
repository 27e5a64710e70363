"""What each engine does otherwise, as data: the core reads these properties, and asks for no engine by its name.

properties.py  the properties that an engine has, each a behaviour that another engine could share
engines.py     the engines by name, with the values of each
"""
