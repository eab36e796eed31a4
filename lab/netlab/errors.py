class LabError(Exception):
    """The lab cannot be built, or one of its operations failed."""
