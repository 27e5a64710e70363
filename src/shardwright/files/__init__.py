"""Reads files that users write into values with their source positions, and replaces a file atomically.

Imports core and PyYAML only. Any fault of a file is one ``InputError`` that names the position.
"""

from shardwright.files.json_text import parse_json, read_json
from shardwright.files.replaced import replace_text
from shardwright.files.text import read_text
from shardwright.files.yaml_text import parse_yaml, read_yaml

__all__ = ["parse_json", "parse_yaml", "read_json", "read_text", "read_yaml", "replace_text"]
