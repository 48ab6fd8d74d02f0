"""What can be wrong with a model folder."""


class ModelFolderError(ValueError):
    """A model folder that cannot be used, with the reason and the way on."""
