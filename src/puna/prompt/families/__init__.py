from puna.prompt.families.family import FAMILIES

__all__ = ["FAMILIES"]
