"""How large a draft tree may be, whoever asks for it: an option, a recipe or the config of an artifact. No library is imported."""

LIMITS = {"depth": (1, 64), "width": (1, 64), "nodes": (2, 256)}  # of options and of dynamic trees
MOST_PATHS = 1024  # of a static tree in a config
MOST_RANK = 1023  # of a child in it
MOST_RANKED = 16  # candidates of a node, and nodes of a level, that the kernels take
MOST_STORED = 4096  # candidates of a tree that they take: 16 levels of 16 times 16
