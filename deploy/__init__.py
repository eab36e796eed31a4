"""Configurations for clusters, and their check."""
