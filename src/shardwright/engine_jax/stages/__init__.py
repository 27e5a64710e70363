"""One program for all stages of a pipeline. The core decides which layers a stage has, and what each device computes in each tick.

loop.py    the ticks of a step: both passes of every microbatch, and the permutes between stages
passes.py  a forward and a backward pass through the layers of one stage
ends.py    what one stage has of a microbatch besides its layers: masks, the embedding, the loss
"""
