"""The one exception for a mistake that a user can mend: the command line prints its sentence and leaves with code 2."""


class MetaphraseError(ValueError):
    """A mistake in a file, a value or a call, told in one sentence that names it and says what would be right."""
