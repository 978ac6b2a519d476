"""The configuration, by the name under which it stands beside this folder's files on the Hub (saving a model puts the
real file in this one's place)."""

from metaphrase.configuration.configuration_metaphrase import MetaphraseConfig

__all__ = ["MetaphraseConfig"]
