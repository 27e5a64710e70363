"""Files that users write, read into values that remember where they stand; and one way to write a file of theirs.

Core and PyYAML only. Whatever is wrong with a file is one ``InputError`` that names the place.
"""

from shardwright.files.json_text import parse_json, read_json
from shardwright.files.replaced import replace_text
from shardwright.files.text import read_text
from shardwright.files.yaml_text import parse_yaml, read_yaml

__all__ = ["parse_json", "parse_yaml", "read_json", "read_text", "read_yaml", "replace_text"]
