"""Configurations as people write them in Python, by what makes them hard to interpret. Each is run and read, and the two compared.

``HEAD`` stands in for the classes of TorchTitan, with its fields and defaults, so that the programs run without it.
"""

from __future__ import annotations

HEAD = """\
import copy, dataclasses, os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer
from torchtitan.models.llama3 import model_registry

TP = 2

def base(tp=1, *, cp=1):
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=tp, context_parallel_degree=cp),
    )

"""

READ = {
    "defaults": "return Trainer.Config(hf_assets_path='x')",
    "written out": "return Trainer.Config(parallelism=ParallelismConfig(tensor_parallel_degree=4, expert_parallel_degree=2))",
    "calls another": "return base()",
    "calls another with arguments": "return base(2 * TP, cp=TP)",
    "sets a field": "c = base()\n    c.parallelism.tensor_parallel_degree = 8\n    return c",
    "sets a field of a default": "c = Trainer.Config()\n    c.parallelism.context_parallel_degree = 4\n    return c",
    "adds to a field": "c = base(2)\n    c.parallelism.tensor_parallel_degree *= 2\n    c.training.max_context_length //= 2\n    return c",
    "sets by name": "c = base()\n    for n in ('tensor', 'context'):\n        setattr(c.parallelism, f'{n}_parallel_degree', 2)\n    return c",
    "another section": "c = base(8)\n    c.parallelism = ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4)\n    return c",
    "replaced": "c = base(2)\n    return replace(c, parallelism=dataclasses.replace(c.parallelism, expert_parallel_degree=2))",
    "replaced is a copy": "c = base(2)\n    d = replace(c.parallelism, tensor_parallel_degree=8)\n    return c",
    "two names of one": "c = base()\n    p = c.parallelism\n    p.tensor_parallel_degree = 4\n    return c",
    "a shallow copy shares": "c = base()\n    d = copy.copy(c)\n    d.parallelism.tensor_parallel_degree = 4\n    return c",
    "a deep copy does not": "c = base()\n    d = copy.deepcopy(c)\n    d.parallelism.tensor_parallel_degree = 4\n    return c",
    "built and left": "c = base(2)\n    ParallelismConfig(tensor_parallel_degree=8)\n    return c",
    "options in a dict": "o = {'tensor_parallel_degree': 4}\n    o.update(context_parallel_degree=TP)\n    return Trainer.Config(parallelism=ParallelismConfig(**o))",
    "a choice that is known": "c = base(2)\n    if c.parallelism.tensor_parallel_degree > 1 and TP == 2:\n        c.parallelism.context_parallel_degree = 2\n    else:\n        c.parallelism.context_parallel_degree = 4\n    return c",
    "a change elsewhere": "c = base(2)\n    def change(d, by=2):\n        d.parallelism.tensor_parallel_degree *= by\n    change(c)\n    return c",
    "a change in a loop that ends early": "c = base(1)\n    for n in range(5):\n        if n == 3:\n            break\n        c.parallelism.tensor_parallel_degree = 2**n\n    return c",
    "a lambda": "f = lambda n: base(n)\n    return f(4)",
    "a partial": "return partial(base, cp=2)(4)",
    "a comprehension": "n = sum([i for i in range(4) if i % 2])\n    return base(n)",
    "a class of its own": "@dataclass(kw_only=True)\n    class Mine(Trainer.Config):\n        def __post_init__(self):\n            super().__post_init__()\n            self.parallelism.tensor_parallel_degree = 4\n    return Mine()",
    "a class with a default": "@dataclass(kw_only=True)\n    class Mine(Trainer.Config):\n        parallelism: ParallelismConfig = field(default_factory=lambda: ParallelismConfig(tensor_parallel_degree=8))\n    return Mine()",
    "a choice that matters not": "c = base(2)\n    if os.environ.get('NOTHING'):\n        c.hf_assets_path = 'y'\n    return c",
    "a check that may end it": "c = base(2)\n    if os.environ.get('NOTHING'):\n        raise ValueError\n    return c",
}
"""Programs that are read with the values that running them gives."""

REFUSED = {
    "a choice of the machine": "c = base()\n    if os.environ.get('NOTHING'):\n        c.parallelism.tensor_parallel_degree = 8\n    return c",
    "a return that may come early": "c = base()\n    def change(d):\n        if os.environ.get('NOTHING'):\n            return\n        d.parallelism.tensor_parallel_degree = 8\n    change(c)\n    return c",
    "a loop over what is not known": "c = base()\n    for n in os.environ:\n        p = c.parallelism\n        p.tensor_parallel_degree = 8\n    return c",
    "a loop's own name handed on": "c = base()\n    def change(d):\n        d.tensor_parallel_degree = 8\n    for n in os.environ:\n        p = c.parallelism\n        change(p)\n    return c",
    "a loop's own name set": "c = base()\n    for n in os.environ:\n        d = [c]\n        d.append(n)\n        d[0].parallelism.tensor_parallel_degree = 8\n    return c",
    "a loop that may end early": "c = base()\n    for n in range(4):\n        if os.environ.get('NOTHING'):\n            break\n        c.parallelism.tensor_parallel_degree = 2\n    return c",
    "handed to another file": "c = base()\n    tune(c)\n    return c",
    "a part handed to another file": "c = base()\n    tune([c.parallelism])\n    return c",
    "handed to it in a function": "c = base()\n    tune(lambda: c)\n    return c",
    "a number of the machine": "return base(int(os.environ.get('N', 2)))",
    "made by another file": "return tune(base())",
    "a section of another file": "c = base()\n    c.parallelism = tune()\n    return c",
    "options of another file": "return Trainer.Config(parallelism=ParallelismConfig(**tune()))",
    "set through another file": "c = base()\n    tune().tensor_parallel_degree = 8\n    return c",
    "a field set by a name": "c = base()\n    setattr(c.parallelism, os.environ.get('N', 'tensor_parallel_degree'), 8)\n    return c",
    "a try": "c = base()\n    try:\n        c.parallelism.tensor_parallel_degree = 8\n    except ValueError:\n        pass\n    return c",
    "a while": "c = base()\n    while c.parallelism.tensor_parallel_degree < 8:\n        c.parallelism.tensor_parallel_degree *= 2\n    return c",
    "decorated": "@tune\n    def mine():\n        return base(2)\n    return mine()",
    "a method that is not here": "c = base()\n    c.update(tensor_parallel_degree=8)\n    return c",
}
"""Programs with a degree that is known only when they run: refused, with the position."""
