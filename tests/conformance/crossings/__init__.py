"""Covering array of optimizer options and of what else touches a model, in every binding.

``table`` has the factors that both bindings share and chooses cells; ``torch_script`` and ``keras_script`` are one
training script each, run by our optimizers and by the plain one; ``judge`` says what must hold.
"""
