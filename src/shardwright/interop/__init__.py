"""Declarations of other programs, carried over: MaxText's rules, TorchTitan's degrees, Hugging Face's configs.

What they mean is worked out exactly as those programs do; every decision that they make in silence is a finding.
Nothing of theirs is imported.
"""
