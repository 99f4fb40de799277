"""How large a draft tree may be, whoever asks for it: an option, a recipe or the config of an artifact. No library is imported."""

LIMITS = {"depth": (1, 64), "width": (1, 64), "nodes": (2, 256)}  # of options and of dynamic trees
MOST_PATHS = 1024  # of a static tree in a config
MOST_RANK = 1023  # of a child in it
