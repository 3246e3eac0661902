"""Framework-neutral part of the training scripts ``torch_models/resnet50.py`` and ``tf_models/resnet50.py``."""
