"""DeepSeek-V3 (arXiv:2412.19437): latent attention, many small experts with a shared one, dense first layers.

sizes.py  its named sizes
table.py  its table
"""
