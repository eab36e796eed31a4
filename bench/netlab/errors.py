class LabError(Exception):
    """The lab cannot be built, or not do what was asked of it."""
