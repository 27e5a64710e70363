"""Tests, mirroring src/shardwright."""
