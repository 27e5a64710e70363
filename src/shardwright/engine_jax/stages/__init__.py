"""One program for all stages of a pipeline. The core decides which layers a stage has, and what each device computes in each tick.

loop.py      the ticks of a step: both passes of every microbatch, and the permutes between stages
turns.py     when a device computes what
branches.py  a computation that a device does, or waits for the others
passes.py    a forward and a backward pass through the layers of one stage
kept.py      what a layer keeps of a live microbatch besides its input
gathered.py  weights that stay gathered through a step
ends.py      what one stage has of a microbatch besides its layers: masks, the embedding, the loss
"""
