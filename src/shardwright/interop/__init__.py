"""Declarations of other programs: MaxText's rules, TorchTitan's degrees, Hugging Face's configs.

layout_text.py    a layout as the text of a layout file
plan_command.py   a request as a command line of plan

They are resolved exactly as those programs resolve them. Each decision that they make silently is a finding.
None of their code is imported.
"""
