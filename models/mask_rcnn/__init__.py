"""Mask R-CNN, data-parallel over jaxhetero workers: ``python -m models.mask_rcnn --preset nuclei``."""
