"""Reads files that users write into values with their source positions, and replaces a file atomically.

text.py       the text of a file, and errors that point into it
yaml_text.py  YAML to values with line and column
json_text.py  JSON to values
toml_text.py  TOML to values
scalar.py     the value of a plain scalar in YAML
replaced.py   a file replaced atomically

Imports core and PyYAML only. Any fault of a file is one ``InputError`` that names the position.
"""

from shardwright.files.json_text import parse_json, read_json
from shardwright.files.replaced import replace_text
from shardwright.files.text import read_text
from shardwright.files.yaml_text import parse_yaml, read_yaml

__all__ = ["parse_json", "parse_yaml", "read_json", "read_text", "read_yaml", "replace_text"]
