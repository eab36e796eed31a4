"""BERT, data-parallel over jaxhetero workers: ``python -m models.bert.prepare``, then ``python -m models.bert``."""
