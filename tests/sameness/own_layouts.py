"""Layouts other than the presets: several roles at once, and cases that the presets do not cover."""

from __future__ import annotations

from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.files import parse_yaml

OWN_LAYOUTS = {
    "cp-tp": """
mesh: {fsdp: auto, context: 2, tensor: 2}
roles:
  fsdp:    fsdp
  context: context
  tensor:  {elsewhere: tensor, sequence_parallel: true}
""",
    "tp-whole-rows": """
mesh: {fsdp: auto, tensor: 2}
roles:
  fsdp:   fsdp
  tensor: tensor
""",
    "tp-whole-keys": """
mesh: {fsdp: auto, tensor: 4}
roles:
  fsdp:   fsdp
  tensor: {elsewhere: tensor, sequence_parallel: true}
rules:
  attention: {kv_heads: []}
""",
    "pp-kept": """
mesh: {stage: 2, fsdp: auto}
roles:
  stage: stage
  fsdp:  {elsewhere: fsdp, keep_gathered: true}
""",
    "pp-ep-kept": """
mesh: {stage: 2, fsdp: auto, expert: 2}
roles:
  stage:  stage
  fsdp:   {elsewhere: fsdp, keep_gathered: true}
  expert: {elsewhere: fsdp, moe: expert, keep_gathered: true}
""",
    "pp-tp": """
mesh: {stage: 2, fsdp: auto, tensor: 2}
roles:
  stage:  stage
  fsdp:   fsdp
  tensor: {elsewhere: tensor, sequence_parallel: true}
""",
    "pp-cp": """
mesh: {stage: 2, fsdp: auto, context: 2}
roles:
  stage:   stage
  fsdp:    fsdp
  context: context
""",
    "pp-ep": """
mesh: {stage: 2, fsdp: auto, expert: 2}
roles:
  stage:  stage
  fsdp:   fsdp
  expert: {elsewhere: fsdp, moe: expert}
""",
    "pp-ep-as-cp": """
mesh: {stage: 2, fsdp: auto, expert: 2}
roles:
  stage:  stage
  fsdp:   fsdp
  expert: {elsewhere: context, moe: expert}
""",
    "pp-ep-tp": """
mesh: {stage: 2, fsdp: auto, expert: 2, tensor: 2}
roles:
  stage:  stage
  fsdp:   fsdp
  expert: {elsewhere: fsdp, moe: expert}
  tensor: {elsewhere: tensor, sequence_parallel: true}
""",
    "pipe-last": """
mesh: {fsdp: auto, context: 2, pipe: 2}
roles:
  fsdp:    fsdp
  context: context
  pipe:    stage
""",
    "pp-ends": """
mesh: {stage: 2, fsdp: auto}
roles:
  stage: {elsewhere: stage, embedding: fsdp, logits: tensor}
  fsdp:  fsdp
""",
    "pp-ends-tied": """
mesh: {data: 1, stage: 2, fsdp: auto}
roles:
  data:  data
  stage: {elsewhere: stage, embedding: tensor, logits: tensor}
  fsdp:  fsdp
""",
    "pp-ends-tp": """
mesh: {stage: 2, fsdp: auto, tensor: 2}
roles:
  stage:  {elsewhere: stage, embedding: tensor, logits: fsdp}
  fsdp:   fsdp
  tensor: {elsewhere: tensor, sequence_parallel: true}
""",
    "pp-ends-ep-as-cp": """
mesh: {stage: 2, fsdp: auto, expert: 2}
roles:
  stage:  {elsewhere: stage, embedding: data, logits: tensor}
  fsdp:   fsdp
  expert: {elsewhere: context, moe: expert}
""",
    "pp-logits": """
mesh: {stage: 4, fsdp: auto, expert: 2}
roles:
  stage:  {elsewhere: stage, logits: context}
  fsdp:   fsdp
  expert: {elsewhere: fsdp, moe: expert}
""",
    "stored-over-idle": """
mesh: {fsdp: auto, spare: 2}
roles:
  fsdp:  fsdp
  spare: idle
rules:
  attention: {kv_heads: [fsdp, spare]}
  residual: {norm: [spare]}
""",
    "stored-by-rule": """
mesh: {fsdp: auto, expert: 2}
roles:
  fsdp:   fsdp
  expert: {elsewhere: context, moe: expert}
rules:
  router: {scores: [expert]}
""",
    "vocabulary-stored-by-rule": """
mesh: {fsdp: auto}
roles:
  fsdp: fsdp
rules:
  embedding: {vocab: [fsdp]}
""",
    "vocabulary-of-the-logits": """
mesh: {fsdp: auto, tensor: 2}
roles:
  fsdp:   fsdp
  tensor: {elsewhere: tensor, embedding: idle, sequence_parallel: true}
""",
    "ep-tp": """
mesh: {fsdp: auto, expert: 2, tensor: 2}
roles:
  fsdp:   fsdp
  expert: {elsewhere: fsdp, moe: expert}
  tensor: {elsewhere: tensor, sequence_parallel: true}
""",
    "ep-as-cp-tp": """
mesh: {fsdp: auto, expert: 2, tensor: 2}
roles:
  fsdp:   fsdp
  expert: {elsewhere: context, moe: expert}
  tensor: {elsewhere: tensor, sequence_parallel: true}
""",
    "ep-of-whole-tokens": """
mesh: {fsdp: auto, expert: 4}
roles:
  fsdp:   fsdp
  expert: {elsewhere: idle, moe: expert}
""",
    "zero1": """
mesh: {data: auto}
roles:
  data: {elsewhere: data, optimizer: shard}
""",
    "zero2": """
mesh: {data: auto}
roles:
  data: {elsewhere: data, optimizer: shard, gradients: shard}
""",
    "hsdp-zero1": """
mesh: {data: 2, fsdp: auto}
roles:
  data: {elsewhere: data, optimizer: shard}
  fsdp: fsdp
""",
    "hsdp-zero2": """
mesh: {data: 2, fsdp: auto}
roles:
  data: {elsewhere: data, optimizer: shard, gradients: shard}
  fsdp: fsdp
""",
    "zero-tp": """
mesh: {data: auto, replica: 2, tensor: 2}
roles:
  data:    {elsewhere: data, optimizer: shard, gradients: shard}
  replica: {elsewhere: data, optimizer: shard}
  tensor:  {elsewhere: tensor, sequence_parallel: true}
""",
    "stages-zero1": """
mesh: {stage: 2, data: auto}
roles:
  stage: stage
  data:  {elsewhere: data, optimizer: shard}
""",
    "zero-ep": """
mesh: {data: 2, fsdp: auto, expert: 2}
roles:
  data:   {elsewhere: data, optimizer: shard}
  fsdp:   fsdp
  expert: {elsewhere: context, moe: expert}
""",
    "kept": """
mesh: {fsdp: auto}
roles:
  fsdp: {elsewhere: fsdp, keep_gathered: true}
""",
    "kept-tp": """
mesh: {data: 2, fsdp: auto, tensor: 2}
roles:
  data:   {elsewhere: data, optimizer: shard}
  fsdp:   {elsewhere: fsdp, keep_gathered: true}
  tensor: {elsewhere: tensor, sequence_parallel: true}
""",
    "kept-ep": """
mesh: {fsdp: auto, expert: 2}
roles:
  fsdp:   {elsewhere: fsdp, keep_gathered: true}
  expert: {elsewhere: context, moe: expert, keep_gathered: true}
""",
    "ep-nodes": """
mesh: {fsdp: auto, node: 2, expert: 2}
roles:
  fsdp:   fsdp
  node:   {elsewhere: fsdp, moe: expert}
  expert: {elsewhere: fsdp, moe: expert}
move: {moe: two-hops}
""",
    "ep-nodes-as-cp": """
mesh: {fsdp: auto, node: 2, expert: 2}
roles:
  fsdp:   fsdp
  node:   {elsewhere: fsdp, moe: expert}
  expert: {elsewhere: context, moe: expert}
move: {moe: two-hops}
""",
    "ep-nodes-tp": """
mesh: {node: 2, expert: 2, tensor: 2}
roles:
  node:   {elsewhere: context, moe: expert}
  expert: {elsewhere: fsdp, moe: expert}
  tensor: {elsewhere: tensor, sequence_parallel: true}
move: {moe: two-hops}
""",
    "pp-ep-nodes": """
mesh: {stage: 2, fsdp: auto, node: 2, expert: 2}
roles:
  stage:  stage
  fsdp:   fsdp
  node:   {elsewhere: fsdp, moe: expert}
  expert: {elsewhere: fsdp, moe: expert}
move: {moe: two-hops}
""",
    "cp-ep": """
mesh: {fsdp: auto, context: 2, expert: 2}
roles:
  fsdp:    fsdp
  context: context
  expert:  {elsewhere: fsdp, moe: expert}
""",
}


def own_layout(name: str) -> Layout:
    return read_layout(parse_yaml(f"name: {name}\n{OWN_LAYOUTS[name].lstrip()}", f"{name}.yaml"))
