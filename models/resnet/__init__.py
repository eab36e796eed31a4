"""ResNet image classification, data-parallel over jaxhetero workers: ``python -m models.resnet --preset mnist``."""
